"""Random requests with shared prefixes, while copies of their pages between tiers take many steps."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from rootstock_llm.services.worker.core.contracts.messages import FinishReason
from rootstock_llm.services.worker.core.contracts.transfers import PageOperation
from rootstock_llm.services.worker.core.control import SchedulerControl
from tests.exec.tier_prompts import PROMPT_TOKENS, prompt
from tests.exec.tiered import Served


def delay_copies(served: Served, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays about half of the copies of the executor's mover, by 0.02 or 0.1 s."""
    mover = served.executor._mover
    assert mover is not None
    move = mover._move

    def late(operation: PageOperation) -> tuple[int, tuple[bytes, ...], tuple[bytes, ...]]:
        time.sleep(rng.choice((0.0, 0.0, 0.02, 0.1)))
        return move(operation)

    monkeypatch.setattr(mover, "_move", late)


def serve_and_compare(served: Served, plain: Served, rng: random.Random, flushes: float, **params: Any) -> None:
    """Serves 14 requests that arrive and are aborted at random times. Compares the bits of unaborted answers with `plain`.

    Args:
        served: a worker with tiers.
        plain: a worker without tiers.
        rng: source of the random choices.
        flushes: probability that the device's cache is flushed after a request.
        params: sampling parameters of each request.
    """
    asked: dict[int, tuple[int, int]] = {}
    for _ in range(14):
        number, length = rng.randrange(3), rng.choice((60, 120, PROMPT_TOKENS))
        asked[served.submit(prompt(number)[:length], seed=number, **params)] = number, length
        for _ in range(rng.randrange(12)):
            served.turn()
        if rng.random() < 0.3:
            served.abort(rng.choice(list(asked)))
        if rng.random() < flushes:
            SchedulerControl(served.core).flush_cache()
    served.drain()
    for handle, (number, length) in asked.items():
        answer = served.answers[handle]
        assert answer.finish is not None
        if answer.finish.reason is FinishReason.LENGTH:
            assert answer.bits == plain.ask(prompt(number)[:length], seed=number, **params).bits
