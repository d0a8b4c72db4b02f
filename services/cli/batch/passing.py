"""A file on its way, with a bar on a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from services.cli.shared.terminal import Terminal
from services.shared.observe.progress import Progress

SHOW_EVERY_S = 0.2


def shown(pieces: Iterable[bytes], what: str, total: int, err: Terminal) -> Iterator[bytes]:
    """The same pieces. total: bytes, 0 where nobody knows. Where err is no terminal, or nobody does, nothing is shown."""
    begun = told = time.monotonic()
    done, is_shown = 0, err.is_tty and total > 0
    try:
        for piece in pieces:
            yield piece
            done, now = done + len(piece), time.monotonic()
            if is_shown and now - told >= SHOW_EVERY_S:
                err.overwrite(Progress(what, min(done, total), total, now - begun).bar())
                told = now
    finally:
        if is_shown:
            err.overwrite("")
