"""A grammar as data, and its EBNF text for xgrammar.

Nodes are immutable and built bottom-up. Rules have names, so that they can refer to themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Ranges = tuple[tuple[int, int], ...]
MAX_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True, slots=True)
class Chars:
    """Matches one character of the ranges. If there are no ranges, it matches no text."""

    ranges: Ranges  # inclusive, sorted, without surrogates


@dataclass(frozen=True, slots=True)
class Text:
    """A literal text, possibly empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Seq:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """A choice between one or more options."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A node that is repeated low to high times."""

    item: Node
    low: int
    high: int | None  # largest number of repetitions; None: unlimited


@dataclass(frozen=True, slots=True)
class Ref:
    name: str


Node = Chars | Text | Seq | Alternatives | Repeat | Ref


@dataclass(slots=True)
class Grammar:
    """Rules by name. A match begins with the rule `root`."""

    rules: dict[str, Node] = field(default_factory=dict)
    # Rules of xgrammar's schema converter as EBNF text, by name. Each of them matches at least one finite text.
    imported: dict[str, str] = field(default_factory=dict)

    def render(self) -> str:
        lines = [f"{name} ::= {_render(node)}" for name, node in self.rules.items()]
        lines += [f"{name} ::= {body}" for name, body in self.imported.items()]
        return "\n".join(lines) + "\n"

    def can_end(self) -> bool:
        """Returns whether the root rule matches any finite text. A rule that always refers to itself does not."""
        users: dict[str, list[str]] = {}
        for name, node in self.rules.items():
            for used in references(node):
                users.setdefault(used, []).append(name)
        finite = set(self.imported)
        waiting = list(self.rules)
        while waiting:
            name = waiting.pop()
            if name not in finite and _finite(self.rules[name], finite):
                finite.add(name)
                waiting.extend(users.get(name, ()))
        return "root" in finite


def references(node: Node) -> list[str]:
    """Returns the names of the rules to which a node refers."""
    found: list[str] = []
    waiting = [node]
    while waiting:
        match waiting.pop():
            case Ref(name):
                found.append(name)
            case Seq(items) | Alternatives(items):
                waiting.extend(items)
            case Repeat(item, _, _):
                waiting.append(item)
    return found


def seq(*items: Node) -> Node:
    return items[0] if len(items) == 1 else Seq(items)


def choice(options: Iterable[Node]) -> Node:
    found = tuple(options)
    return found[0] if len(found) == 1 else Alternatives(found)


def chars(*ranges: tuple[int, int]) -> Chars:
    """Returns the node of one character of the ranges, which are sorted and merged; surrogates are removed."""
    return Chars(normalized(ranges))


def normalized(ranges: Iterable[tuple[int, int]]) -> Ranges:
    low, high = SURROGATES
    cut = [part for a, b in ranges for part in ((a, min(b, low - 1)), (max(a, high + 1), b)) if part[0] <= part[1]]
    joined: list[tuple[int, int]] = []
    for a, b in sorted(cut):
        if joined and a <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(b, joined[-1][1]))
        else:
            joined.append((a, b))
    return tuple(joined)


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Returns all code points outside of the ranges, except surrogates."""
    gaps, start = [], 0
    for a, b in normalized(ranges):
        gaps.append((start, a - 1))
        start = b + 1
    gaps.append((start, MAX_CODE_POINT))
    return normalized((a, b) for a, b in gaps if a <= b)


def intersection(left: Iterable[tuple[int, int]], right: Iterable[tuple[int, int]]) -> Ranges:
    return complement((*complement(left), *complement(right)))


def without(ranges: Iterable[tuple[int, int]], removed: Iterable[tuple[int, int]]) -> Ranges:
    return intersection(ranges, complement(removed))


def _finite(node: Node, finite: set[str]) -> bool:
    match node:
        case Ref(name):
            return name in finite
        case Chars(ranges):
            return bool(ranges)
        case Text():
            return True
        case Seq(items):
            return all(_finite(item, finite) for item in items)
        case Alternatives(options):
            return any(_finite(option, finite) for option in options)
        case Repeat(item, low, _):
            return low == 0 or _finite(item, finite)


def _render(node: Node) -> str:
    match node:
        case Ref(name):
            return name
        case Chars(ranges):
            return "[" + "".join(_escape(a) if a == b else f"{_escape(a)}-{_escape(b)}" for a, b in ranges) + "]"
        case Text(text):
            return '"' + "".join(_escape(ord(char)) for char in text) + '"'
        case Seq(items):
            return " ".join(_atom(item) for item in items) or '""'
        case Alternatives(options):
            assert options, "a choice has at least one option"
            return " | ".join(_atom(option) for option in options)
        case Repeat(item, low, high):
            return _atom(item) + _count(low, high)


def _atom(node: Node) -> str:
    text = _render(node)
    return text if isinstance(node, Ref | Chars | Text) else f"({text})"


_SHORT: Mapping[tuple[int, int | None], str] = {(0, None): "*", (1, None): "+", (0, 1): "?"}


def _count(low: int, high: int | None) -> str:
    return _SHORT.get((low, high)) or f"{{{low},{'' if high is None else high}}}"


def _escape(code: int) -> str:
    """Returns ASCII letters, digits and blanks unchanged, and other characters as escapes.

    An escape has four or eight digits, because xgrammar may read a digit after a two-digit escape as part of the escape.
    """
    char = chr(code)
    if code < 0x80 and (char.isalnum() or char == " "):
        return char
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
