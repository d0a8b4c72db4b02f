"""The progress of a long operation as one log line, which another process parses to show a bar."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rootstock_llm.services.shared.observe.log_fields import fields

STEP = "step"  # field that marks a log record whose message `make run` prints
GB = "GB"
BAR = 20  # width of a bar in characters
_LINE = re.compile(r"(?P<what>[a-z]+): \d+ %, (?P<done>[\d.]+) of (?P<total>[\d.]+) (?P<unit>\w+) in (?P<passed>[\d.]+) s")


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of an operation at one moment."""

    what: str  # name of the operation, one word
    done: float  # finished amount; in bytes if the unit is GB, otherwise in the unit
    total: float  # amount at the end, measured like `done`
    passed_s: float  # seconds since the start
    unit: str = GB  # GB, or the plural of the counted things
    before: float = 0.0  # part of `done` that existed before the start; the rate excludes it

    @property
    def percent(self) -> int:
        return int(100 * self.done / self.total) if self.total else 100

    @property
    def left_s(self) -> float | None:
        """Remaining seconds at the rate so far, or None if the rate is unknown or nothing remains."""
        left, gained = self.total - self.done, self.done - self.before
        return left * self.passed_s / gained if gained > 0 and self.passed_s and left > 0 else None

    def line(self) -> str:
        counts = f"{self._amount(self.done)} of {self._amount(self.total)} {self.unit}"
        return f"{self.what}: {self.percent} %, {counts} in {self.passed_s:.1f} s{self._pace()}"

    def bar(self) -> str:
        filled = BAR * self.percent // 100
        counts = f"{self._amount(self.done)} of {self._amount(self.total)} {self.unit}"
        return f"{self.what} [{'#' * filled}{' ' * (BAR - filled)}] {self.percent:3} %  {counts}{self._pace()}"

    def _pace(self) -> str:
        if not self.passed_s:
            return ""
        rate = max(0.0, self.done - self.before) / self.passed_s
        pace = f", {self._amount(rate)} {self.unit}/s" if self.unit == GB else f", {rate:.1f} {self.unit}/s"
        return pace if self.left_s is None else f"{pace}, {self.left_s:.0f} s left"

    def _amount(self, value: float) -> str:
        return f"{value / 1e9:.2f}" if self.unit == GB else f"{value:.0f}"


def step() -> dict[str, dict[str, Any]]:
    """Returns the `extra` of a log call whose message `make run` prints: logger.info("loading", extra=step())."""
    return fields(**{STEP: True})


def read(line: str) -> Progress | None:
    """Parses the output of Progress.line(), whose numbers are rounded. Returns None for any other line."""
    found = _LINE.match(line)
    if found is None:
        return None
    scale = 1e9 if found["unit"] == GB else 1.0
    done, total = float(found["done"]) * scale, float(found["total"]) * scale
    return Progress(found["what"], done, total, float(found["passed"]), found["unit"])
