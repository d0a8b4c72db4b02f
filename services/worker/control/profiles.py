"""The profile that runs, if one does, and where its file goes. Read and written by commands, on the loop's thread."""

from __future__ import annotations

import re
import time
from pathlib import Path

from services.worker.exec.contracts.operations import OperationRefused, StartProfile, StopProfile
from services.worker.exec.contracts.protocol import Executor

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_ODD = re.compile(r"[^A-Za-z0-9._-]")


class Profiles:
    """folder: made when the first profile starts. worker_id: part of every file's name, for several workers share a folder."""

    def __init__(self, folder: Path, worker_id: str) -> None:
        self._folder = folder
        self._suffix = _ODD.sub("_", worker_id)
        self._running: Path | None = None

    @property
    def running(self) -> Path | None:
        return self._running

    def start(self, executor: Executor, name: str) -> Path:
        """name: "" for the time. Raises ValueError for an unusable name, OperationRefused where no profile can start."""
        if name and not _NAME.fullmatch(name):
            raise ValueError("name: letters, digits, '.', '_' and '-' only, no '.' in front, at most 100 characters")
        if self._running is not None:
            raise OperationRefused(f"a profile is running already, into {self._running}")
        path = self._path(name or time.strftime("%Y%m%d-%H%M%S"))
        executor.apply(StartProfile(path))
        self._running = path
        return path

    def stop(self, executor: Executor) -> Path:
        """Raises OperationRefused if none runs, or its file cannot be written; the profile has ended in any case."""
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
            raise OperationRefused(f"cannot make the folder for profiles: {error}") from error
        if path.exists():
            raise OperationRefused(f"{path} exists; choose another name")
        return path
