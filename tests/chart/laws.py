"""Checks invariants of the chart in every release. A failed check lists all violations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tests.chart.release import Release
from tests.chart.variants import ALL, rendered

Law = Callable[[str, Release], Iterable[str]]


def offences(law: Law, names: Sequence[str] = ALL) -> dict[str, list[str]]:
    """Returns the violations by release. A release without violations is not in the result.

    Args:
        law: The invariant. It gets the name of a release and the release, and yields a message per violation. An exception, such
            as one for a missing object, counts as a violation.
        names: Names of the value sets to render.
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
