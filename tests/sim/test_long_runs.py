"""The property tests' workload for ten thousand steps a run; more seeds with ROOTSTOCK_TEST_NIGHTLY=1."""

from __future__ import annotations

import os

import pytest

from tests.core.test_scheduler_properties import check_run, config_of, drive

SEEDS = range(8) if os.environ.get("ROOTSTOCK_TEST_NIGHTLY") else range(1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("page_size", "overlap", "mixed", "retract"), [(1, True, False, 0), (4, True, True, 5), (16, False, False, 0)]
)
def test_ten_thousand_steps(page_size: int, overlap: bool, mixed: bool, retract: int, seed: int) -> None:
    config = config_of(page_size, 160, 6, 16, enable_mixed_chunk=mixed, retract_interval=retract, schedule_conservativeness=0.3)
    engine = drive(config, 1000 + seed, 10_000, overlap)
    check_run(engine)
    stats = engine.core.stats()
    assert stats.retractions_total > 20 and stats.evicted_pages_total > 50, "the pool was never short: nothing was tested"
