"""python -m tests.docs_commands.chroot FOLDER [--nightly]: runs README and docs on a Debian with only the packages of README.

1. Installs a Debian in FOLDER with debootstrap, and clones this checkout's commit into it.
2. Runs README from top to bottom with Debian's Python, then all pages. --nightly includes nightly blocks, such as `make test`.

The command needs root and debootstrap, and takes a quarter of an hour with the downloads of `make run`. The machine's pip
configuration is copied, and the folders that it names are mounted. Nothing outside FOLDER changes, and the mounts end with the
command.
"""

from __future__ import annotations

import argparse
import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.docs_commands.blocks import ROOT

SUITE = "bookworm"
PIP_FILES = ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")
COPIED = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")
KEPT = re.compile(
    r"PIP_\w+|\w+_proxy|TORCH_INDEX|SSL_CERT_FILE|REQUESTS_CA_BUNDLE", re.IGNORECASE
)  # environment variables that the command in the chroot gets


def packages() -> list[str]:
    """Returns the Debian packages that README names before its first command."""
    before = (ROOT / "README.md").read_text().partition("make run\n")[0].rpartition("## Run it")[2]
    named = re.findall(r"`([a-z0-9][a-z0-9.+-]+)`", before)
    if "build-essential" not in named:
        raise ValueError("README must name the package build-essential before its first command")
    return named


def is_permitted() -> bool:
    return os.geteuid() == 0 and shutil.which("debootstrap") is not None


def make_debian(root: Path) -> None:
    """Installs the packages and clones the repository. Raises CalledProcessError if a package cannot be fetched."""
    names = ",".join(packages())
    subprocess.run(["debootstrap", "--variant=minbase", f"--include={names}", SUITE, str(root)], check=True)
    for name in COPIED:
        if Path(name).exists():
            (root / name[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(name, root / name[1:])
    for name in map(os.path.expanduser, PIP_FILES):
        if os.path.exists(name):
            target = root / "etc/pip.conf" if name == PIP_FILES[0] else root / "root/.config/pip/pip.conf"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(name, target)
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(root / "root/rootstock")], check=True)


def folders_of_pip() -> Iterator[str]:
    """Yields this machine's folders that pip's configuration files and environment variables name."""
    texts = [value for name, value in os.environ.items() if name.startswith("PIP_")]
    for name in map(os.path.expanduser, PIP_FILES):
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(name)
        texts += [value for section in parser.values() for value in section.values()]
    for word in " ".join(texts).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.is_dir():
            # An index in the folder `simple` refers to files in the parent of this folder.
            yield str(path if path.name != "simple" else path.parent)


def run_in(root: Path, command: str) -> int:
    """Runs a shell command in the clone's folder with its own mount and process namespaces. Returns the exit status."""
    mounts = [f"mount --rbind /dev {root}/dev", f"mount -t tmpfs tmpfs {root}/dev/shm" if os.path.isdir("/dev/shm") else "true"]
    mounts += [f"mount -t sysfs -o ro sysfs {root}/sys"]
    for folder in sorted(set(folders_of_pip())):
        mounts += [f"mkdir -p {root}{folder}", f"mount --bind -o ro {folder} {root}{folder}"]
    environment = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    environment |= {"HOME": "/root", "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}
    inner = f"cd /root/rootstock && {command}"
    script = " && ".join([*mounts, f"exec chroot {root} bash -c {shlex.quote(inner)}"])
    unshare = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", f"--mount-proc={root}/proc"]
    return subprocess.run([*unshare, "bash", "-c", script], env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="new folder; it needs 8 GB")
    parser.add_argument("--nightly", action="store_true", help="also run blocks with the mark nightly")
    arguments = parser.parse_args()
    if not is_permitted():
        parser.error("this command needs root and Debian's package debootstrap")
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists; name a new folder")
    root = arguments.folder.resolve() / "debian"
    root.mkdir(parents=True)
    make_debian(root)
    for command in (
        f"python3 -m tests.docs_commands README.md {'--nightly' if arguments.nightly else ''}",
        "make -s dev-env",
        ".venv/bin/python -m tests.docs_commands",
    ):
        print(f"=== {command}", flush=True)
        if status := run_in(root, command):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
