from __future__ import annotations

from services.worker.watchdog import Watchdog


def test_a_hang_is_told_once_and_recovery_too() -> None:
    now = 0.0
    told: list[str] = []
    watchdog = Watchdog(10.0, lambda: told.append("hang"), lambda: told.append("recover"), lambda: now)
    now = 9.0
    watchdog.look()
    assert told == []
    now = 11.0
    watchdog.look()
    watchdog.look()
    assert told == ["hang"]
    watchdog.beat()
    watchdog.look()
    assert told == ["hang", "recover"]
