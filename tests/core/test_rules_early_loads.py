"""Rules for host loads whose completion report arrives before the last bytes (docs/design/scheduler.md#operations-and-facts)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.transfers import OperationKind, Tier
from rootstock_llm.services.worker.core.tiers.tiers import LOAD_BYTES
from rootstock_llm.services.worker.exec.fake import TimeModel
from tests.core.harness import Engine
from tests.core.test_rules_import_limits import computing_takes
from tests.core.test_rules_imports import begin, cold, quarantined, roomy
from tests.core.test_rules_tiers import ask, moved, prompt, turns
from tests.core.test_scheduler_properties import check_run


def early(early_s: float, page_moved_s: float, numbers: int = 1, **changes: Any) -> Engine:
    """Returns an engine in which only the host tier has the pages of `numbers` prompts. Each prompt has nine pages."""
    engine = cold(roomy(page_moved_s=0.0, **changes), *(prompt(number) for number in range(numbers)))
    engine.executor.early_s = early_s
    engine.executor._time = TimeModel(per_page_moved=page_moved_s)
    return engine


def test_pages_of_an_early_load_are_awaited_when_reused() -> None:
    """The load's request is aborted and the cache flushed. Later requests then get the pages that the load still writes."""
    engine = early(10.0, 0.1, num_pages=24)
    begin(engine, 0, prompt(0))
    turns(engine, 3)
    assert engine.core.stats().num_running == 1 and not quarantined(engine)
    (load,) = moved(engine, OperationKind.LOAD)
    engine.abort(0)
    engine.control.flush_cache()
    turns(engine, 2)
    began, before = engine.now, len(engine.plans)
    for number in (1, 2):
        begin(engine, number, prompt(number))
    turns(engine, 10)
    assert engine.now < began + 0.5, "the load, which takes 0.9 s, is not complete yet"
    assert any(np.isin(plan.table_pages, load.pages).any() for plan in engine.plans[before:])
    engine.drain()
    check_run(engine)


@pytest.mark.parametrize("later", [False, True], ids=["immediately", "during the first load"])
def test_next_load_begins_when_the_early_load_is_complete(later: bool) -> None:
    """Each load takes 1.8 s and is reported as complete after 0.1 s.

    While the second load waits for the first, computing becomes faster than loading. The second load is still not given up.
    """
    engine = early(1.7, 0.2, numbers=2)
    began = engine.now
    begin(engine, 0, prompt(0))
    turns(engine, 15 * later)
    begin(engine, 1, prompt(1))
    turns(engine, 20)
    assert engine.finishes[0].cached_from[Tier.HOST] == 36
    computing_takes(engine, 6e-3)
    turns(engine, 120)
    assert engine.now < began + 1.8 and engine.core.stats().given_up_operations_total == 0
    assert engine.core.stats().num_importing == 1, "the second load waits for the last bytes of the first one"
    engine.drain()
    assert engine.finishes[1].cached_from[Tier.HOST] == 36
    check_run(engine)


def test_rates_ignore_steps_during_an_early_load(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = early(10.0, 0.01)
    tiers = engine.core.tiers
    assert tiers is not None
    computed: list[tuple[int, float]] = []
    monkeypatch.setattr(tiers.rates, "computed", lambda extended, rows, seconds: computed.append((extended, seconds)))
    before = tiers.rates.bytes_s(Tier.HOST)
    begin(engine, 0, prompt(0), max_new_tokens=20)
    for _ in range(20):
        if tiers.rates.bytes_s(Tier.HOST) == before:
            engine.turn()
    assert len(computed) > 3 and engine.core.stats().num_running == 1, "a step was in flight when the load was complete"
    assert not any(extended or seconds for extended, seconds in computed)
    assert tiers.rates.bytes_s(Tier.HOST) < before
    turns(engine, 2)
    assert computed[-1] != (0, 0.0)
    ask(engine, 1, prompt(5))
    assert any(extended and seconds for extended, seconds in computed)


def test_load_of_more_than_a_gibibyte_is_split() -> None:
    engine = cold(roomy(page_moved_s=0.0, page_bytes=LOAD_BYTES // 4), prompt(0))
    ask(engine, 0, prompt(0))
    assert [len(operation.keys) for operation in moved(engine, OperationKind.LOAD)] == [4, 4, 1]
