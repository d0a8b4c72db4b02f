"""Rules for numbers within bounds and for multiples.

For numbers within bounds, and for integer multiples without bounds, xgrammar's schema converter returns the rules as EBNF text.
Other multiples use an automaton, whose state has the remainder of the digits so far and their comparison with both bounds.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeVar

import xgrammar

from rootstock_llm.services.worker.grammar.schema.automaton import TooLarge, explored, rules_of
from rootstock_llm.services.worker.grammar.schema.ebnf import Chars, Node, Text
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused
from rootstock_llm.services.worker.grammar.schema.schema_support import Schema, child, number, refuse

_RULE = re.compile(r"^(root\w*) ::= (.*)$", re.MULTILINE)
_NAME = re.compile(r"\broot\w*\b")
MAX_MULTIPLE = 1000  # largest divisor that is passed to xgrammar's converter
INT64 = 1 << 63
MAX_EXACT = 1 << 53  # a double can hold every whole number up to it
MAX_SCALED = 10**15 - 1  # largest multiple, read without its decimal point; a double can hold every whole number up to it
MOST_DECIMALS = 6  # decimals of the numbers that xgrammar's converter generates within bounds
_DIGIT = ord("0")
Digits = TypeVar("Digits", int, str)  # a number of digits (int), or one digit (str)


def numeric_keywords(schema: Schema, kind: str, path: str) -> dict[str, float | int]:
    """Returns the schema's bounds as keywords for xgrammar's schema converter.

    Returns:
        The bounds by keyword: at most one lower and one upper bound, as whole numbers for integers and as doubles for numbers;
        {} if there are no bounds.

    Raises:
        GrammarRefused: a bound of an integer is outside of 64 bits, or no double is within a bound.
    """
    low, high = _bound(schema, "minimum", max, path), _bound(schema, "maximum", min, path)
    found: dict[str, float | int] = {}
    for side, name in ((low, "minimum"), (high, "maximum")):
        if side is None:
            continue
        value, strict = side
        key = f"exclusive{name.title()}" if strict else name
        if kind == "number":
            double, strict = _double(value, name, strict)
            if math.isinf(double):
                raise refuse(child(path, key), "no double is within this bound")
            found[f"exclusive{name.title()}" if strict else name] = double
        else:
            found[name] = _whole(value, name, strict)
            if abs(found[name]) >= INT64:
                raise refuse(child(path, key), "must fit into 64 bits")
    return found


def import_rules(keywords: dict[str, float | int], kind: str, prefix: str, path: str) -> dict[str, str]:
    """Returns the EBNF rules of xgrammar's converter by name. `prefix` is the start rule's name. Raises GrammarRefused."""
    low, high = _bound(keywords, "minimum", max, path), _bound(keywords, "maximum", min, path)
    if kind == "number" and low is not None and high is not None:
        scale = 10**MOST_DECIMALS
        if _scaled(low, scale, 1, 0) > _scaled(high, scale, -1, 0):  # the converter's rules would match only the empty text
            raise refuse(path, f"no number with at most {MOST_DECIMALS} decimals is within the bounds")
    schema = json.dumps({"type": kind, **keywords})
    try:
        text = str(xgrammar.Grammar.from_json_schema(schema))
    except RuntimeError as error:
        raise refuse(path, str(error).split(": ", 1)[-1]) from None
    rules = dict(_RULE.findall(text))
    if not rules:
        raise GrammarRefused(f"json_schema: {path}: no number is within these bounds")
    renamed = {name: _NAME.sub(lambda found: prefix + found[0][4:], body) for name, body in rules.items()}
    return {prefix + name[4:]: body for name, body in renamed.items()}


def _bound(schema: Schema, name: str, tighter: Any, path: str) -> tuple[float | int, bool] | None:
    """Returns a schema's lower or upper bound.

    Args:
        name: "minimum" or "maximum". The schema may have the keyword, its exclusive form or both.
        tighter: max() for a lower bound, min() for an upper bound.

    Returns:
        (value, whether the bound is exclusive), or None if there is no bound.
    """
    plain = number(schema, name, path)
    strict = number(schema, f"exclusive{name.title()}", path)
    if plain is None or strict is None:
        return (plain, False) if plain is not None else (strict, True) if strict is not None else None
    value = tighter(plain, strict)
    return value, value == strict


def _whole(value: float | int, name: str, strict: bool) -> int:
    if name == "minimum":
        return math.floor(value) + 1 if strict else math.ceil(value)
    return math.ceil(value) - 1 if strict else math.floor(value)


def _double(value: float | int, name: str, strict: bool) -> tuple[float | int, bool]:
    """Returns a bound that is a double and within the given bound, and whether it is exclusive.

    xgrammar's converter reads bounds as doubles. An exclusive bound becomes an inclusive one if a number with MOST_DECIMALS
    decimals could be rounded to the bound when it is read as a double.
    """
    inwards = math.inf if name == "minimum" else -math.inf
    nearest = float(value)
    if nearest != value:
        is_within = (nearest > value) == (inwards > 0)
        return nearest if is_within else math.nextafter(nearest, inwards), False
    if strict and abs(nearest) * 10**MOST_DECIMALS > MAX_EXACT:
        return math.nextafter(nearest, inwards), False
    return value, strict


def whole_multiple(schema: Schema, kind: str, path: str) -> int | None:
    """Returns the divisor of an integer schema without bounds if it is a whole number up to MAX_MULTIPLE, otherwise None."""
    value = number(schema, "multipleOf", path)
    is_bounded = any(key in schema for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
    if value is None or kind != "integer" or is_bounded or value != int(value) or not 1 <= value <= MAX_MULTIPLE:
        return None
    return int(value)


def multiples(schema: Schema, kind: str, prefix: str, path: str) -> dict[str, Node]:
    """Returns the rules of the multiples within the bounds. `prefix` is the name of the start rule. Raises GrammarRefused."""
    where = child(path, "multipleOf")
    value = number(schema, "multipleOf", path)
    if value is None or value <= 0:
        raise refuse(where, "must be greater than 0")
    divisor = Fraction(str(value))
    decimals = 0 if kind == "integer" else divisor.denominator.bit_length() - 1
    if kind == "number" and divisor.denominator != 1 << decimals:
        raise refuse(where, f"{value} is not an exact binary fraction, so validators disagree about its multiples")
    scale = 10**decimals
    step = divisor.numerator if kind == "integer" else int(divisor * scale)
    low = _scaled(_bound(schema, "minimum", max, path), scale, 1, -MAX_SCALED)
    high = _scaled(_bound(schema, "maximum", min, path), scale, -1, MAX_SCALED)
    low, high = max(low, -MAX_SCALED), min(high, MAX_SCALED)
    if -(-low // step) * step > high:
        raise refuse(path, "no multiple with at most 15 digits is within the bounds")
    try:
        sides = (_Side.of(max(low, 0), high, decimals), _Side.of(max(-high, 1), -low, decimals))
        found = explored(_Number(), lambda number: _step(number, sides, step, decimals))
        return rules_of(found, Chars, Text(""), prefix)
    except TooLarge as error:
        raise refuse(where, f"multipleOf and the bounds need too many states: {error}") from None


def _scaled(bound: tuple[float | int, bool] | None, scale: int, inwards: int, default: int) -> int:
    """Multiplies a bound by `scale` and rounds it to the nearest whole number that is within the bound.

    Args:
        inwards: 1 for a lower bound, -1 for an upper bound.
        default: result if there is no bound.
    """
    if bound is None:
        return default
    value, strict = Fraction(str(bound[0])) * scale, bound[1]
    if value.denominator == 1:
        return int(value) + (inwards if strict else 0)
    return math.ceil(value) if inwards > 0 else math.floor(value)


@dataclass(frozen=True, slots=True)
class _Side:
    """The bounds of the absolute value, either of positive or of negative numbers."""

    low: tuple[str, str]  # digits before and after the decimal point
    high: tuple[str, str]

    @classmethod
    def of(cls, low: int, high: int, decimals: int) -> _Side | None:
        return cls(_parts(low, decimals), _parts(high, decimals)) if low <= high else None


def _parts(magnitude: int, decimals: int) -> tuple[str, str]:
    whole, fraction = divmod(magnitude, 10**decimals)
    return str(whole), str(fraction).zfill(decimals) if decimals else ""


@dataclass(frozen=True, slots=True)
class _Number:
    """The state of the automaton after some characters of a number."""

    side: int = 0  # 0 positive, 1 negative
    begun: bool = False  # whether a sign or a digit was written
    digits: int = 0  # number of digits before the decimal point; 0 again after the decimal point was written
    places: int = -1  # number of digits after the decimal point; -1: the decimal point was not written yet
    remainder: int = 0  # remainder of the number that all digits so far form, divided by `step`
    low: int = 0  # -1, 0 or 1: the digits so far are below, equal to or above the lower bound's first digits
    high: int = 0  # the same comparison with the upper bound
    is_zero: bool = False  # whether only the digit 0 was written, so that no other digit may follow before the decimal point


def _step(
    number: _Number, sides: tuple[_Side | None, _Side | None], step: int, decimals: int
) -> tuple[bool, list[tuple[int, int, _Number]]]:
    found: list[tuple[int, int, _Number]] = []
    if not number.begun and sides[1] is not None:
        found.append((ord("-"), ord("-"), _Number(side=1, begun=True)))
    side = sides[number.side]
    if side is None:
        return False, found
    for digit in range(10):
        onward = _with_digit(number, str(digit), side, step, decimals)
        if onward is not None:
            found.append((_DIGIT + digit, _DIGIT + digit, onward))
    if decimals and number.digits and number.places < 0:
        found.append((ord("."), ord("."), _settled(number, side)))
    return _ends(number, side, step, decimals), found


def _with_digit(number: _Number, digit: str, side: _Side, step: int, decimals: int) -> _Number | None:
    behind = number.places >= 0
    at = number.places if behind else number.digits
    if (number.is_zero and not behind) or at >= (decimals if behind else len(side.high[0])):
        return None
    low, high = side.low[behind], side.high[behind]
    return replace(
        number,
        begun=True,
        digits=number.digits + (not behind),
        places=number.places + behind,
        remainder=(number.remainder * 10 + int(digit)) % step,
        low=number.low or (_sign(digit, low[at]) if at < len(low) else 0),
        high=number.high or _sign(digit, high[at]),
        is_zero=number.is_zero or (not behind and number.digits == 0 and digit == "0"),
    )


def _settled(number: _Number, side: _Side) -> _Number:
    """Returns the state at the decimal point.

    Corrects the comparisons with both bounds, because a number with more digits before the decimal point is larger.
    """
    low = _sign(number.digits, len(side.low[0])) or number.low
    high = _sign(number.digits, len(side.high[0])) or number.high
    return replace(number, places=0, digits=0, low=low, high=high, is_zero=False)


def _ends(number: _Number, side: _Side, step: int, decimals: int) -> bool:
    if number.places < 0:
        if not number.digits:
            return False
        number = _settled(number, side)
        for place in range(decimals):
            padded = _with_digit(number, "0", side, step, decimals)
            assert padded is not None, f"a number has {decimals} places, and {place} are taken"
            number = padded
    return number.places == decimals and number.remainder == 0 and number.low >= 0 and number.high <= 0


def _sign(left: Digits, right: Digits) -> int:
    return 0 if left == right else 1 if left > right else -1
