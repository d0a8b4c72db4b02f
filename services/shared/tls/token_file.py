"""The token that all services of a system share, from a file that is read again when it changes.

The file has one token per line. The first one is sent, and all are accepted. To replace a token, write the new one second in all
files, then first, then as the only one.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from pathlib import Path

from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.tls.certificate_files import LOOK_S, BadTls

logger = logging.getLogger(__name__)

MOST = 2  # largest number of tokens in a file
LEAST_BYTES = 16  # smallest length of a token


class TokenFile:
    """A file with tokens. Thread-safe. The constructor raises BadTls if the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._tokens = self._read()
        except (OSError, ValueError) as error:
            raise BadTls(f"{path}: {error}") from None
        self._refused = b""  # the last logged error
        self._next_look = time.monotonic() + LOOK_S

    @property
    def sent(self) -> str:
        return self._now()[0].decode("ascii")

    def accepts(self, given: bytes) -> bool:
        """Whether the token is in the file. The time depends only on the length of the given token."""
        taken = [hmac.compare_digest(token, given) for token in self._now()]
        return any(taken)

    def _now(self) -> tuple[bytes, ...]:
        with self._lock:
            if time.monotonic() >= self._next_look:
                self._look()
                self._next_look = time.monotonic() + LOOK_S
            return self._tokens

    def _look(self) -> None:
        try:
            tokens = self._read()
        except (OSError, ValueError) as error:
            if str(error).encode() != self._refused:
                self._refused = str(error).encode()
                logger.error(
                    "the new token cannot be used; the old one stays in use: %s", error, extra=fields(file=str(self._path))
                )
            return
        self._refused = b""
        if tokens != self._tokens:
            self._tokens = tokens
            logger.info("reloaded the services' token", extra=fields(file=str(self._path), accepted=len(tokens)))

    def _read(self) -> tuple[bytes, ...]:
        """Reads the tokens. Raises OSError, or ValueError if the file is wrong or was changed while it was read."""
        before = self._path.stat()
        tokens = tuple(line.strip() for line in self._path.read_bytes().splitlines() if line.strip())
        if not 1 <= len(tokens) <= MOST:
            raise ValueError(f"holds {len(tokens)} tokens, one a line, and 1 or {MOST} are wanted")
        if not all(33 <= byte <= 126 for token in tokens for byte in token):
            raise ValueError("holds a token with other characters than visible ones of ASCII")
        if any(len(token) < LEAST_BYTES for token in tokens):
            raise ValueError(f"holds a token of less than {LEAST_BYTES} characters, which can be guessed")
        after = self._path.stat()
        if (before.st_ino, before.st_mtime_ns, before.st_size) != (after.st_ino, after.st_mtime_ns, after.st_size):
            raise ValueError("is being written just now")
        return tokens
