"""Tests that the compiler queue serves tenants in turn and that one tenant cannot fill it."""

from __future__ import annotations

import threading

from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarSpec
from rootstock_llm.services.worker.grammar.compile.compiler_pool import QUEUE_TENANTS, FairQueue


def spec(name: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, name)


def taken(queue: FairQueue, count: int) -> list[str]:
    found = [queue.take() for _ in range(count)]
    return [one[0].source for one in found if one is not None]


def test_queue_serves_tenants_in_turn() -> None:
    queue = FairQueue(10)
    for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
        assert queue.offer(spec(name), name[:1].encode())
    assert taken(queue, 4) == ["a1", "b1", "c1", "a2"]
    assert queue.offer(spec("d1"), b"d") and queue.offer(spec("-1"), b"")
    assert taken(queue, 5) == ["b2", "a3", "d1", "-1", "a4"]


def test_queue_refuses_a_grammar_when_the_queue_or_the_tenants_share_is_full() -> None:
    queue = FairQueue(2)
    assert [queue.offer(spec(str(at)), b"a") for at in range(3)] == [True, True, False]
    others = [queue.offer(spec(str(at)), bytes([tenant])) for tenant in range(QUEUE_TENANTS) for at in range(2)]
    assert others == [True] * 2 * (QUEUE_TENANTS - 1) + [False] * 2
    assert len(taken(queue, 1)) == 1 and queue.offer(spec("last"), b"z")


def test_closing_the_queue_ends_all_waiting_calls() -> None:
    queue, ended = FairQueue(2), list[object]()
    threads = [threading.Thread(target=lambda: ended.append(queue.take())) for _ in range(3)]
    for thread in threads:
        thread.start()
    queue.close()
    for thread in threads:
        thread.join(30)
    assert ended == [None] * 3 and not queue.offer(spec("late"), b"") and queue.take() is None
