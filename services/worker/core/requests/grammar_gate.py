"""The requests that wait until their grammar is compiled, or until their matcher has followed output from another worker.

They are not in the waiting queue and delay no other request.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.worker.core.contracts.grammar import GrammarBook
from services.worker.core.contracts.sampling import GrammarSpec
from services.worker.core.requests.request import Request

ASK_AGAIN_S = 0.25  # seconds until a grammar is submitted again that a full compiler has refused
FOLLOW_TOKENS = 1024  # most tokens that all matchers together follow in one turn
FOLLOW_S = 0.01  # most CPU seconds for this
FOLLOW_AT_ONCE = 32  # tokens between two checks of these limits


class GrammarGate:
    """The requests that wait for a grammar, and the requests whose matchers follow given output."""

    def __init__(self, book: GrammarBook | None, follow_tokens: int = FOLLOW_TOKENS) -> None:
        self._book = book  # unset if the worker offers no structured output
        self._follow_tokens = follow_tokens
        self._waiting: dict[GrammarSpec, dict[int, Request]] = {}
        self._following: dict[int, Request] = {}
        self._put_off: dict[GrammarSpec, float] = {}  # grammars that are submitted again, with their times
        self._size = 0
        self.num_tokens = 0  # prompt and output tokens of the waiting requests

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Yields the requests in any order."""
        for waiting in self._waiting.values():
            yield from waiting.values()
        yield from self._following.values()

    @property
    def is_offered(self) -> bool:
        return self._book is not None

    def admits(self, request: Request) -> bool:
        """Sets the matcher of a request with a grammar.

        Returns:
            False if the grammar is not compiled, or if the matcher must first follow given output. The caller then calls wait().
        """
        spec = request.params.grammar
        if spec is None:
            return True
        assert self._book is not None
        request.matcher = self._book.open(spec, request.payer[0])
        return request.matcher is not None and not request.progress.num_given

    def wait(self, request: Request) -> None:
        self._size += 1
        request.queued_tokens = request.num_prompt_tokens + len(request.progress.output_ids)
        self.num_tokens += request.queued_tokens
        self._hold(request)

    def leave(self, request: Request) -> None:
        self._size -= 1
        self.num_tokens -= request.queued_tokens
        assert 0 <= self._size <= self.num_tokens, "each that waits has a token"
        if self._following.pop(request.seq, None) is None:
            self._unlist(request)

    def compiled(self, spec: GrammarSpec) -> list[Request]:
        """Returns the requests that may leave because their grammar is compiled. The caller calls leave() for each one."""
        free = []
        for request in self.waiting_for(spec):
            if self.admits(request):
                free.append(request)
            elif request.matcher is not None:
                self._unlist(request)
                self._hold(request)
        return free

    def waiting_for(self, spec: GrammarSpec) -> list[Request]:
        """Returns the requests that wait for the grammar, in order of arrival."""
        return list(self._waiting.get(spec, {}).values())

    def put_off(self, spec: GrammarSpec, now: float) -> list[Request]:
        """Postpones a grammar, because the compiler is full.

        Returns:
            The requests to refuse, which are those without output. Requests with output wait.
        """
        waiting = self.waiting_for(spec)
        if any(request.progress.num_given for request in waiting):
            self._put_off[spec] = now + ASK_AGAIN_S
        return [request for request in waiting if not request.progress.num_given]

    def ask_again(self, now: float) -> list[Request]:
        """Submits postponed grammars again. Returns the requests that may leave; the caller calls leave() for each one."""
        if not self._put_off:
            return []
        due = [spec for spec, until in self._put_off.items() if until <= now]
        for spec in due:
            del self._put_off[spec]
        return [request for spec in due for request in self.compiled(spec)]

    def follow(self) -> list[Request]:
        """Lets matchers follow given output up to its last token, or up to a token that does not fit.

        The CPU time is taken from the matchers, so that it does not count as the time of a step.

        Returns:
            The requests whose matchers have finished. The caller calls leave() for each one.
        """
        if not self._following:
            return []
        free = []
        left, spent_s = self._follow_tokens, 0.0
        for request in self._following.values():
            last, fits = len(request.progress.output_ids) - 1, True
            while fits and request.progress.num_followed < last and left > 0 and spent_s < FOLLOW_S:
                before = request.progress.num_followed
                fits, cost_s = _follow(request, min(last, before + min(left, FOLLOW_AT_ONCE)))
                left -= request.progress.num_followed - before + (not fits)
                spent_s += cost_s
            if not fits or request.progress.num_followed == last:
                free.append(request)
            if left <= 0 or spent_s >= FOLLOW_S:
                break
        return free

    def _hold(self, request: Request) -> None:
        assert request.params.grammar is not None
        if request.matcher is not None:
            self._following[request.seq] = request
        else:
            self._waiting.setdefault(request.params.grammar, {})[request.seq] = request

    def _unlist(self, request: Request) -> None:
        assert request.params.grammar is not None
        waiting = self._waiting[request.params.grammar]
        del waiting[request.seq]
        if not waiting:
            del self._waiting[request.params.grammar]


def _follow(request: Request, end: int) -> tuple[bool, float]:
    """Follows up to output token `end`. Returns whether all tokens fit, and the CPU time in seconds."""
    matcher = request.matcher
    assert matcher is not None
    assert end < len(request.progress.output_ids), "a matcher takes the last token when it is committed"
    while request.progress.num_followed < end:
        if not matcher.accept(request.progress.output_ids[request.progress.num_followed]):
            return False, matcher.take_cost()
        request.progress.num_followed += 1
    return True, matcher.take_cost()
