"""Checks invariants of the chart: rules for every object of every release. A failure lists all violations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tests.chart.release import Release
from tests.chart.variants import ALL, rendered

Law = Callable[[str, Release], Iterable[str]]


def offences(law: Law, names: Sequence[str] = ALL) -> dict[str, list[str]]:
    """Returns the violations by release, without releases that have none.

    Args:
        law: The invariant. It yields a sentence per violation. An exception, e.g. for a missing object, counts as a violation.
        names: Names of the sets of values.
    """
    return {name: found for name in names if (found := _offences(law, name))}


def _offences(law: Law, name: str) -> list[str]:
    found: list[str] = []
    try:
        for each in law(name, rendered(name)):
            found.append(each)
    except (AssertionError, LookupError) as error:
        found.append(f"{type(error).__name__}: {error}")
    return found
