r"""Finds the pairs of neighbouring characters that no match of a pre-tokenizer's regular expression spans.

The reader collects the positions of the pattern (its character classes) and `follows`, the pairs of positions that can match
neighbouring characters (Glushkov's construction, 1961). `follows` ignores look-aheads. Because a look-ahead only forbids matches,
`follows` is a superset of the true pairs. The reader refuses constructs that make a match depend on text before its start
(anchors, look-behind, back references).

The worker's regex_syntax (services/worker/grammar/schema) cannot be used here. It reads the regular part of ECMA 262 into a tree
for grammars, and must refuse `\p{…}`, `(?i:…)`, atomic groups and possessive quantifiers, which Oniguruma's dialect of
pre-tokenizers has. Besides, this module only tests single characters against classes.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field

Contains = Callable[[str], bool]  # whether a class contains a character


class NotUnderstood(Exception):
    """The expression has a construct that this reader does not know."""


@dataclass(eq=False, slots=True)
class Position:
    """An occurrence of a character class in the pattern. Two occurrences of the same class are different positions."""

    contains: Contains
    wide: bool = False  # whether `contains` may accept more characters than the class has


@dataclass(frozen=True, slots=True)
class Item:
    """A quantified class or group."""

    position: Position | None  # the class; None for a group
    least: int  # smallest number of repetitions
    most: int | None  # largest number of repetitions; None for no limit
    is_possessive: bool


@dataclass(slots=True)
class Fragment:
    """A part of the pattern."""

    nullable: bool = True  # whether the part matches the empty text
    first: tuple[Position, ...] = ()  # positions of the first character of a match
    last: tuple[Position, ...] = ()  # positions of the last character of a match
    items: tuple[Item, ...] = ()  # the items of a concatenation


@dataclass(slots=True)
class Branch:
    """An alternative of the pattern."""

    text: str  # as written in the pattern
    body: Fragment
    has_look_ahead: bool


@dataclass(slots=True)
class Pattern:
    """A parsed pattern: its branches, and the pairs of its positions that can match neighbouring characters."""

    branches: tuple[Branch, ...] = ()
    # Pairs of positions that can match neighbouring characters.
    follows: list[tuple[Position, Position]] = field(default_factory=list)
    # Per alternative of a look-ahead: positions of the last matched character before the look-ahead (None: any), and its class.
    ahead: list[tuple[tuple[Position, ...] | None, Contains]] = field(default_factory=list)

    def parts(self, before: str, after: str) -> bool:
        """Whether a text may be cut between these two characters.

        True if no match contains the two characters as neighbours, and a match that ends between them stays the same if the text
        ends there.
        """
        for taken, contains in self.ahead:
            if contains(after) and (taken is None or any(position.contains(before) for position in taken)):
                return False
        return not any(left.contains(before) and right.contains(after) for left, right in self.follows)

    def begins_at(self, char: str) -> bool:
        """Whether a match begins at every occurrence of this character, unless an earlier match contains the occurrence."""
        return any(_begins(branch, char) for branch in self.branches)

    def can_have(self, char: str) -> bool:
        return any(position.contains(char) for pair in self.follows for position in pair) or any(
            position.contains(char) for branch in self.branches for position in (*branch.body.first, *branch.body.last)
        )


def _begins(branch: Branch, char: str) -> bool:
    if branch.has_look_ahead:
        return False
    for item in branch.body.items:
        if item.position is None:
            return False
        if item.least == 1 and item.position.contains(char) and not item.position.wide:
            return _rest_may_be_empty(branch, item)
        if item.least or item.is_possessive:
            return False
    return False


def _rest_may_be_empty(branch: Branch, item: Item) -> bool:
    items = branch.body.items
    return all(other.least == 0 for other in items[items.index(item) + 1 :])


def read_pattern(text: str) -> Pattern:
    """Reads a pattern. Raises NotUnderstood if it has an unknown construct or matches the empty text."""
    reader = _Reader(text)
    branches = reader.branches(top=True)
    if reader.at != len(text) or any(branch.body.nullable for branch in branches):
        raise NotUnderstood(text)
    reader.pattern.branches = tuple(branches)
    return reader.pattern


class _Reader:
    """A recursive-descent parser. The recursion is as deep as the nesting of groups."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.pattern = Pattern()
        self._folds = False  # whether the parser is in a case-insensitive group (?i:…)

    def branches(self, top: bool = False) -> list[Branch]:
        found = []
        while True:
            begin, num_look_aheads = self.at, len(self.pattern.ahead)
            body = self._concatenation()
            found.append(Branch(self.text[begin : self.at], body, len(self.pattern.ahead) > num_look_aheads))
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

    def _concatenation(self) -> Fragment:
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
            if branch.has_look_ahead or len(items) != 1 or items[0].position is None or (items[0].least, items[0].most) != (1, 1):
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
        is_possessive = self._takes("+") or (self._takes("?") and False)  # lazy and greedy quantifiers have the same neighbours
        if most != 1:
            self.pattern.follows += [(a, b) for a in atom.last for b in atom.first]
        item = Item(atom.items[0].position, least, most, is_possessive)
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
        """Returns a class of `char` in both cases and of all non-ASCII characters.

        All non-ASCII characters are included, because the library may fold more of them to `char` than Python.
        """
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
        """Reads an end of a range or an escaped class.

        Returns:
            (literal character, its class), or (None, class) for an escaped class.
        """
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
    """Whether the character is Unicode White_Space. Python's isspace() also accepts four control characters."""
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
