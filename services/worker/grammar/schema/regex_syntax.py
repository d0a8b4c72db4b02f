"""Parses regular expressions (the regular part of ECMA 262) into a tree.

xgrammar's own parser is not used, because it ignores anchors and lookaheads with a warning and does not escape characters for
JSON. Constructs that are not regular, or that differ between dialects, are refused. services/tokenizer/pattern.py parses another
dialect, Oniguruma's in pre-tokenizers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rootstock_llm.services.worker.grammar.schema.ebnf import MAX_CODE_POINT, Ranges, complement, normalized
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused

MAX_GROUP_DEPTH = 64  # largest nesting depth of groups
MAX_COUNT = 100_000  # largest m or n of a quantifier {m,n}

DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
LINE_FEED: Ranges = ((0x0A, 0x0A),)
BEYOND_ASCII: Ranges = ((0x80, MAX_CODE_POINT),)
# White space according to ECMA 262 or Python that is not in SPACE.
OTHER_SPACE: Ranges = (
    *((0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x180E, 0x180E), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
# Decimal digits of other scripts, which Python's \d includes.
OTHER_DIGITS = normalized((code, code) for code in range(0x80, MAX_CODE_POINT + 1) if chr(code).isdecimal())
_NAMED: dict[str, Ranges] = {"d": DIGITS, "w": WORD, "s": SPACE}
_BEYOND: dict[str, Ranges] = {"d": OTHER_DIGITS, "w": BEYOND_ASCII, "s": OTHER_SPACE}  # members in only some dialects
_CONTROL = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
_COUNT = re.compile(r"\{(\d+)(?:(,)(\d+)?)?\}", re.ASCII)
_ESCAPED_NAME = re.compile(r"\\[dwsDWS]")
_GROUP_NAME = re.compile(r"\?<([A-Za-z_$][\w$]*)>", re.ASCII)
_HEX = {"x": re.compile(r"[0-9A-Fa-f]{2}"), "u": re.compile(r"[0-9A-Fa-f]{4}|\{[0-9A-Fa-f]{1,6}\}")}


@dataclass(frozen=True, slots=True)
class Class:
    """A character class, which matches one character."""

    ranges: Ranges  # members in every dialect
    wide: Ranges  # members in at least one dialect
    vague: bool = False  # whether the pattern defines the class by exclusion (`.`, [^…], \\D, \\W, \\S)


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice between one or more options."""

    options: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """A part that is repeated low to high times."""

    item: Tree
    low: int
    high: int | None  # largest number of repetitions; None: unlimited


@dataclass(frozen=True, slots=True)
class Look:
    """A lookahead: the rest of the text must begin with the body, or must not if it is negative."""

    body: Tree
    negative: bool


@dataclass(frozen=True, slots=True)
class Anchor:
    """The anchor `^`, or `$` if at_end is set."""

    at_end: bool


Tree = Class | Sequence | Choice | Times | Look | Anchor
START, END = Anchor(False), Anchor(True)


@dataclass(slots=True)
class _Level:
    """A group of the pattern that is not closed yet."""

    options: list[Tree] = field(default_factory=list)  # complete alternatives
    items: list[Tree] = field(default_factory=list)  # items of the alternative that is being parsed
    look: bool | None = None  # whether the lookahead is negative; None: the group is not a lookahead

    def closed(self) -> Tree:
        found = (*self.options, sequence(self.items))
        return found[0] if len(found) == 1 else Choice(found)


def parse(pattern: str) -> Tree:
    """Returns the tree of a pattern; a Choice if it has several alternatives. Raises GrammarRefused with the fault's position."""
    return _Parser(pattern).parse()


def sequence(items: list[Tree]) -> Tree:
    return items[0] if len(items) == 1 else Sequence(tuple(items))


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._levels = [_Level()]
        self._repeatable = False  # whether a quantifier may follow the last item

    def parse(self) -> Tree:
        while self._at < len(self._pattern):
            self._step(self._pattern[self._at])
        if len(self._levels) > 1:
            raise self._refuse("a group is not closed")
        return self._levels[0].closed()

    def _step(self, char: str) -> None:
        count = _COUNT.match(self._pattern, self._at) if char == "{" else None
        if count is not None or char in "*+?":
            self._quantify(char, count)
        elif char == "(":
            self._open()
        elif char == ")":
            self._close()
        elif char == "|":
            self._at += 1
            self._bar()
        elif char in "^$":
            self._at += 1
            self._levels[-1].items.append(START if char == "^" else END)
            self._repeatable = False
        else:
            self._add(self._atom(char))

    def _atom(self, char: str) -> Tree:
        self._at += 1
        if char == ".":
            return Class(complement(LINE_ENDS), complement(LINE_FEED), True)
        if char == "[":
            return self._class()
        found = self._escape(in_class=False) if char == "\\" else _one(ord(char))
        return Class(normalized(found.ranges), normalized(found.wide), found.vague)

    def _add(self, tree: Tree) -> None:
        self._levels[-1].items.append(tree)
        self._repeatable = True

    def _quantify(self, char: str, count: re.Match[str] | None) -> None:
        if not self._repeatable:
            raise self._refuse(f"'{char}' has nothing to repeat")
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(char, (0, None))
        if count is not None:
            if len(count[0]) > 2 * len(str(MAX_COUNT)) + 3:
                raise self._refuse(f"repeat counts must be at most {MAX_COUNT}")
            low, high = int(count[1]), int(count[3]) if count[3] else None if count[2] else int(count[1])
        if max(low, high or 0) > MAX_COUNT or (high is not None and high < low):
            raise self._refuse(f"in {{m,n}}, m must be at most n, and both at most {MAX_COUNT}")
        self._at += len(count[0]) if count is not None else 1
        if self._pattern.startswith("?", self._at):  # a lazy quantifier matches the same texts
            self._at += 1
        items = self._levels[-1].items
        items[-1] = Times(items[-1], low, high)
        self._repeatable = False

    def _open(self) -> None:
        self._at += 1
        name = _GROUP_NAME.match(self._pattern, self._at)
        look = None
        if name is not None:
            self._at += len(name[0])
        elif self._pattern.startswith("?:", self._at):
            self._at += 2
        elif self._pattern.startswith(("?=", "?!"), self._at):
            look = self._pattern[self._at + 1] == "!"
            self._at += 2
        elif self._pattern.startswith("?", self._at):
            raise self._refuse("lookbehind and flags are not supported")
        if len(self._levels) > MAX_GROUP_DEPTH:
            raise self._refuse(f"groups are nested more than {MAX_GROUP_DEPTH} levels deep")
        self._levels.append(_Level(look=look))
        self._repeatable = False

    def _close(self) -> None:
        if len(self._levels) == 1:
            raise self._refuse("')' has no matching '('")
        level = self._levels.pop()
        self._at += 1
        if level.look is None:
            self._add(level.closed())
        else:
            self._levels[-1].items.append(Look(level.closed(), level.look))
            self._repeatable = False

    def _bar(self) -> None:
        level = self._levels[-1]
        level.options.append(sequence(level.items))
        level.items = []
        self._repeatable = False

    def _class(self) -> Tree:
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        ranges: list[tuple[int, int]] = []
        wide: list[tuple[int, int]] = []
        vague = negated
        names: set[str] = set()
        while True:
            if self._at >= len(self._pattern):
                raise self._refuse("a character class is not closed")
            if self._pattern[self._at] == "]":
                break
            if _ESCAPED_NAME.match(self._pattern, self._at):
                names.add(self._pattern[self._at + 1])
            item = self._class_item()
            ranges.extend(item.ranges)
            wide.extend(item.wide)
            vague = vague or item.vague
        self._at += 1
        if not wide:
            raise self._refuse("empty character class")
        if any({name, name.upper()} <= names for name in _NAMED):  # [\s\S] is any character in every dialect
            ranges = wide = [(0, MAX_CODE_POINT)]
        if negated:
            return Class(complement(wide), complement(ranges), vague)
        return Class(normalized(ranges), normalized(wide), vague)

    def _class_item(self) -> Class:
        low = self._class_char()
        is_range = self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at)
        if not is_range:
            return low
        self._at += 1
        if self._at >= len(self._pattern):
            raise self._refuse("a character class is not closed")
        first, last = _single(low), _single(self._class_char())
        if first is None or last is None or last < first:
            raise self._refuse("a range in a character class must have two characters, the first not after the last")
        return Class(((first, last),), ((first, last),))

    def _class_char(self) -> Class:
        char = self._pattern[self._at]
        self._at += 1
        return self._escape(in_class=True) if char == "\\" else _one(ord(char))

    def _escape(self, in_class: bool) -> Class:
        """Returns the class of an escape.

        All dialects agree about the ASCII members of a named class, such as `\\d`. They differ about its other members.
        """
        if self._at >= len(self._pattern):
            raise self._refuse("the pattern ends with a backslash")
        char = self._pattern[self._at]
        self._at += 1
        if char.lower() in _NAMED:
            sure, wide = _NAMED[char.lower()], (*_NAMED[char.lower()], *_BEYOND[char.lower()])
            return Class(sure, wide) if char.islower() else Class(complement(wide), complement(sure), True)
        return _one(self._code(char, in_class))

    def _code(self, char: str, in_class: bool) -> int:
        if char == "0" and self._pattern[self._at : self._at + 1].isdigit():
            raise self._refuse("octal escapes are not supported")
        if char in _CONTROL:
            return _CONTROL[char]
        if char == "b" and in_class:
            return 0x08
        if char in _HEX:
            return self._hex(char)
        if char == "c" and self._pattern[self._at : self._at + 1].isalpha() and self._pattern[self._at].isascii():
            self._at += 1
            return ord(self._pattern[self._at - 1]) % 32
        if char.isalnum():
            raise self._refuse(f"'\\{char}' is not supported")
        return ord(char)

    def _hex(self, kind: str) -> int:
        match = _HEX[kind].match(self._pattern, self._at)
        if match is None:
            raise self._refuse(f"'\\{kind}' needs hexadecimal digits")
        self._at += len(match[0])
        code = int(match[0].strip("{}"), 16)
        low = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})").match(self._pattern, self._at)
        if 0xD800 <= code <= 0xDBFF and low is not None:
            self._at += len(low[0])
            return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if code > MAX_CODE_POINT or 0xD800 <= code <= 0xDFFF:
            raise self._refuse(f"'\\{kind}{match[0]}' is not a character")
        return code

    def _refuse(self, why: str) -> GrammarRefused:
        return GrammarRefused(f"pattern, position {self._at}: {why}")


def _one(code: int) -> Class:
    return Class(((code, code),), ((code, code),))


def _single(found: Class) -> int | None:
    """Returns the code point of a class that has one character, or None if the class has several characters."""
    ranges = found.ranges
    return ranges[0][0] if ranges == found.wide and len(ranges) == 1 and ranges[0][0] == ranges[0][1] else None
