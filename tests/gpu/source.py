"""Identifies the code of a check by its commit and a digest of the files that determine its results."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from tests.gpu.results import Source

FOLDERS = ("kernels", "services/worker", "tests/gpu", "tests/benchmarks/gpu", "tests/kernels", "tests/exec")
SUFFIXES = (".py", ".cpp", ".h")


def source_of(root: Path, given_commit: str = "") -> Source:
    """Returns the source of the files below `root`.

    Args:
        given_commit: commit id from --commit, which is used if there is no repository.
    """
    commit = _git(root, "rev-parse", "HEAD")
    changed = bool(_git(root, "status", "--porcelain", "--untracked-files=all", "--", *FOLDERS))
    return Source((commit or given_commit or "unknown") + ("+" if commit and changed else ""), digest_of(root))


def digest_of(root: Path) -> str:
    """Returns a digest of the names and contents of all files with SUFFIXES in FOLDERS, as 16 hex digits."""
    found = hashlib.blake2b(digest_size=8)
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                content = path.read_bytes()
                found.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _git(root: Path, *words: str) -> str:
    """Returns the output of a git command, or "" without git or a repository."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
