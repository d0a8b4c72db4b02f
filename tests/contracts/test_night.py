"""What waits for the night: cases of tests with many, half or more, the same ones every time, and never a whole test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import night
from tests.by_day import EIGHTH, HALF, QUARTER

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    nodeid: str


def by_day(
    monkeypatch: pytest.MonkeyPatch, names: list[str], nightly: bool = False, one_in: int = 2, few: int = night.FEW
) -> list[str]:
    """Of these, those that stay; what does not is told to pytest."""
    taken_out: list[Any] = []
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: taken_out.extend(items)))
    items: list[Any] = [Case(name) for name in names]
    cases = list(items)
    monkeypatch.setattr(night, "NIGHTLY", nightly)
    night.wait_for_night(config, items, lambda item: "slow" in item.nodeid, one_in, few)
    assert items == [case for case in cases if case not in taken_out]
    return [item.nodeid for item in items]


def test_some_cases_of_each_slow_test_stay_and_half_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    for test in range(200):
        for count in range(night.FEW + 1, 12):
            names = [f"slow{test}[{case}]" for case in range(count)]
            stayed = by_day(monkeypatch, names)
            assert 1 <= len(stayed) <= (count + 1) // 2 and stayed == by_day(monkeypatch, names)
            assert 1 <= len(by_day(monkeypatch, names, one_in=4)) <= -(-count // 4)
            assert by_day(monkeypatch, names, nightly=True) == names


def test_few_cases_and_other_tests_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{test}[{case}]" for test, count in (("slow", night.FEW), ("quick", 50)) for case in range(count)]
    assert by_day(monkeypatch, names) == names
    assert len(by_day(monkeypatch, names, few=1)) == 51, "of two one, where that is asked for"


def test_what_is_halved_is_there() -> None:
    for name in HALF | QUARTER | EIGHTH:
        path, *_, function = name.split("::")
        assert f"def {function}(" in (ROOT / path).read_text(), name
