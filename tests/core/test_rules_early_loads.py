"""Loads from the host of which the core hears while their last bytes are on their way: docs/scheduler.md#operations-and-facts."""

from __future__ import annotations

import pytest

from services.worker.core.contracts.transfers import OperationKind, Tier
from services.worker.core.tiers.tiers import LOAD_BYTES
from services.worker.exec.fake import TimeModel
from tests.core.harness import Engine
from tests.core.test_rules_import_limits import computing_takes
from tests.core.test_rules_imports import begin, cold, quarantined, roomy
from tests.core.test_rules_tiers import ask, moved, prompt, turns
from tests.core.test_scheduler_properties import check_run


def early(told_ahead_s: float, page_moved_s: float, numbers: int = 1) -> Engine:
    """What prompts of nine pages have left is in the host's memory alone."""
    engine = cold(roomy(page_moved_s=0.0), *(prompt(number) for number in range(numbers)))
    engine.executor.told_ahead_s = told_ahead_s
    engine.executor._time = TimeModel(per_page_moved=page_moved_s)
    return engine


@pytest.mark.parametrize("how", ["it ends", "it leaves", "a flush"])
def test_a_request_goes_on_while_its_pages_come_and_they_are_nobody_elses_until_they_are_there(how: str) -> None:
    """Pages that are free by then are taken by others: steps that are first to name them wait, whoever they are for."""
    engine = early(10.0, 0.1)
    begin(engine, 0, prompt(0))
    turns(engine, 3)
    assert engine.core.stats().num_running == 1 and not quarantined(engine)
    if how == "it leaves":
        engine.abort(0)
    elif how == "a flush":
        engine.core.flush_cache()
    for number in range(1, 6):
        begin(engine, number, prompt(number))
    engine.drain()
    check_run(engine)
    assert how == "it leaves" or engine.finishes[0].cached_from[Tier.HOST] == 36


def test_the_one_behind_it_has_its_turn_when_it_is_there() -> None:
    """Each takes 1.8 s and is told of 1.7 s before its end; computing would be sooner after a tenth of a second."""
    engine = early(1.7, 0.2, numbers=2)
    began = engine.now
    begin(engine, 0, prompt(0))
    begin(engine, 1, prompt(1))
    turns(engine, 20)
    assert engine.finishes.get(0) or engine.core.stats().num_running == 1
    computing_takes(engine, 3e-3)
    turns(engine, 150)
    assert engine.now < began + 1.8 and engine.core.stats().given_up_operations_total == 0
    assert engine.core.stats().num_importing == 1, "it waits behind the first one's last bytes"
    engine.drain()
    assert engine.finishes[1].cached_from[Tier.HOST] == 36
    check_run(engine)


def test_what_it_takes_is_learned_when_it_is_there_and_nothing_from_steps_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = early(10.0, 0.05)
    tiers = engine.core._tiers
    assert tiers is not None
    computed: list[tuple[int, float]] = []
    monkeypatch.setattr(tiers.rates, "computed", lambda extended, rows, seconds: computed.append((extended, seconds)))
    before = tiers.rates.bytes_s(Tier.HOST)
    begin(engine, 0, [*prompt(0), *range(20)])
    turns(engine, 10)
    assert engine.finishes[0].cached_from[Tier.HOST] == 40
    assert computed and not any(extended or seconds for extended, seconds in computed)
    assert tiers.rates.bytes_s(Tier.HOST) == before
    turns(engine, 60)
    assert tiers.rates.bytes_s(Tier.HOST) < before
    ask(engine, 1, prompt(5))
    assert any(extended and seconds for extended, seconds in computed)


def test_more_than_a_gibibyte_comes_in_several() -> None:
    engine = cold(roomy(page_moved_s=0.0, page_bytes=LOAD_BYTES // 4), prompt(0))
    ask(engine, 0, prompt(0))
    assert [len(operation.keys) for operation in moved(engine, OperationKind.LOAD)] == [4, 4, 1]
