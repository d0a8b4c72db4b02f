"""python -m release: writes the wheel, the chart, the images and their checksums to a folder. Nothing is pushed.

Everything is built from a copy of the files that git tracks, so ignored files of the working tree reach no artifact.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import helm_python

from rootstock_llm.services import __version__

ROOT = Path(__file__).resolve().parents[1]
# Images that are built by default. worker-cuda is built only on request, because compiling its kernels takes hours.
IMAGES = ("gateway", "tokenizer", "detokenizer", "worker")
SUMS = "SHA256SUMS"
PART_BYTES = 1 << 20  # bytes of a file that are hashed at a time


class ReleaseRefused(Exception):
    """The working tree or the target folder is not suitable for a release. The message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A program that builds images from docker/Dockerfile."""

    program: str  # "buildah" or "docker"

    def build(self, source: Path, target: str, image: str, revision: str, arguments: Sequence[str]) -> list[str]:
        """Returns the command that builds the stage `target` of the Dockerfile in `source` as `image`.

        Args:
            arguments: further build arguments, as NAME=VALUE.
        """
        values = [f"VERSION={__version__}", f"REVISION={revision}", *arguments]
        flags = [word for value in values for word in ("--build-arg", value)]
        layers = ["--layers"] if self.program == "buildah" else []  # caches the stages that several targets share
        dockerfile = str(source / "docker" / "Dockerfile")
        return [self.program, "build", *layers, "--file", dockerfile, "--target", target, "--tag", image, *flags, str(source)]

    def save(self, image: str, archive: Path) -> list[str]:
        """Returns the command that writes an image to an archive which `docker load` reads."""
        if self.program == "docker":
            return ["docker", "save", "--output", str(archive), image]
        return ["buildah", "push", image, f"docker-archive:{archive}:{image}"]


def find_engine() -> Engine | None:
    return next((Engine(program) for program in ("buildah", "docker") if shutil.which(program)), None)


def export(folder: Path) -> None:
    """Copies the tracked files of the working tree to a folder."""
    listed = _output("git", "ls-files", "-z").split("\0")
    for name in filter(None, listed):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():  # git lists a file also if its deletion is not committed
            shutil.copy2(ROOT / name, target, follow_symlinks=False)


def build_wheel(source: Path, out: Path, isolated: bool) -> None:
    """Builds the wheel of a source tree.

    Args:
        isolated: Whether pip downloads the build tools that pyproject.toml names. If not, pip uses those of this environment.
    """
    flags = [] if isolated else ["--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", *flags]
    subprocess.run([*command, "--wheel-dir", str(out), str(source)], check=True)


def build_images(source: Path, out: Path, targets: Sequence[str], revision: str, arguments: Sequence[str]) -> None:
    engine = find_engine()
    if engine is None:
        print("no image is built, because neither buildah nor docker is on PATH", file=sys.stderr)
        return
    for target in targets:
        name, _, variant = target.partition("-")
        tag = f"{__version__}-{variant}" if variant else __version__
        image = f"rootstock/{name}:{tag}"
        subprocess.run(engine.build(source, target, image, revision, arguments), check=True)
        subprocess.run(engine.save(image, out / f"rootstock-{name}-{tag}.tar"), check=True)


def write_sums(out: Path) -> None:
    """Writes the checksums of all files of a folder, in the form that `sha256sum --check` reads."""
    lines = [f"{_sha256(path)}  {path.name}\n" for path in sorted(out.iterdir()) if path.name != SUMS]
    (out / SUMS).write_text("".join(lines))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def release(out: Path, images: Sequence[str], arguments: Sequence[str], isolated: bool, allow_changes: bool) -> None:
    """Builds all artifacts from the tracked files. Raises ReleaseRefused, or CalledProcessError if a build fails."""
    if out.exists() and any(out.iterdir()):
        raise ReleaseRefused(f"{out} is not empty. Remove its files, or choose another folder with --out.")
    if not allow_changes and _output("git", "status", "--porcelain"):
        raise ReleaseRefused("The working tree has uncommitted changes. Commit them, or pass --allow-changes for a trial.")
    out.mkdir(parents=True, exist_ok=True)
    revision = _output("git", "rev-parse", "HEAD").strip()
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "rootstock"
        export(source)
        build_wheel(source, out, isolated)
        helm_python.package(source / "charts" / "rootstock", destination=out)
        build_images(source, out, images, revision, arguments)
    write_sums(out)
    print((out / SUMS).read_text(), end="")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m release", description="Writes a release to a folder, and pushes nothing.")
    parser.add_argument("--out", type=Path, default=Path("dist"), metavar="DIR", help="empty or new folder (default dist)")
    parser.add_argument(
        "--images", default=" ".join(IMAGES), metavar="TARGETS", help=f"targets of docker/Dockerfile (default {' '.join(IMAGES)})"
    )
    parser.add_argument(
        "--build-arg", action="append", default=[], metavar="NAME=VALUE", help="build argument of the images; may be repeated"
    )
    parser.add_argument("--allow-changes", action="store_true", help="build a working tree with uncommitted changes")
    parser.add_argument(
        "--no-build-isolation", action="store_true", help="build the wheel with this environment's setuptools and grpcio-tools"
    )
    args = parser.parse_args()
    try:
        release(args.out.resolve(), args.images.split(), args.build_arg, not args.no_build_isolation, args.allow_changes)
    except (ReleaseRefused, subprocess.CalledProcessError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
