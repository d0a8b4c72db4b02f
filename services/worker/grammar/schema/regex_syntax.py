"""Regular expressions (the part of ECMA 262 that is regular) read into grammar nodes.

Read by us, not by the compiler, because it drops what it does not know (anchors, lookaheads) with a warning, and knows
nothing of how JSON writes a character. What is not regular, or means different things in different dialects, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from services.worker.grammar.schema.ebnf import (
    MAX_CODE_POINT,
    Alternatives,
    Chars,
    Node,
    Ranges,
    Repeat,
    choice,
    complement,
    normalized,
    seq,
)
from services.worker.grammar.schema.refusal import GrammarRefused

MAX_GROUP_DEPTH = 64
MAX_COUNT = 100_000  # of one {m,n}

DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
ASCII: Ranges = ((0x00, 0x7F),)
_NAMED: dict[str, Ranges] = {"d": DIGITS, "w": WORD, "s": SPACE}
_CONTROL = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
_COUNT = re.compile(r"\{(\d+)(?:(,)(\d+)?)?\}", re.ASCII)
_GROUP_NAME = re.compile(r"\?<([A-Za-z_$][\w$]*)>", re.ASCII)
_HEX = {"x": re.compile(r"[0-9A-Fa-f]{2}"), "u": re.compile(r"[0-9A-Fa-f]{4}|\{[0-9A-Fa-f]{1,6}\}")}

MakeChars = Callable[[Ranges, bool], Node]


@dataclass(frozen=True, slots=True)
class Branch:
    """One alternative of the whole pattern, and whether `^` and `$` stood at its ends."""

    node: Node
    starts: bool
    ends: bool


@dataclass(slots=True)
class _Level:
    """An open group: its finished options and the items of the one being read."""

    options: list[Node] = field(default_factory=list)
    items: list[Node] = field(default_factory=list)


def parse(pattern: str, make_chars: MakeChars) -> list[Branch]:
    """The pattern's alternatives. make_chars(ranges, vague) makes the node of one character; vague: the pattern names it
    only by what it is not (`.`, [^…], \\D \\W \\S). Raises GrammarRefused with the position."""
    return _Parser(pattern, make_chars).parse()


class _Parser:
    def __init__(self, pattern: str, make_chars: MakeChars) -> None:
        self._pattern = pattern
        self._make = make_chars
        self._at = 0
        self._levels = [_Level()]
        self._branches: list[Branch] = []
        self._starts = self._ends = False
        self._repeatable = False  # the last item may take a quantifier

    def parse(self) -> list[Branch]:
        while self._at < len(self._pattern):
            self._step(self._pattern[self._at])
        if len(self._levels) > 1:
            raise self._refuse("a group is not closed")
        self._end_branch()
        return self._branches

    def _step(self, char: str) -> None:
        if self._ends and char != "|":
            raise self._refuse("'$' is supported at the end of the pattern, or of one of its alternatives, only")
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
            self._anchor(char)
        else:
            self._add(self._atom(char))

    def _atom(self, char: str) -> Node:
        self._at += 1
        if char == ".":
            return self._make(complement(LINE_ENDS), True)
        if char == "[":
            return self._class()
        ranges, vague = self._escape(in_class=False) if char == "\\" else (((ord(char), ord(char)),), False)
        return self._make(normalized(ranges), vague)

    def _add(self, node: Node) -> None:
        self._levels[-1].items.append(node)
        self._repeatable = True

    def _quantify(self, char: str, count: re.Match[str] | None) -> None:
        if not self._repeatable:
            raise self._refuse(f"nothing before '{char}' to repeat")
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(char, (0, None))
        if count is not None:
            if len(count[0]) > 2 * len(str(MAX_COUNT)) + 3:
                raise self._refuse(f"repeat counts must be at most {MAX_COUNT}")
            low, high = int(count[1]), int(count[3]) if count[3] else None if count[2] else int(count[1])
        if max(low, high or 0) > MAX_COUNT or (high is not None and high < low):
            raise self._refuse(f"repeat counts must rise and be at most {MAX_COUNT}")
        self._at += len(count[0]) if count is not None else 1
        if self._pattern.startswith("?", self._at):  # lazy: the same texts match
            self._at += 1
        items = self._levels[-1].items
        items[-1] = Repeat(items[-1], low, high)
        self._repeatable = False

    def _open(self) -> None:
        self._at += 1
        name = _GROUP_NAME.match(self._pattern, self._at)
        if name is not None:
            self._at += len(name[0])
        elif self._pattern.startswith("?:", self._at):
            self._at += 2
        elif self._pattern.startswith("?", self._at):
            raise self._refuse("lookaround and flags are not supported")
        if len(self._levels) > MAX_GROUP_DEPTH:
            raise self._refuse(f"groups are nested more than {MAX_GROUP_DEPTH} deep")
        self._levels.append(_Level())
        self._repeatable = False

    def _close(self) -> None:
        if len(self._levels) == 1:
            raise self._refuse("')' closes no group")
        level = self._levels.pop()
        self._at += 1
        self._add(choice([*level.options, seq(*level.items)]))

    def _bar(self) -> None:
        if len(self._levels) == 1:
            self._end_branch()
        else:
            level = self._levels[-1]
            level.options.append(seq(*level.items))
            level.items = []
        self._repeatable = False

    def _end_branch(self) -> None:
        level = self._levels[0]
        self._branches.append(Branch(seq(*level.items), self._starts, self._ends))
        level.items = []
        self._starts = self._ends = False

    def _anchor(self, char: str) -> None:
        at_start = char == "^" and not self._levels[-1].items and not self._starts
        if len(self._levels) > 1 or (char == "^" and not at_start):
            raise self._refuse(f"'{char}' is supported at the ends of the pattern, or of one of its alternatives, only")
        self._at += 1
        self._repeatable = False
        if char == "^":
            self._starts = True
        else:
            self._ends = True

    def _class(self) -> Node:
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        ranges: list[tuple[int, int]] = []
        vague = negated
        while True:
            if self._at >= len(self._pattern):
                raise self._refuse("a character class is not closed")
            if self._pattern[self._at] == "]":
                break
            item, item_vague = self._class_item()
            ranges.extend(item)
            vague = vague or item_vague
        self._at += 1
        if not ranges:
            raise self._refuse("empty character class")
        return self._make(complement(ranges) if negated else normalized(ranges), vague)

    def _class_item(self) -> tuple[Ranges, bool]:
        low, vague = self._class_char()
        is_range = self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at)
        if not is_range:
            return low, vague
        self._at += 1
        if self._at >= len(self._pattern):
            raise self._refuse("a character class is not closed")
        high, _ = self._class_char()
        single = len(low) == len(high) == 1 and low[0][0] == low[0][1] and high[0][0] == high[0][1]
        if not single or high[0][0] < low[0][0]:
            raise self._refuse("not a range of characters")
        return ((low[0][0], high[0][0]),), False

    def _class_char(self) -> tuple[Ranges, bool]:
        char = self._pattern[self._at]
        self._at += 1
        return self._escape(in_class=True) if char == "\\" else (((ord(char), ord(char)),), False)

    def _escape(self, in_class: bool) -> tuple[Ranges, bool]:
        """What stands behind a backslash. Negated names stay within ASCII: dialects differ on what lies beyond."""
        if self._at >= len(self._pattern):
            raise self._refuse("the pattern ends in a backslash")
        char = self._pattern[self._at]
        self._at += 1
        if char in _NAMED:
            return _NAMED[char], False
        if char.lower() in _NAMED:
            inside = complement(_NAMED[char.lower()])
            return tuple((a, min(b, ASCII[0][1])) for a, b in inside if a <= ASCII[0][1]), True
        code = self._code(char, in_class)
        return ((code, code),), False

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
            raise self._refuse(f"'\\{kind}' without its digits")
        self._at += len(match[0])
        code = int(match[0].strip("{}"), 16)
        low = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})").match(self._pattern, self._at)
        if 0xD800 <= code <= 0xDBFF and low is not None:
            self._at += len(low[0])
            return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if code > MAX_CODE_POINT or 0xD800 <= code <= 0xDFFF:
            raise self._refuse(f"'\\{kind}{match[0]}' is no character")
        return code

    def _refuse(self, why: str) -> GrammarRefused:
        return GrammarRefused(f"pattern, position {self._at}: {why}")


def whole(branches: list[Branch]) -> Node:
    """The node that the whole text must match; anchors change nothing then."""
    return choice(branch.node for branch in branches)


def anywhere(branches: list[Branch], filler: Chars) -> Node:
    """The node of a text in which the pattern is found; filler: the characters that may stand around it."""
    any_text = Repeat(filler, 0, None)
    return Alternatives(
        tuple(
            seq(*([] if branch.starts else [any_text]), branch.node, *([] if branch.ends else [any_text])) for branch in branches
        )
    )
