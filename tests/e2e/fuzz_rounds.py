"""Rounds of what strangers might send: over every path, elsewhere, and as bytes of a connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.e2e.fuzz_bytes import raw_heads
from tests.e2e.fuzz_cases import Cases, Sent
from tests.e2e.fuzz_client import AT_ONCE


def rounds(
    faults: Callable[[Sequence[Sent]], list[str]],
    raw_faults: Callable[[bytes], list[str]],
    cases: Cases,
    number: int,
    examples: int,
    heads: int,
) -> None:
    """faults, raw_faults: what is wrong with the answers to what is sent. number: the seed of all that is drawn. examples: of a
    path, of some requests at once. heads: of one connection each. Raises AssertionError with a smallest example."""
    for requests in (*map(cases.requests, cases.posts), cases.elsewhere()):
        _look(number, examples, st.lists(requests, min_size=1, max_size=AT_ONCE), faults)
    _look(number, heads, raw_heads(), raw_faults)


def _look(number: int, examples: int, strategy: st.SearchStrategy[Any], faults: Callable[[Any], list[str]]) -> None:
    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def look(sent: Any) -> None:
        found = faults(sent)
        assert not found, (found, sent)

    look()
