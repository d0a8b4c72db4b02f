"""The folder with the Unix sockets of the KV servers on this machine.

The name of a socket has the TCP port of its server, so a reader finds the socket by the port. Only the owner of the folder may
write in it.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

MOST_PATH_BYTES = 107  # longest path of a Unix socket (<linux/un.h>)


class SocketFolder:
    """A folder in which only this user can create sockets."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder if it is missing.

        Raises:
            ValueError: another user may write in the folder, its path is too long, or it is not a folder.
            OSError: the folder cannot be created.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{folder} is not a folder; the KV servers of this machine need a folder for their sockets")
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(
                f"{folder} belongs to another user, or other users may write in it. Change its owner, or its mode to 0700"
            )
        if len(os.fsencode(self._path(folder, 65535))) > MOST_PATH_BYTES:
            raise ValueError(f"{folder} has too long a path: the path of a socket in it may have at most {MOST_PATH_BYTES} bytes")
        self._folder = folder

    def path(self, port: int) -> Path:
        return self._path(self._folder, port)

    def listen(self, port: int, backlog: int) -> socket.socket:
        """Creates the socket of a port, and listens on it. Replaces an existing socket.

        Args:
            port: TCP port on which this process already listens. An existing socket of the port is therefore of a process that
                has ended.
            backlog: largest number of connections that wait for accept().

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
