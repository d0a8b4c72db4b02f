"""Fuzzing rounds: requests to every path, requests with any method and path, and connections with raw bytes."""

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
    """Sends random requests and opens connections with raw bytes. Fails at the first fault.

    Args:
        faults: sends requests at once and returns the faults of their responses.
        raw_faults: sends raw bytes on a connection and returns the faults.
        number: seed of all random values.
        examples: number of examples per path; an example is up to AT_ONCE requests.
        heads: number of connections with raw bytes.

    Raises:
        AssertionError: a response has a fault. The message has the smallest example that hypothesis found.
    """
    for requests in (*map(cases.requests, cases.posts), cases.elsewhere()):
        _check(number, examples, st.lists(requests, min_size=1, max_size=AT_ONCE), faults)
    _check(number, heads, raw_heads(), raw_faults)


def _check(number: int, examples: int, strategy: st.SearchStrategy[Any], faults: Callable[[Any], list[str]]) -> None:
    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def check(sent: Any) -> None:
        found = faults(sent)
        assert not found, (found, sent)

    check()
