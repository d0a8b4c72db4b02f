"""What a row of the table of sampling parameters says (services/shared/sampling_parameters.py). Pure: plain data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SMALLEST_POSITIVE = 2.0**-126  # float32's smallest normal number; a device may take a smaller one for 0


class Api(enum.StrEnum):
    """The endpoints that make text, by their routes."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    GENERATE = "/generate"  # the members of its sampling_params


class Kind(enum.StrEnum):
    """What values are, in words for people."""

    NUMBER = "number"
    INTEGER = "whole number"
    FLAG = "true or false"
    TEXTS = "string or list of strings"
    STRINGS = "list of strings"
    TOKEN_IDS = "list of token ids"
    BIASES = "object of numbers"  # by token id


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row.

    names: what each API calls it; one that is missing does not take it. wire: its field of the message SamplingParams, with a
    dot before a member's; "" where the gateway alone acts on it. low, high: in the range, both, unless excludes_low; None for
    no limit; of BIASES those of the values. least, most: entries of a list. chars: of each text, at least 1. default: what holds
    where nobody says; None where it depends. neutral: values that ask for nothing, the core's own first; empty where every value
    asks for something. of_model: a model's files, or an operator, may choose another default.
    """

    names: Mapping[Api, str]
    wire: str
    kind: Kind
    doc: str
    low: float | None = None
    high: float | None = None
    default: float | None = None
    neutral: tuple[float, ...] = ()
    of_model: bool = False
    least: int = 0
    most: int = 0
    chars: int = 0
    excludes_low: bool = False  # values lie above low

    def fault(self, value: Any) -> str:
        """What is wrong with a scalar's value, or with one of BIASES; "" if nothing is."""
        if self.kind is Kind.FLAG:
            return "" if type(value) is bool else f"must be {Kind.FLAG}"
        low, high, what = self.low, self.high, Kind.INTEGER if self.kind is Kind.INTEGER else Kind.NUMBER
        fits = type(value) is int or (type(value) is float and what is Kind.NUMBER)
        inside = fits and (low is None or low <= value) and (high is None or value <= high)
        if inside and not (self.excludes_low and value == low):
            return ""
        return f"must be a {what} {self._range()}"

    def _range(self) -> str:
        if self.excludes_low:
            return f"above {self.low:.10g} and at most {self.high:.10g}"
        return spelled(self.low, self.high)

    def resolved(self, value: Any) -> Any:
        """Returns the form in which the core and the wire have a value within the range.

        All neutral values have one form. A value above an excluded 0 stays above 0 in 32 bits.
        """
        if value in self.neutral:
            return self.neutral[0]
        return max(value, SMALLEST_POSITIVE) if self.excludes_low else value


@dataclass(frozen=True, slots=True)
class UnservedParameter:
    """One that would change answers and is not served. neutral: values that ask for nothing and are taken; null always is."""

    name: str
    apis: tuple[Api, ...]
    neutral: tuple[Any, ...] = ()


def spelled(low: float | None, high: float | None) -> str:
    """A range in words."""
    if high is None:
        return "" if low is None else f"of at least {low:.10g}"
    return f"from {low:.10g} to {high:.10g}"
