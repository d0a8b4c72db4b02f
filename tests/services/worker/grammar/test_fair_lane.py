"""Tests that tenants take turns and that one tenant cannot fill the lane."""

from __future__ import annotations

import threading

from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarSpec
from rootstock_llm.services.worker.grammar.compile.compiler_pool import TENANTS_FULL, FairLane


def spec(name: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, name)


def taken(lane: FairLane, count: int) -> list[str]:
    found = [lane.take() for _ in range(count)]
    return [one[0].source for one in found if one is not None]


def test_take_serves_tenants_in_turn() -> None:
    lane = FairLane(10)
    for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
        assert lane.offer(spec(name), name[:1].encode())
    assert taken(lane, 4) == ["a1", "b1", "c1", "a2"]
    assert lane.offer(spec("d1"), b"d") and lane.offer(spec("-1"), b"")
    assert taken(lane, 5) == ["b2", "a3", "d1", "-1", "a4"]


def test_offer_refuses_grammars_when_tenant_or_lane_is_full() -> None:
    lane = FairLane(2)
    assert [lane.offer(spec(str(at)), b"a") for at in range(3)] == [True, True, False]
    others = [lane.offer(spec(str(at)), bytes([tenant])) for tenant in range(TENANTS_FULL) for at in range(2)]
    assert others == [True] * 2 * (TENANTS_FULL - 1) + [False] * 2
    assert len(taken(lane, 1)) == 1 and lane.offer(spec("last"), b"z")


def test_close_ends_all_waits() -> None:
    lane, ended = FairLane(2), list[object]()
    threads = [threading.Thread(target=lambda: ended.append(lane.take())) for _ in range(3)]
    for thread in threads:
        thread.start()
    lane.close()
    for thread in threads:
        thread.join(30)
    assert ended == [None] * 3 and not lane.offer(spec("late"), b"") and lane.take() is None
