"""Tests that offences() reports every violation in every release."""

from __future__ import annotations

from collections.abc import Iterator

from tests.chart.laws import offences
from tests.chart.release import Release, title
from tests.chart.variants import ALL


def test_invariant_is_checked_in_every_release() -> None:
    assert list(offences(lambda name, _: [name])) == ALL


def test_every_violation_of_an_invariant_is_reported() -> None:
    found = offences(lambda _, release: map(title, release.kind("Deployment")), ["two-models", "stateful-set"])
    assert {name: len(each) for name, each in found.items()} == {"two-models": 8, "stateful-set": 4}
    assert "Deployment/llm-rootstock-worker-small" in found["two-models"]


def test_violations_in_other_releases_are_reported_when_an_object_is_missing() -> None:
    def law(_: str, release: Release) -> Iterator[str]:
        yield "before"
        release.get("Deployment", "nobody")

    found = offences(law, ["defaults", "two-models"])
    assert {name: each[0] for name, each in found.items()} == {"defaults": "before", "two-models": "before"}
    assert all("0 objects Deployment/nobody" in each[1] for each in found.values())


def test_releases_without_violations_are_omitted() -> None:
    assert offences(lambda name, _: [name] if name == "access" else [], ["defaults", "access"]) == {"access": ["access"]}
