"""Starts and stops profiles of the executor. All calls run on the scheduler loop's thread."""

from __future__ import annotations

import re
import time
from pathlib import Path

from rootstock_llm.services.worker.exec.contracts.operations import OperationRefused, StartProfile, StopProfile
from rootstock_llm.services.worker.exec.contracts.protocol import Executor

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9._-]")


class Profiles:
    """Starts and stops the profiles of one worker. At most one profile runs at a time."""

    def __init__(self, folder: Path, worker_id: str) -> None:
        """Stores the names for the profile files.

        Args:
            folder: folder of the profile files; created if missing.
            worker_id: part of each file's name, because several workers may share a folder.
        """
        self._folder = folder
        self._suffix = _NOT_ALLOWED.sub("_", worker_id)
        self._running: Path | None = None

    @property
    def running(self) -> Path | None:
        """Path of the running profile's file, or None if no profile is running."""
        return self._running

    def start(self, executor: Executor, name: str) -> Path:
        """Starts a profile and returns the path of its file.

        Args:
            executor: the executor to profile.
            name: start of the file's name; empty: the present time.

        Raises:
            ValueError: the name has characters that are not allowed, or is too long.
            OperationRefused: a profile is running, the file exists, or it cannot be created.
        """
        if name and not _NAME.fullmatch(name):
            raise ValueError("name: may have letters, digits, '.', '_' and '-', but no '.' at the start; at most 100 characters")
        if self._running is not None:
            raise OperationRefused(f"a profile that writes to {self._running} is already running; call StopProfile first")
        path = self._path(name or time.strftime("%Y%m%d-%H%M%S"))
        executor.apply(StartProfile(path))
        self._running = path
        return path

    def stop(self, executor: Executor) -> Path:
        """Stops the running profile and returns the path of its file.

        Raises:
            OperationRefused: no profile was running, or its file could not be written. No profile is running afterwards.
        """
        path, self._running = self._running, None
        if path is None:
            raise OperationRefused("no profile is running")
        executor.apply(StopProfile())
        return path

    def _path(self, name: str) -> Path:
        path = self._folder.resolve() / f"{name}-{self._suffix}.trace.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OperationRefused(f"cannot create the folder of --profile-dir: {error}") from error
        if path.exists():
            raise OperationRefused(f"{path} exists; choose another name")
        return path
