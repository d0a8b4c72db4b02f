"""Ending requests by the name that their client gave them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from services.gateway.errors import ApiError
from services.gateway.generate import Generator


class Aborter:
    """Finds requests by rid: those that are open, and those whose prompts are still being made. One per process."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._preparing: dict[str, list[_Mark]] = {}

    @contextmanager
    def preparing(self, rids: Sequence[str]) -> Iterator[None]:
        """While it is entered, these can be aborted although nothing is open yet: leaving it then raises ApiError."""
        mark = _Mark()
        for rid in rids:
            self._preparing.setdefault(rid, []).append(mark)
        try:
            yield
        finally:
            for rid in rids:
                marks = self._preparing[rid]
                marks.remove(mark)
                if not marks:
                    del self._preparing[rid]
        if mark.aborted:
            raise aborted()

    def abort(self, rid: str | None) -> None:
        """Ends what has this rid, everything for None. What has come of an answer so far is its answer."""
        self._generator.abort(rid, aborted())
        for mark in self._preparing.get(rid, ()) if rid is not None else ():
            mark.aborted = True


class _Mark:
    aborted = False


def aborted() -> ApiError:
    return ApiError(400, "The request was aborted.", code="aborted")
