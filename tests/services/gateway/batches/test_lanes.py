"""Tests of Lanes: batch lines use the capacity that interactive requests leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rootstock_llm.services.gateway.batches.lanes import FREE_LANE_S, LOOK_S, MAX_DISPLACEMENTS, QUIET_S, RISE_S, YOUNG_S, Lanes
from rootstock_llm.services.gateway.service.service import Attendance
from tests.services.redis_server import until


class Load:
    """The lanes of a gateway, its interactive requests, and a virtual clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waiting = 0  # interactive requests in the queue
        self.attendance = Attendance(lambda: self.now)
        self.lanes = Lanes(3, 1, lambda: self.waiting, lambda: self.attendance.quiet_s, lambda: self.now)
        self.attendance.listen(self.lanes.displace_young_lines)
        self.num_calls = 0  # begun calls of lines
        self.may_end = asyncio.Event()  # set to end the calls of lines

    async def line(self) -> None:
        async def ask() -> None:
            self.num_calls += 1
            await self.may_end.wait()

        await self.lanes.run_line(ask)


def run_with_lines(use: Callable[[Load], Awaitable[None]], num_lines: int = 8) -> None:
    """Runs a test while `num_lines` lines wait for lanes."""

    async def run() -> None:
        load = Load()
        lines = [asyncio.create_task(load.line()) for _ in range(num_lines)]
        try:
            await use(load)
        finally:
            for each in lines:
                each.cancel()
            await asyncio.gather(*lines, return_exceptions=True)
        assert load.lanes.used == 0

    asyncio.run(run())


def test_lines_use_all_lanes_when_no_interactive_request_is_open() -> None:
    async def use(load: Load) -> None:
        await until(lambda: load.lanes.used == 3)
        assert not load.lanes.is_open
        load.may_end.set()
        await until(lambda: load.lanes.used == 0)

    run_with_lines(use)


def test_lines_use_one_lane_during_interactive_requests_and_shortly_after() -> None:
    async def use(load: Load) -> None:
        load.attendance.begin(True)
        await asyncio.sleep(2 * LOOK_S)
        load.now += FREE_LANE_S
        await until(lambda: load.lanes.used == 1)
        assert not load.lanes.is_open
        load.now += 10 * QUIET_S
        assert not load.lanes.is_open, "a long interactive request limits the lanes until it ends"
        load.attendance.end(True)
        load.now += QUIET_S / 2
        assert not load.lanes.is_open
        load.attendance.begin(False)  # a request of a batch line is not interactive
        load.now += QUIET_S / 2
        await until(lambda: load.lanes.used == 2)
        assert not load.lanes.is_open, "one lane opens per RISE_S"
        load.now += RISE_S
        await until(lambda: load.lanes.used == 3)

    run_with_lines(use)


def test_no_line_begins_while_interactive_requests_wait_or_the_lanes_are_closing() -> None:
    async def use(load: Load) -> None:
        load.waiting = 1
        assert not load.lanes.is_open and load.lanes.used == 0
        load.waiting = 0
        await until(lambda: load.lanes.used == 3)
        ending = asyncio.create_task(load.lanes.close())
        await asyncio.sleep(0)
        load.may_end.set()
        await ending
        assert load.lanes.used == 0 and not load.lanes.is_open

    run_with_lines(use)


def test_line_begins_after_free_lane_s_when_interactive_requests_are_open() -> None:
    async def use(load: Load) -> None:
        load.attendance.begin(True)
        await asyncio.sleep(2 * LOOK_S)
        assert load.lanes.is_open and load.lanes.used == 0
        load.now += FREE_LANE_S / 2
        await asyncio.sleep(2 * LOOK_S)
        assert load.lanes.used == 0
        load.now += FREE_LANE_S / 2
        await until(lambda: load.lanes.used == 1)
        load.attendance.begin(True)
        await asyncio.sleep(2 * LOOK_S)
        assert load.lanes.used == 1, "a line continues when another interactive request begins"
        load.attendance.end(True)
        load.attendance.end(True)

    run_with_lines(use)


def test_line_is_interrupted_a_limited_number_of_times() -> None:
    async def use(load: Load) -> None:
        await until(lambda: load.num_calls == 1)
        for times in range(1, MAX_DISPLACEMENTS + 1):
            load.attendance.begin(True)
            await until(lambda: load.lanes.used == 0)
            load.attendance.end(True)
            load.now += QUIET_S
            await until(lambda: load.num_calls == times + 1)  # noqa: B023
        load.attendance.begin(True)
        await asyncio.sleep(2 * LOOK_S)
        assert (load.lanes.used, load.num_calls) == (1, MAX_DISPLACEMENTS + 1)

    run_with_lines(use, num_lines=1)


def test_young_lines_are_interrupted_and_repeated() -> None:
    async def use(load: Load) -> None:
        await until(lambda: load.num_calls == 3)
        load.now += YOUNG_S / 2
        load.attendance.begin(True)
        await until(lambda: load.lanes.used == 0)
        load.attendance.end(True)
        load.now += QUIET_S + RISE_S
        await until(lambda: load.num_calls == 6)
        load.now += YOUNG_S
        load.attendance.begin(True)
        await asyncio.sleep(2 * LOOK_S)
        assert load.lanes.used == 3, "older lines are not interrupted"
        load.attendance.end(True)
        load.now += QUIET_S + RISE_S
        load.may_end.set()
        await until(lambda: load.num_calls == 8 + 3 and load.lanes.used == 0)

    run_with_lines(use)


def test_briefly_queued_interactive_requests_do_not_extend_the_delay_of_a_line() -> None:
    """The delay also elapses while interactive requests are in the queue. Then the line begins once the queue is empty."""

    async def use(load: Load) -> None:
        load.attendance.begin(True)
        for look in range(round(4 * FREE_LANE_S / LOOK_S)):
            load.waiting = look % 2
            load.now += LOOK_S
            await asyncio.sleep(2 * LOOK_S)
            if load.lanes.used:
                break
        assert load.lanes.used == 1 and FREE_LANE_S <= load.now - 100.0 <= FREE_LANE_S + 4 * LOOK_S

    run_with_lines(use)
