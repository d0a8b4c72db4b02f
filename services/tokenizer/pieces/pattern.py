"""A pre-tokenizer's regular expression, read just far enough to say between which two characters its matches never go on.

Positions are the pattern's character classes, and `follows` the pairs of them that can stand side by side within a match
(Glushkov's construction, 1961). Look-ahead only forbids matches, so that the pairs found without it are the most there can be.
What could make a match depend on anything but the text from its begin on (anchors, look-behind, back references) is refused.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field

Contains = Callable[[str], bool]  # one character


class NotUnderstood(Exception):
    """The expression has something in it that this reader does not know."""


@dataclass(eq=False, slots=True)
class Position:
    """One character class at one place of the pattern. wide: it may have been read wider than it is."""

    contains: Contains
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """position: a class; None for a group. most: None for no end. keeps: nothing that it took is given back."""

    position: Position | None
    least: int
    most: int | None
    keeps: bool


@dataclass(slots=True)
class Fragment:
    """A part of the pattern: the positions it may begin and end with. items: where it is a row of items, these."""

    nullable: bool = True
    first: tuple[Position, ...] = ()
    last: tuple[Position, ...] = ()
    items: tuple[Item, ...] = ()


@dataclass(slots=True)
class Branch:
    """One of the pattern's alternatives. text: as it was written. looks: it has a look-ahead."""

    text: str
    body: Fragment
    looks: bool


@dataclass(slots=True)
class Pattern:
    """follows: pairs of positions that may be neighbours in a match. ahead: of each look-ahead what a match may have taken last
    before it (None: anything), and the class of the one character that it looks at."""

    branches: tuple[Branch, ...] = ()
    follows: list[tuple[Position, Position]] = field(default_factory=list)
    ahead: list[tuple[tuple[Position, ...] | None, Contains]] = field(default_factory=list)

    def parts(self, before: str, after: str) -> bool:
        """Whether no match has these two characters side by side, and a match that ends between them is the same where the
        text ends there."""
        for taken, contains in self.ahead:
            if contains(after) and (taken is None or any(position.contains(before) for position in taken)):
                return False
        return not any(left.contains(before) and right.contains(after) for left, right in self.follows)

    def begins_at(self, char: str) -> bool:
        """Whether a match begins at every such character that no earlier match has taken."""
        return any(_begins(branch, char) for branch in self.branches)

    def can_have(self, char: str) -> bool:
        return any(position.contains(char) for pair in self.follows for position in pair) or any(
            position.contains(char) for branch in self.branches for position in (*branch.body.first, *branch.body.last)
        )


def _begins(branch: Branch, char: str) -> bool:
    if branch.looks:
        return False
    for item in branch.body.items:
        if item.position is None:
            return False
        if item.least == 1 and item.position.contains(char) and not item.position.wide:
            return _rest_may_be_empty(branch, item)
        if item.least or item.keeps:
            return False
    return False


def _rest_may_be_empty(branch: Branch, item: Item) -> bool:
    items = branch.body.items
    return all(other.least == 0 for other in items[items.index(item) + 1 :])


def read_pattern(text: str) -> Pattern:
    """Raises NotUnderstood."""
    reader = _Reader(text)
    branches = reader.branches(top=True)
    if reader.at != len(text) or any(branch.body.nullable for branch in branches):
        raise NotUnderstood(text)
    reader.pattern.branches = tuple(branches)
    return reader.pattern


class _Reader:
    """Recursive descent over the text, which is as deep as its groups."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.pattern = Pattern()
        self._folds = False  # within (?i:…)

    def branches(self, top: bool = False) -> list[Branch]:
        found = []
        while True:
            begin, looks = self.at, len(self.pattern.ahead)
            body = self._row()
            found.append(Branch(self.text[begin : self.at], body, len(self.pattern.ahead) > looks))
            if not self._takes("|"):
                break
        if not top and not self._takes(")"):
            raise NotUnderstood(self.text)
        return found

    def _takes(self, token: str) -> bool:
        if self.text.startswith(token, self.at):
            self.at += len(token)
            return True
        return False

    def _row(self) -> Fragment:
        row = Fragment()
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            if self._takes("(?!") or self._takes("(?="):
                self._look_ahead(None if row.nullable else row.last)
                continue
            row = self._joined(row, self._quantified(self._atom()))
        return row

    def _joined(self, left: Fragment, right: Fragment) -> Fragment:
        self.pattern.follows += [(a, b) for a in left.last for b in right.first]
        return Fragment(
            left.nullable and right.nullable,
            left.first + right.first if left.nullable else left.first,
            left.last + right.last if right.nullable else right.last,
            left.items + right.items,
        )

    def _look_ahead(self, taken: tuple[Position, ...] | None) -> None:
        for branch in self.branches():
            items = branch.body.items
            if branch.looks or len(items) != 1 or items[0].position is None or (items[0].least, items[0].most) != (1, 1):
                raise NotUnderstood(self.text)
            self.pattern.ahead.append((taken, items[0].position.contains))

    def _atom(self) -> Fragment:
        for begin, folds in (("(?:", None), ("(?i:", True), ("(?>", None)):
            if self._takes(begin):
                return self._group(self._folds if folds is None else folds)
        if self.text.startswith("(?", self.at):
            raise NotUnderstood(self.text)
        if self._takes("("):
            return self._group(self._folds)
        contains, wide = self._class()
        position = Position(contains, wide)
        return Fragment(False, (position,), (position,), (Item(position, 1, 1, False),))

    def _group(self, folds: bool) -> Fragment:
        outer, self._folds = self._folds, folds
        bodies = [branch.body for branch in self.branches()]
        self._folds = outer
        return Fragment(
            any(body.nullable for body in bodies),
            tuple(position for body in bodies for position in body.first),
            tuple(position for body in bodies for position in body.last),
            (Item(None, 1, 1, False),),
        )

    def _quantified(self, atom: Fragment) -> Fragment:
        least, most = self._counts()
        if (least, most) == (1, 1):
            return atom
        keeps = self._takes("+") or (self._takes("?") and False)
        if most != 1:
            self.pattern.follows += [(a, b) for a in atom.last for b in atom.first]
        item = Item(atom.items[0].position, least, most, keeps)
        return Fragment(atom.nullable or least == 0, atom.first, atom.last, (item,))

    def _counts(self) -> tuple[int, int | None]:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._takes(sign):
                return counts
        found = re.compile(r"\{(\d+)(,(\d*))?\}").match(self.text, self.at)
        if found is None:
            return 1, 1
        self.at = found.end()
        least = int(found[1])
        return least, least if found[2] is None else int(found[3]) if found[3] else None

    def _class(self) -> tuple[Contains, bool]:
        char = self.text[self.at]
        if char == "[":
            self.at += 1
            return self._set(), self._folds
        if char == "\\":
            return self._escape(), self._folds
        if char in "^$*+?{":
            raise NotUnderstood(self.text)
        self.at += 1
        if char == ".":
            return lambda one: one != "\n", True
        return (self._folded(char), True) if self._folds else (functools.partial(_same, char), False)

    def _folded(self, char: str) -> Contains:
        """Wider than it is: case folding may know letters that this Python does not."""
        return lambda one: one.casefold() == char.casefold() or not one.isascii()

    def _escape(self) -> Contains:
        found = re.compile(r"\\([pP])\{(\^?)(\w+)\}|\\(.)", re.DOTALL).match(self.text, self.at)
        if found is None:
            raise NotUnderstood(self.text)
        self.at = found.end()
        if found[1]:
            is_of = functools.partial(_is_of, _category(found[3]))
            return _inverted(is_of) if (found[1] == "P") != bool(found[2]) else is_of
        return _escaped(found[4])

    def _set(self) -> Contains:
        negated = self._takes("^")
        parts: list[Contains] = []
        while not self._takes("]"):
            if self.at >= len(self.text) or self.text.startswith(("[", "&&"), self.at):
                raise NotUnderstood(self.text)
            parts.append(self._range())
        folds = self._folds

        def contains(char: str) -> bool:
            forms = (char, char.lower(), char.upper()) if folds else (char,)
            return any(part(form) for part in parts for form in forms)

        if folds and negated:
            raise NotUnderstood(self.text)
        return _inverted(contains) if negated else contains

    def _range(self) -> Contains:
        low, contains = self._range_end()
        if low is None or not self.text.startswith("-", self.at) or self.text.startswith("-]", self.at):
            return contains
        self.at += 1
        high, _ = self._range_end()
        if high is None:
            raise NotUnderstood(self.text)
        return functools.partial(_within, low, high)

    def _range_end(self) -> tuple[str | None, Contains]:
        """A literal, and a class of it alone; or no literal, and a class."""
        char = self.text[self.at : self.at + 1]
        if char == "\\":
            begin = self.at
            contains = self._escape()
            literal = _LITERALS.get(self.text[begin + 1], self.text[begin + 1])
            is_class = self.text[begin + 1].isalnum() and self.text[begin + 1] not in _LITERALS
            return None if is_class else literal, contains
        if not char:
            raise NotUnderstood(self.text)
        self.at += 1
        return char, functools.partial(_same, char)


_LITERALS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_CATEGORIES = re.compile(r"L|Lu|Ll|Lt|Lm|Lo|M|Mn|Mc|Me|N|Nd|Nl|No|P|Pc|Pd|Ps|Pe|Pi|Pf|Po|S|Sm|Sc|Sk|So|Z|Zs|Zl|Zp")


def _escaped(char: str) -> Contains:
    if char in _LITERALS:
        return functools.partial(_same, _LITERALS[char])
    match char:
        case "s":
            return is_space
        case "S":
            return _inverted(is_space)
        case "d":
            return functools.partial(_is_of, "Nd")
        case "D":
            return _inverted(functools.partial(_is_of, "Nd"))
        case "w":
            return _is_word
        case "W":
            return _inverted(_is_word)
    if char.isalnum():
        raise NotUnderstood(f"\\{char}")
    return functools.partial(_same, char)


def _category(name: str) -> str:
    if not _CATEGORIES.fullmatch(name):
        raise NotUnderstood(f"\\p{{{name}}}")
    return name


def is_space(char: str) -> bool:
    """Unicode's White_Space, which Python's isspace() exceeds by four control characters."""
    return char.isspace() and not "\x1c" <= char <= "\x1f"


def _is_word(char: str) -> bool:
    return unicodedata.category(char) in ("Pc", "Nd") or unicodedata.category(char)[0] in "LM"


def _is_of(category: str, char: str) -> bool:
    return unicodedata.category(char).startswith(category)


def _same(char: str, one: str) -> bool:
    return char == one


def _within(low: str, high: str, one: str) -> bool:
    return low <= one <= high


def _inverted(contains: Contains) -> Contains:
    return lambda char: not contains(char)
