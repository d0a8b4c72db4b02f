"""How long a choice may wait in all."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.dispatch.wait import Wait


def test_only_waiting_costs_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what it is computed between two waits; and what has begun has all of it again."""

    async def run() -> list[float]:
        loop, wait, now = asyncio.get_running_loop(), Wait(), 0.0
        monkeypatch.setattr(loop, "time", lambda: now)
        ends = []
        for begins, lasts, afresh in ((100.0, 4.0, False), (500.0, 2.0, False), (900.0, 1.0, True), (950.0, 1.0, False)):
            now = begins
            wait.begin(10.0, afresh, lambda: None)
            assert wait.timer is not None
            ends.append(wait.timer.when())
            now += lasts
            assert wait.end() == lasts
        now = 1000.0
        wait.begin(10.0, False, lambda: None)
        now = 1008.0  # it expires, and is prolonged
        wait.prolong(10.0, lambda: None)
        assert wait.timer is not None
        ends.append(wait.timer.when())
        now = 1011.0
        wait.end()
        wait.begin(10.0, False, lambda: None)
        assert wait.timer is not None
        ends.append(wait.timer.when())
        wait.end()
        return ends

    assert asyncio.run(run()) == [110.0, 506.0, 910.0, 959.0, 1018.0, 1018.0]
