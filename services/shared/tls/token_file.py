"""The token that all services of a system share, from a file that is read again when it changes.

The file has one or two tokens, one per line. The first one is sent, and all are accepted. To replace a token, write the new token
second in the files of all services, then first, then as the only one.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from pathlib import Path

from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.tls.certificate_files import CHECK_S, BadTls

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
        self._logged = b""  # message of the last logged error; empty if the file can be used
        self._next_check = time.monotonic() + CHECK_S

    @property
    def sent(self) -> str:
        return self._now()[0].decode("ascii")

    def accepts(self, given: bytes) -> bool:
        """Whether the token is in the file. The time depends only on the length of the given token."""
        matches = [hmac.compare_digest(token, given) for token in self._now()]
        return any(matches)

    def _now(self) -> tuple[bytes, ...]:
        with self._lock:
            if time.monotonic() >= self._next_check:
                self._reload_if_changed()
                self._next_check = time.monotonic() + CHECK_S
            return self._tokens

    def _reload_if_changed(self) -> None:
        try:
            tokens = self._read()
        except (OSError, ValueError) as error:
            if str(error).encode() != self._logged:
                self._logged = str(error).encode()
                logger.error(
                    "the new token cannot be used; the old one stays in use: %s", error, extra=fields(file=str(self._path))
                )
            return
        self._logged = b""
        if tokens != self._tokens:
            self._tokens = tokens
            logger.info("reloaded the services' token", extra=fields(file=str(self._path), accepted=len(tokens)))

    def _read(self) -> tuple[bytes, ...]:
        """Reads the tokens. Raises OSError, or ValueError if the file is wrong or was changed while it was read."""
        before = self._path.stat()
        tokens = tuple(line.strip() for line in self._path.read_bytes().splitlines() if line.strip())
        if not 1 <= len(tokens) <= MOST:
            raise ValueError(f"the file has {len(tokens)} tokens; write 1 or {MOST}, one per line")
        if not all(33 <= byte <= 126 for token in tokens for byte in token):
            raise ValueError("a token has a character that is not visible ASCII")
        if any(len(token) < LEAST_BYTES for token in tokens):
            raise ValueError(f"a token has fewer than {LEAST_BYTES} characters; write a longer one")
        after = self._path.stat()
        if (before.st_ino, before.st_mtime_ns, before.st_size) != (after.st_ino, after.st_mtime_ns, after.st_size):
            raise ValueError("the file changed while it was read")
        return tokens
