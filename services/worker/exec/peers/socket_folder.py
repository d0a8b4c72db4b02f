"""Where workers of one machine find each other's sockets: a folder of one user's, with a socket for each port of TCP."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

MOST_PATH_BYTES = 107  # <linux/un.h>


class SocketFolder:
    def __init__(self, folder: Path) -> None:
        """Makes it where it is not there. Raises ValueError for one in which others could put their own sockets, OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{folder} is no folder")
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(f"{folder} is another user's, or others may write in it")
        if len(os.fsencode(self._path(folder, 65535))) > MOST_PATH_BYTES:
            raise ValueError(f"{folder} has too long a name for a socket in it")
        self._folder = folder

    def path(self, port: int) -> Path:
        return self._path(self._folder, port)

    def listen(self, port: int, backlog: int) -> socket.socket:
        """port: that this process listens on, so that a socket of its name is nobody's any more. Raises OSError."""
        self.remove(port)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self.path(port)))
            self.path(port).chmod(0o600)
            listener.listen(backlog)
        except OSError:
            listener.close()
            raise
        return listener

    def remove(self, port: int) -> None:
        self.path(port).unlink(missing_ok=True)

    @staticmethod
    def _path(folder: Path, port: int) -> Path:
        return folder / f"kv-{port}.sock"
