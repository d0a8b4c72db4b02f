from __future__ import annotations

import concurrent.futures
from typing import Any

from services.worker.loop.barrier import Barrier, Command, Pace
from services.worker.loop.commands import PendingCommands
from services.worker.loop.pulse import Pulse
from services.worker.loop.watchdog import Watchdog


def test_watchdog_reports_a_hang_once_and_the_recovery() -> None:
    now = 0.0
    told: list[str] = []
    pulse = Pulse(lambda: now)
    watchdog = Watchdog(pulse, 10.0, lambda: told.append("hang"), lambda: told.append("recover"))
    now = 9.0
    watchdog.look()
    assert told == []
    now = 11.0
    watchdog.look()
    watchdog.look()
    assert told == ["hang"]
    pulse.beat()
    watchdog.look()
    assert told == ["hang", "recover"]


def test_watchdog_waits_for_an_operation_until_the_deadline() -> None:
    now = 0.0
    told: list[str] = []
    pulse = Pulse(lambda: now)
    watchdog = Watchdog(pulse, 10.0, lambda: told.append("hang"), lambda: told.append("recover"))
    pulse.works(until=100.0)
    now = 109.0
    watchdog.look()
    assert told == [] and pulse.age_s == 109.0, "front ends hear how long it has taken"
    now = 111.0
    watchdog.look()
    assert told == ["hang"]
    pulse.beat()
    pulse.works(until=200.0)
    pulse.beat()
    watchdog.look()
    now = 122.0
    watchdog.look()
    assert told == ["hang", "recover", "hang"], "what is over gives no time"


def test_watchdog_ignores_a_loop_that_waits_for_messages() -> None:
    now = 0.0
    told: list[str] = []
    pulse = Pulse(lambda: now)
    watchdog = Watchdog(pulse, 10.0, lambda: told.append("hang"), lambda: told.append("recover"))
    pulse.rest()
    now = 100.0
    watchdog.look()
    assert told == [] and pulse.age_s == 0


def test_command_reports_begin_with_deadline_and_end() -> None:
    told: list[Any] = []

    def fails(*_: Any) -> None:
        told.append("runs")
        raise ValueError

    commands = PendingCommands(None, None, None, Pace(), told.append)  # type: ignore[arg-type]
    for action in (lambda *_: told.append("runs"), fails):
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        commands.add(Command(Barrier.NONE, action, future, deadline=9.0), now=1.0)
        assert future.done()
    assert told == [9.0, "runs", None] * 2
