"""Creates the environments of engines and the converted checkpoints, both once, in the benchmark's folder.

A file marks a complete folder. A folder without this file is created again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from tests.benchmarks.engines.catalogue import ENGINES, Engine, Variant

DRIVERS = Path(__file__).parent / "drivers"
DONE = ".complete"
LOG_TAIL_CHARS = 400
# No engine may use a network or report its use, and no engine finds this repository's packages.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
HIDDEN = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")


class Absent(Exception):
    """Raised if an engine cannot be installed, cannot read the checkpoint or does not start. The message is the reason."""


def environ(**more: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in HIDDEN} | OFFLINE | more


def run(command: list[str], log: Path, failure: str, env: dict[str, str] | None = None) -> None:
    """Runs a command with its output in `log`.

    Raises:
        Absent: the command failed. The message has `failure` and the end of the log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False, env=env)
    if done.returncode:
        raise Absent(f"{failure} (status {done.returncode}): {tail(log)}")


def tail(log: Path) -> str:
    """Returns the end of a log as one line."""
    return " ".join(log.read_text(errors="replace")[-LOG_TAIL_CHARS:].split())


def install(name: str, folder: Path, pip_flags: Sequence[str] = ()) -> Path:
    """Returns the interpreter of an engine's environment, and installs the environment if it is missing or has other versions.

    Raises:
        Absent: pip failed.
    """
    engine, place = ENGINES[name], folder / name
    python, done = place / "bin" / "python", place / DONE
    wanted = json.dumps([engine.requirements, engine.removed, engine.alias])
    if done.is_file() and done.read_text() == wanted:
        return python
    print(f"installing {engine.title} into {place}", file=sys.stderr)
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, with_pip=True)
    pip, log = [str(python), "-m", "pip", "--disable-pip-version-check"], folder / "logs" / f"install-{name}.log"
    run([*pip, "install", *pip_flags, *engine.requirements], log, "pip could not install it", environ())
    if engine.removed:
        command = [*pip, "uninstall", "-y", *engine.removed]
        run(command, log.with_suffix(".removed.log"), "pip could not remove packages", environ())
    if engine.alias:
        copy_metadata(next((place / "lib").glob("python3*/site-packages")), *engine.alias)
    done.write_text(wanted)
    return python


def copy_metadata(packages: Path, distribution: str, name: str, version: str) -> None:
    """Writes metadata with a name and version that a distribution's code looks up, and with the distribution's entry points."""
    (origin,) = packages.glob(f"{distribution.replace('-', '_')}-*.dist-info")
    copy = packages / f"{name}-{version}.dist-info"
    copy.mkdir()
    (copy / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if (points := origin / "entry_points.txt").is_file():
        shutil.copy(points, copy)


def converted(variant: Variant, python: Path, model: Path, folder: Path) -> Path:
    """Returns the folder that the variant's engine reads: the checkpoint, or a conversion of it that is made if missing.

    Raises:
        Absent: the conversion failed.
    """
    engine = ENGINES[variant.engine]
    if not engine.formats:
        return model
    out = folder / "models" / f"{model.name}-{fingerprint(model)}" / f"{variant.engine}-{engine.formats[variant.bits]}"
    if not (out / DONE).is_file():
        print(f"converting {model} for {variant.label}", file=sys.stderr)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        command = convert_command(engine, variant.bits, python, model, out)
        run(command, folder / "logs" / f"convert-{out.name}.log", "the conversion failed", environ())
        (out / DONE).touch()
    return out


def convert_command(engine: Engine, bits: int, python: Path, model: Path, out: Path) -> list[str]:
    places = {"python": python, "bin": python.parent, "drivers": DRIVERS, "model": model, "out": out}
    return [part.format(**places, format=engine.formats[bits]) for part in engine.convert]


def fingerprint(model: Path) -> str:
    """Returns a short hash of the checkpoint's config, and of the sizes and times of its files of weights."""
    digest = sha256((model / "config.json").read_bytes())
    for file in sorted(model.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())
    return digest.hexdigest()[:8]
