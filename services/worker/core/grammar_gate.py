"""Requests whose grammar is still being compiled. They stand beside the waiting queue and hold nobody up."""

from __future__ import annotations

from services.worker.core.grammar import GrammarBook
from services.worker.core.request import Request
from services.worker.core.sampling import GrammarSpec


class GrammarGate:
    """book: None where the worker offers no structured output."""

    def __init__(self, book: GrammarBook | None) -> None:
        self._book = book
        self._waiting: dict[GrammarSpec, dict[int, Request]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def is_offered(self) -> bool:
        return self._book is not None

    def admits(self, request: Request) -> bool:
        """Gives the request its matcher. False: the grammar is not there yet; the caller lets the request `wait`."""
        spec = request.params.grammar
        if spec is None:
            return True
        assert self._book is not None
        request.matcher = self._book.open(spec)
        return request.matcher is not None

    def wait(self, request: Request) -> None:
        assert request.params.grammar is not None
        self._waiting.setdefault(request.params.grammar, {})[request.seq] = request
        self._size += 1

    def leave(self, request: Request) -> None:
        assert request.params.grammar is not None
        waiting = self._waiting[request.params.grammar]
        del waiting[request.seq]
        self._size -= 1
        if not waiting:
            del self._waiting[request.params.grammar]

    def waiting_for(self, spec: GrammarSpec) -> list[Request]:
        """In order of arrival."""
        return list(self._waiting.get(spec, {}).values())
