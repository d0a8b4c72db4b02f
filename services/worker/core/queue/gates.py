"""Admission gates: what a waiting request is asked before there is any talk of budgets.

A pass asks each request it looks at, in the gates' order, until one does not admit. WAIT holds the request in the queue: it
is passed over, nobody behind it stands still, and it is not looked at again until its gate frees it (WaitingQueue.free).
REJECT ends it. A gate allocates nothing, and its look leaves no mark on the radix tree.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from services.worker.core.contracts.config import SchedulerConfig
from services.worker.core.contracts.messages import ErrorCode, FinishReason
from services.worker.core.kv.tree_node import TOKEN_BYTES
from services.worker.core.queue.finish import FinishDecision
from services.worker.core.queue.request import Request


class Verdict(enum.Enum):
    ADMIT = enum.auto()
    WAIT = enum.auto()
    REJECT = enum.auto()


@dataclass(frozen=True, slots=True)
class Answer:
    """ending: with REJECT, what the client is told."""

    verdict: Verdict
    ending: FinishDecision | None = None


ADMIT, WAIT = Answer(Verdict.ADMIT), Answer(Verdict.WAIT)
Gate = Callable[[Request], Answer]


def too_small(config: SchedulerConfig) -> FinishDecision:
    message = f"the KV pool of {config.num_pages * config.page_size} tokens cannot hold this request, even alone"
    return FinishDecision(FinishReason.ABORT, error=ErrorCode.OUT_OF_MEMORY, message=message)


class PoolGate:
    """A request that was retracted with more prompt and output than the whole pool has room for can never go on."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._most_bytes = config.num_pages * config.page_size * TOKEN_BYTES
        self._rejection = Answer(Verdict.REJECT, too_small(config))

    def look(self, request: Request) -> Answer:
        return ADMIT if len(request.kv.token_key) <= self._most_bytes else self._rejection
