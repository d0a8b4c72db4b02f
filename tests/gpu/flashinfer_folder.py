"""Makes a small folder with FlashInfer for a machine without a network or a compiler.

    python -m tests.gpu.flashinfer_folder --out .fi --modules build/aot WHEEL...

The sources of compiled kernels are omitted. Files that the library reads at its import, or when it searches for a compiled
module, are copied. Other wheels are unpacked completely. The user puts the folder on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

LIBRARY = "flashinfer_python-"
COMPILED = "flashinfer/data/aot"  # folder in which the library searches for compiled modules, NAME/NAME.so
LEFT_OUT = ("flashinfer/data/cutlass/*", "flashinfer/data/cccl/*", "flashinfer/data/spdlog/*")
SOURCES = "flashinfer/data/csrc/*"
KEPT_SOURCES = ("batch_prefill*", "batch_decode*", "*.jinja", "*.h", "*.inc", "*tvm_ffi*")


def is_kept(name: str) -> bool:
    """Returns whether a file of FlashInfer's wheel is unpacked."""
    if any(fnmatch(name, pattern) for pattern in LEFT_OUT):
        return False
    last = name.rpartition("/")[2]
    return not fnmatch(name, SOURCES) or any(fnmatch(last, pattern) for pattern in KEPT_SOURCES)


def unpack(wheel: Path, out: Path) -> int:
    """Unpacks a wheel to `out`. For FlashInfer's wheel, unpacks only the files for which is_kept() is true.

    Returns:
        Compressed size of the unpacked files in bytes.

    Raises:
        BadZipFile: the wheel is not a zip file.
        OSError: the wheel is not readable, or `out` is not writable.
    """
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if not wheel.name.startswith(LIBRARY) or is_kept(info.filename)]
        archive.extractall(out, members)
    return sum(info.compress_size for info in members)


def add_modules(modules: Path, out: Path) -> list[str]:
    """Copies compiled modules to the library's folder and returns their names. Raises ValueError if the folder has no modules."""
    found = sorted(modules.glob("*/*.so"))
    if not found:
        raise ValueError(
            f"--modules {modules} has no NAME/NAME.so; compile the modules by"
            " rootstock_llm.services.worker.exec.attention.flashinfer_prebuild --out"
        )
    for module in found:
        place = out / COMPILED / module.parent.name / module.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(module, place)
    return [module.stem for module in found]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="flashinfer_folder", description="Copies FlashInfer without kernel sources to a folder."
    )
    parser.add_argument("wheels", nargs="+", type=Path, help="wheels of FlashInfer and of packages that the machine lacks")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; its content is deleted first")
    parser.add_argument("--modules", type=Path, help="folder of compiled modules that flashinfer_prebuild --out has written")
    options = parser.parse_args(argv)
    try:
        shutil.rmtree(options.out, ignore_errors=True)
        for wheel in options.wheels:
            print(f"{unpack(wheel, options.out):>12,} bytes  {wheel.name}")
        for name in add_modules(options.modules, options.out) if options.modules is not None else ():
            print(f"{(options.out / COMPILED / name / f'{name}.so').stat().st_size:>12,} bytes  {name}")
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        print(f"flashinfer_folder: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
