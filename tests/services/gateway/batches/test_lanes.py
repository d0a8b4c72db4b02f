"""Tests of Lanes: batch lines use the capacity that interactive requests leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rootstock_llm.services.gateway.batches.lanes import HELD_S, LOOK_S, MOST_GIVEN_UP, QUIET_S, RISE_S, YOUNG_S, Lanes
from rootstock_llm.services.gateway.service.service import Attendance
from tests.services.redis_server import until


class Others:
    """The lanes of a gateway, and its interactive requests."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waiting = 0
        self.attendance = Attendance(lambda: self.now)
        self.lanes = Lanes(3, 1, lambda: self.waiting, lambda: self.attendance.quiet_s, lambda: self.now)
        self.attendance.listen(self.lanes.make_way)
        self.asked = 0
        self.leave = asyncio.Event()

    async def line(self) -> None:
        async def ask() -> None:
            self.asked += 1
            await self.leave.wait()

        await self.lanes.answer(ask)


def among(use: Callable[[Others], Awaitable[None]], num_lines: int = 8) -> None:
    async def run() -> None:
        others = Others()
        lines = [asyncio.create_task(others.line()) for _ in range(num_lines)]
        try:
            await use(others)
        finally:
            for each in lines:
                each.cancel()
            await asyncio.gather(*lines, return_exceptions=True)
        assert others.lanes.used == 0

    asyncio.run(run())


def test_all_lanes_are_open_when_no_interactive_request_is_open() -> None:
    async def use(others: Others) -> None:
        await until(lambda: others.lanes.used == 3)
        assert not others.lanes.is_open
        others.leave.set()
        await until(lambda: others.lanes.used == 0)

    among(use)


def test_few_lanes_are_open_during_interactive_requests_and_shortly_after() -> None:
    async def use(others: Others) -> None:
        others.attendance.begin(True)
        await asyncio.sleep(2 * LOOK_S)
        others.now += HELD_S
        await until(lambda: others.lanes.used == 1)
        assert not others.lanes.is_open
        others.now += 10 * QUIET_S
        assert not others.lanes.is_open, "one that takes long is still waited for"
        others.attendance.end(True)
        others.now += QUIET_S / 2
        assert not others.lanes.is_open
        others.attendance.begin(False)  # a request of a batch line is not interactive
        others.now += QUIET_S / 2
        await until(lambda: others.lanes.used == 2)
        assert not others.lanes.is_open, "one after the other"
        others.now += RISE_S
        await until(lambda: others.lanes.used == 3)

    among(use)


def test_no_line_begins_when_requests_queue_or_the_gateway_ends() -> None:
    async def use(others: Others) -> None:
        others.waiting = 1
        assert not others.lanes.is_open and others.lanes.used == 0
        others.waiting = 0
        await until(lambda: others.lanes.used == 3)
        ending = asyncio.create_task(others.lanes.close())
        await asyncio.sleep(0)
        others.leave.set()
        await ending
        assert others.lanes.used == 0 and not others.lanes.is_open

    among(use)


def test_lane_stays_empty_for_a_moment_when_interactive_requests_are_open() -> None:
    async def use(others: Others) -> None:
        others.attendance.begin(True)
        await asyncio.sleep(2 * LOOK_S)
        assert others.lanes.is_open and others.lanes.used == 0
        others.now += HELD_S / 2
        await asyncio.sleep(2 * LOOK_S)
        assert others.lanes.used == 0
        others.now += HELD_S / 2
        await until(lambda: others.lanes.used == 1)
        others.attendance.begin(True)
        await asyncio.sleep(2 * LOOK_S)
        assert others.lanes.used == 1, "it goes on beside who comes"
        others.attendance.end(True)
        others.attendance.end(True)

    among(use)


def test_line_is_interrupted_a_limited_number_of_times() -> None:
    async def use(others: Others) -> None:
        await until(lambda: others.asked == 1)
        for times in range(1, MOST_GIVEN_UP + 1):
            others.attendance.begin(True)
            await until(lambda: others.lanes.used == 0)
            others.attendance.end(True)
            others.now += QUIET_S
            await until(lambda: others.asked == times + 1)  # noqa: B023
        others.attendance.begin(True)
        await asyncio.sleep(2 * LOOK_S)
        assert (others.lanes.used, others.asked) == (1, MOST_GIVEN_UP + 1)

    among(use, num_lines=1)


def test_young_lines_are_interrupted_and_repeated() -> None:
    async def use(others: Others) -> None:
        await until(lambda: others.asked == 3)
        others.now += YOUNG_S / 2
        others.attendance.begin(True)
        await until(lambda: others.lanes.used == 0)
        others.attendance.end(True)
        others.now += QUIET_S + RISE_S
        await until(lambda: others.asked == 6)
        others.now += YOUNG_S
        others.attendance.begin(True)
        await asyncio.sleep(2 * LOOK_S)
        assert others.lanes.used == 3, "what is older goes on"
        others.attendance.end(True)
        others.now += QUIET_S + RISE_S
        others.leave.set()
        await until(lambda: others.asked == 8 + 3 and others.lanes.used == 0)

    among(use)


def test_short_waits_do_not_extend_the_delay_of_a_line() -> None:
    """The delay of a line continues while requests queue. Only its begin waits until the queue is empty."""

    async def use(others: Others) -> None:
        others.attendance.begin(True)
        for look in range(round(4 * HELD_S / LOOK_S)):
            others.waiting = look % 2
            others.now += LOOK_S
            await asyncio.sleep(2 * LOOK_S)
            if others.lanes.used:
                break
        assert others.lanes.used == 1 and HELD_S <= others.now - 100.0 <= HELD_S + 4 * LOOK_S

    among(use)
