"""The running profile and the path of its file. Commands read and write them on the loop's thread."""

from __future__ import annotations

import re
import time
from pathlib import Path

from rootstock_llm.services.worker.exec.contracts.operations import OperationRefused, StartProfile, StopProfile
from rootstock_llm.services.worker.exec.contracts.protocol import Executor

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_ODD = re.compile(r"[^A-Za-z0-9._-]")


class Profiles:
    """Starts and stops profiles of one worker."""

    def __init__(self, folder: Path, worker_id: str) -> None:
        """Starts without a profile.

        Args:
            folder: folder of the files, which is created with the first profile.
            worker_id: part of each file's name, because several workers may share a folder.
        """
        self._folder = folder
        self._suffix = _ODD.sub("_", worker_id)
        self._running: Path | None = None

    @property
    def running(self) -> Path | None:
        """Path of the running profile, or None."""
        return self._running

    def start(self, executor: Executor, name: str) -> Path:
        """Starts a profile and returns the path of its file.

        Args:
            executor: the executor to profile.
            name: part of the file's name; the time if it is empty.

        Raises:
            ValueError: the name cannot be part of a file's name. OperationRefused: a profile is running, or its file cannot be
            created.
        """
        if name and not _NAME.fullmatch(name):
            raise ValueError("name: letters, digits, '.', '_' and '-' only, no '.' in front, at most 100 characters")
        if self._running is not None:
            raise OperationRefused(f"a profile is running already, into {self._running}")
        path = self._path(name or time.strftime("%Y%m%d-%H%M%S"))
        executor.apply(StartProfile(path))
        self._running = path
        return path

    def stop(self, executor: Executor) -> Path:
        """Stops the running profile and returns the path of its file.

        Raises:
            OperationRefused: no profile is running, or the file cannot be written. The profile has ended in both cases.
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
            raise OperationRefused(f"cannot make the folder for profiles: {error}") from error
        if path.exists():
            raise OperationRefused(f"{path} exists; choose another name")
        return path
