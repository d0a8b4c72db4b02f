"""Tests of tests/night.py: the cases that the mark `by_day` selects."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import night

ROOT = Path(__file__).resolve().parents[2]
HALF = {"one_in": 2}
CONFTEST = "from tests.night import select_by_day as pytest_collection_modifyitems\n"
MODULE = """
import pytest

@pytest.fixture(params=["{0}0", "{0}1", "{0}2"])
def letter(request):
    return request.param

@pytest.mark.by_day(one_in=2, seed=3)
class Test{0}:
    @pytest.mark.parametrize("number", range(5), ids=lambda number: f"{0}{{number}}")
    def test_{0}(self, letter, number):
        pass

@pytest.mark.by_day(one_in=3)
def test_{0}(letter):
    pass

def test_without_mark(letter):
    pass
"""


@dataclass(frozen=True, eq=False)
class Case:
    """A parametrized test as pytest collects it."""

    name: str
    index: int
    marks: tuple[dict[str, Any], ...] = ()  # arguments of its `by_day` marks, the nearest first
    params: dict[str, str] = field(default_factory=dict)

    @property
    def nodeid(self) -> str:
        return f"{self.name}[{self.index}]"

    @property
    def callspec(self) -> Any:
        return SimpleNamespace(indices={"parameter": self.index}, params=self.params)

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [getattr(pytest.mark, name)(**arguments).mark for arguments in self.marks]


@pytest.fixture(autouse=True)
def day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(night, "NIGHTLY", False)
    monkeypatch.setattr(night, "HAS_GPU", False)


def selected(cases: list[Case]) -> list[Case]:
    """Returns the selected cases, and checks that all others are reported to pytest as deselected."""
    deselected: list[Any] = []
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items)))
    items: list[Any] = [*cases]
    night.select_by_day(config, items)
    assert items == [case for case in cases if case not in deselected] and len(items) + len(deselected) == len(cases)
    return items


@pytest.mark.parametrize("one_in", [2, 3, 8])
def test_by_day_mark_selects_one_case_in_n_rounded_up(one_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in range(1, 20):
        cases = [Case("test", index, ({"one_in": one_in},)) for index in range(count)]
        assert len(selected(cases)) == -(-count // one_in)
    monkeypatch.setattr(night, "NIGHTLY", True)
    assert selected(cases) == cases


def test_tests_without_the_by_day_mark_are_all_selected() -> None:
    cases = [Case("test", index) for index in range(9)]
    assert selected(cases) == cases


def test_by_day_mark_selects_other_cases_when_the_seed_differs() -> None:
    drawn = {selected([Case("test", index, ({**HALF, "seed": seed},)) for index in range(2)])[0].index for seed in range(20)}
    assert drawn == {0, 1}


def test_by_day_mark_can_apply_only_to_cases_with_a_parameter_value() -> None:
    mark = {**HALF, "kernels": "torch"}
    cases = [Case("test", index, (mark,), {"kernels": ("cpp", "torch")[index % 2]}) for index in range(12)]
    assert [case.params["kernels"] for case in selected(cases)].count("cpp") == 6
    assert [case.params["kernels"] for case in selected(cases)].count("torch") == 3


def test_nearest_matching_by_day_mark_applies() -> None:
    marks = ({"one_in": 4, "kernels": "torch"}, HALF)
    cases = [Case("test", index, marks, {"kernels": ("cpp", "torch")[index % 2]}) for index in range(16)]
    assert [case.params["kernels"] for case in selected(cases)].count("cpp") == 4
    assert [case.params["kernels"] for case in selected(cases)].count("torch") == 2


@pytest.mark.parametrize("folder", night.WHOLE_ON_GPU)
def test_all_cases_are_selected_on_a_gpu_despite_the_by_day_mark(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ROOT / folder).is_dir()
    monkeypatch.setattr(night, "HAS_GPU", True)
    cases = [Case(f"{folder}test", index, (HALF,)) for index in range(4)]
    assert selected(cases) == cases
    assert len(selected([Case("tests/core/test", index, (HALF,)) for index in range(4)])) == 2


def test_by_day_mark_selects_the_same_cases_after_renames(tmp_path: Path) -> None:
    """Collects a module and a copy of it whose file, class, tests and cases have other names."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("old", "new"):
        (tmp_path / f"test_file_{name}.py").write_text(MODULE.format(name))
    day, by_night = ([line.replace("new", "old") for line in collected(tmp_path, nightly)] for nightly in ("", "1"))
    assert day[: len(day) // 2] == day[len(day) // 2 :], "both modules must select the same cases"
    assert len(day) == 2 * (8 + 1 + 3) and len(by_night) == 2 * (15 + 3 + 3)


def collected(folder: Path, nightly: str) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        f"--rootdir={folder}",
    ]
    environment = {**os.environ, "ROOTSTOCK_TEST_NIGHTLY": nightly, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(folder)], cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]
