"""A law of the chart: what no object of any release may do. It is tested once, and names every offender of every release."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tests.chart.release import Release
from tests.chart.variants import ALL, rendered

Law = Callable[[str, Release], Iterable[str]]


def offences(law: Law, names: Sequence[str] = ALL) -> dict[str, list[str]]:
    """law: of a set of values' name and its release, a sentence for each offender. Releases that have any, with all of them.

    What the law itself cannot go on with (an object that it looks for is not there) is an offence of that release.
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
