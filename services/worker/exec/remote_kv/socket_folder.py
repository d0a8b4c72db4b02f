"""The folder with the Unix sockets of the KV servers of one machine.

Each socket has the server's TCP port in its name, so that a reader that knows the port finds the socket. Only the user that owns
the folder may write in it.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

MOST_PATH_BYTES = 107  # longest path of a Unix socket, <linux/un.h>


class SocketFolder:
    """A folder in which only this user can create sockets."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder if it is missing.

        Raises:
            ValueError: another user could put sockets into the folder, or its path is too long.
            OSError: the folder cannot be created.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{folder} is no folder")
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(f"{folder} belongs to another user, or others may write in it")
        if len(os.fsencode(self._path(folder, 65535))) > MOST_PATH_BYTES:
            raise ValueError(f"{folder} has too long a name: the path of a socket has at most {MOST_PATH_BYTES} bytes")
        self._folder = folder

    def path(self, port: int) -> Path:
        return self._path(self._folder, port)

    def listen(self, port: int, backlog: int) -> socket.socket:
        """Listens on the socket of a port and replaces an existing socket.

        Args:
            port: TCP port on which this process listens already. An existing socket of this port is therefore left from a process
                that has ended.
            backlog: backlog of the listener.

        Raises:
            OSError: the socket cannot be created.
        """
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
