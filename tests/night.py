"""Selects the cases that run by day. By night (`make nightly` sets ROOTSTOCK_TEST_NIGHTLY=1), all cases run.

With `@pytest.mark.by_day(one_in=2)` on a function, a class or a module, one in two cases of each parametrized test runs by day.
The choice depends only on the indices of the parameter sets and the seed. So it is the same in every run and process, and does
not change if a test or its case ids are renamed.

| argument | meaning |
| --- | --- |
| `one_in` | One in this many cases runs by day, rounded up, so at least one case of each test. |
| `seed` | Another seed selects other cases. Default 0. |
| any other name | Value of a parameter. The mark then applies only to cases with this value. |

If several marks apply to a case, the mark of the function counts, then that of its class, then that of the module. On a machine
with a GPU, all cases of the tests in WHOLE_ON_GPU run.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

NIGHTLY = bool(os.environ.get("ROOTSTOCK_TEST_NIGHTLY"))
HAS_GPU = Path("/dev/nvidiactl").exists()
WHOLE_ON_GPU = ("tests/exec/", "tests/gpu/", "tests/kernels/")


@dataclass(frozen=True)
class DayMark:
    """The arguments of one `by_day` mark."""

    one_in: int  # one in this many cases runs by day
    seed: int  # determines which cases run
    values: frozenset[tuple[str, Any]]  # (parameter, value) that a case must have for the mark to apply

    def fits(self, params: dict[str, Any]) -> bool:
        return all(params.get(name) == value for name, value in self.values)

    def drawn(self, cases: Collection[pytest.Item]) -> list[pytest.Item]:
        """Returns the cases of one test that run by day."""
        return sorted(cases, key=self._order)[: -(-len(cases) // self.one_in)]

    def _order(self, case: pytest.Item) -> str:
        indices = (*_callspec(case).indices.values(),)
        return sha256(f"{self.seed} {indices}".encode()).hexdigest()


def select_by_day(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the cases in `items` that run only by night. Does nothing in a nightly run."""
    if NIGHTLY:
        return
    groups: dict[tuple[str, DayMark], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if mark := _mark_of(item):
            groups[item.nodeid.partition("[")[0], mark].append(item)
    by_night = {case for (_, mark), cases in groups.items() for case in {*cases} - {*mark.drawn(cases)}}
    config.hook.pytest_deselected(items=[item for item in items if item in by_night])
    items[:] = [item for item in items if item not in by_night]


def _mark_of(item: pytest.Item) -> DayMark | None:
    if HAS_GPU and item.nodeid.startswith(WHOLE_ON_GPU):
        return None
    return next((mark for mark in map(_parsed, item.iter_markers("by_day")) if mark.fits(_callspec(item).params)), None)


def _parsed(mark: pytest.Mark) -> DayMark:
    values = dict(mark.kwargs)
    return DayMark(values.pop("one_in"), values.pop("seed", 0), frozenset(values.items()))


def _callspec(item: pytest.Item) -> Any:
    """Returns the parameters of a case. pytest sets the attribute only for parametrized functions."""
    return item.callspec  # type: ignore[attr-defined]
