"""Completes the import package rootstock_llm in a source tree: python release/package.py [links] [protos].

- links: links to the folders services/ and kernels/. Needs only the standard library.
- protos: rootstock_llm/protos/, the Python modules of protos/. Needs grpcio-tools.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "rootstock_llm"
SOURCES = ("services", "kernels")
PROTOS = Path("protos")  # folder of the .proto files, relative to the root of the source tree
# Package from which generated modules import each other. protoc writes rootstock.v1, the folder of the .proto files; generate()
# replaces it by rootstock_llm.protos.
GENERATED_IMPORT = re.compile(r"\brootstock\.v1(?= import|\.\w+_pb2)")


def link(root: Path) -> None:
    """Links the source folders into the package. Existing links and folders stay."""
    for name in SOURCES:
        path = root / PACKAGE / name
        if not path.exists():
            path.symlink_to(Path("..") / name, target_is_directory=True)


def generate(root: Path, folder: Path) -> None:
    """Writes Python modules for all .proto files in root/protos to `folder`. Raises CalledProcessError if protoc refuses one."""
    files = sorted(str(path.relative_to(root)) for path in (root / PROTOS).rglob("*.proto"))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        outputs = [f"--{kind}_out={temporary}" for kind in ("python", "pyi", "grpc_python")]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *files], cwd=root, check=True)
        for path in Path(temporary).rglob("*.py*"):
            (folder / path.name).write_text(GENERATED_IMPORT.sub(f"{PACKAGE}.protos", path.read_text()))
    (folder / "__init__.py").write_text('"""Generated from protos/ by release/package.py."""\n')


if __name__ == "__main__":
    tree = Path(__file__).resolve().parents[1]
    wanted = sys.argv[1:] or ["links", "protos"]
    if "links" in wanted:
        link(tree)
    if "protos" in wanted:
        generate(tree, tree / PACKAGE / "protos")
