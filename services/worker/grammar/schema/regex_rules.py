"""Rules for regular expressions, either for a whole output or for a JSON string, in which some characters must be escaped.

A pattern without lookaheads and length limits is translated directly. Other patterns become an automaton, whose states become
rules. A state of the automaton is a set of threads. A thread is a position in the pattern, with the lookaheads that the rest of
the text must still satisfy. Each lookahead is a separate automaton, for the lookahead's body followed by any text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rootstock_llm.services.worker.grammar.schema import automaton
from rootstock_llm.services.worker.grammar.schema.automaton import MAX_EXPLORED, Automaton, TooLarge, explored, inverted, rules_of
from rootstock_llm.services.worker.grammar.schema.ebnf import (
    Chars,
    Grammar,
    Node,
    Ranges,
    Ref,
    Repeat,
    Text,
    choice,
    complement,
    intersection,
    seq,
)
from rootstock_llm.services.worker.grammar.schema.json_rules import ESCAPED, QUOTE, SAFE
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused
from rootstock_llm.services.worker.grammar.schema.regex_syntax import (
    END,
    START,
    Anchor,
    Choice,
    Class,
    Look,
    Sequence,
    Times,
    Tree,
    parse,
)

COUNTED_CHARS = 16  # a repeated group with more characters becomes a rule, so that it is compiled only once

_ANY = Times(Class(complement(()), complement(())), 0, None)  # any text
_FILLER = Times(Class(SAFE.ranges, SAFE.ranges), 0, None)  # any text without escapes
Define = Callable[[Node], Ref]
Pending = frozenset[tuple[int, int]]  # unsatisfied lookaheads as (index of the lookahead's automaton, its state)
Threads = frozenset[tuple[int, Pending]]  # (position, unsatisfied lookaheads)
_Known = dict[tuple[Tree, bool, bool, bool], Automaton]  # by body, negative, wide, at_start


def regex_ebnf(pattern: str) -> str:
    """Returns the EBNF of a pattern that the whole output must match, even without `^` and `$`. Raises GrammarRefused."""
    tree = parse(pattern)
    branches = [branch for branch, _, _ in _branches(tree)]
    if not any(map(_looks, branches)):
        return Grammar({"root": choice(_node(branch, _raw_chars, None) for branch in branches)}).render()
    try:
        found = _language(tree, plain_text=True)
        return Grammar(rules_of(_not_empty(found), lambda ranges: _raw_chars(ranges, False), Text(""), "root")).render()
    except TooLarge as error:
        raise GrammarRefused(f"pattern: too large: {error}") from None


@dataclass(frozen=True, slots=True)
class StringLimits:
    """The limits that the text of a JSON string must satisfy together."""

    patterns: tuple[str, ...]  # each pattern must match somewhere in the text
    low: int = 0  # smallest number of characters
    high: int | None = None  # largest number of characters; None: unlimited

    def as_it_stands(self, define: Define) -> Node | None:
        """Returns the direct translation of the only pattern.

        Returns:
            None if there are several patterns, the pattern has lookaheads, or the length limits exclude some texts that match.

        Raises:
            GrammarRefused: the pattern is malformed or not supported.
        """
        tree = parse(self.patterns[0])
        fewest, most = _found_lengths(tree)
        within = self.low <= fewest and (self.high is None or (most is not None and most <= self.high))
        return _string_with(tree, define) if within and len(self.patterns) == 1 else None

    @property
    def has_end(self) -> bool:
        """Whether the first pattern limits the length of the text. Raises GrammarRefused."""
        return _found_lengths(parse(self.patterns[0]))[1] is not None

    def automaton(self) -> Automaton:
        """Returns the automaton of all texts that satisfy the limits. Raises GrammarRefused and TooLarge."""
        low, high = self.low, self.high
        found: Automaton | None = None
        for pattern in self.patterns:
            tree, fewest, most = _without_length(parse(pattern))
            low, high = max(low, fewest), most if high is None else high if most is None else min(high, most)
            language = _language(Sequence((_FILLER, tree, _FILLER)), plain_text=False)
            found = language if found is None else automaton.intersection(found, language)
        assert found is not None, "a string without a pattern needs no automaton"
        shortest, longest = found.lengths()
        if low > shortest or (high is not None and (longest is None or longest > high)):
            found = automaton.intersection(found, automaton.of_length(low, high))
        return found


def _without_length(tree: Tree) -> tuple[Tree, int, int | None]:
    """Removes a leading lookahead that limits the length of the whole text, such as `^(?=.{1,253}$)`.

    If the lookahead stayed, its count would multiply the states of the automaton.

    Returns:
        (pattern without the lookahead, smallest number of characters, largest number). Without such a lookahead, 0 and None.
    """
    if not isinstance(tree, Sequence) or tree.items[:1] != (START,) or len(tree.items) < 2:
        return tree, 0, None
    look = tree.items[1]
    if not isinstance(look, Look) or look.negative or not isinstance(look.body, Sequence) or len(look.body.items) < 2:
        return tree, 0, None
    counted, *optional, last = look.body.items
    if not isinstance(counted, Times) or not isinstance(counted.item, Class) or last != END:
        return tree, 0, None
    if any(_looks(item) or _lengths(item)[0] for item in optional):
        return tree, 0, None
    every_char = Look(Sequence((Times(counted.item, 0, None), END)), negative=False)
    return Sequence((START, every_char, *tree.items[2:])), counted.low, counted.high


def _string_with(tree: Tree, define: Define) -> Node | None:
    """Returns a JSON string in which the pattern matches somewhere, or None if the pattern needs an automaton."""
    options = []
    for branch, starts, ends in _branches(tree):
        if _looks(branch):
            return None
        options.append(Sequence((*(() if starts else (_FILLER,)), branch, *(() if ends else (_FILLER,)))))
    return seq(QUOTE, choice(_node(option, _json_chars, define) for option in options), QUOTE)


def _found_lengths(tree: Tree) -> tuple[int, int | None]:
    """Returns the smallest and largest number of characters of texts in which the pattern matches. None means unlimited."""
    found = [(_lengths(branch), starts and ends) for branch, starts, ends in _branches(tree)]
    highs = [high if bounded else None for (_, high), bounded in found]
    return min(low for (low, _), _ in found), None if None in highs else max(high or 0 for high in highs)


def _branches(tree: Tree) -> list[tuple[Tree, bool, bool]]:
    """Returns the pattern's alternatives as (alternative without `^` and `$`, whether it had `^`, whether it had `$`)."""
    found: list[tuple[Tree, bool, bool]] = []
    for branch in tree.options if isinstance(tree, Choice) else (tree,):
        items = branch.items if isinstance(branch, Sequence) else (branch,)
        starts, ends = START in items[:1], END in items[-1:]
        found.append((Sequence(tuple(items[starts : len(items) - ends])), starts, ends))
    return found


def string_of(found: Automaton, prefix: str) -> dict[str, Node]:
    """Returns the rules of the JSON strings whose text the automaton accepts.

    Args:
        prefix: name of the start rule, which begins after the opening quote.

    Raises:
        GrammarRefused: the automaton accepts no text.
        TooLarge: the automaton has too many states.
    """
    return rules_of(_not_empty(found), lambda ranges: _json_chars(ranges, False), QUOTE, prefix)


def _not_empty(found: Automaton) -> Automaton:
    if found.is_empty:
        raise GrammarRefused("pattern: no text satisfies the pattern and the other limits of the string")
    return found


def _json_chars(ranges: Ranges, vague: bool) -> Node:
    """Returns the node of one character in a JSON string. Each character has one spelling.

    Args:
        vague: whether characters that need an escape are omitted.
    """
    plain = intersection(ranges, SAFE.ranges)
    options: list[Node] = [Chars(plain)] if plain else []
    if not vague:
        codes = [code for low, high in intersection(ranges, ESCAPED) for code in range(low, high + 1)]
        options += [Text(json.dumps(chr(code))[1:-1]) for code in codes]
    if not options:
        raise GrammarRefused("pattern: a character class has no character that is possible in a JSON string")
    return choice(options)


def _raw_chars(ranges: Ranges, vague: bool) -> Node:
    """Returns the node of one character of plain text."""
    if not ranges:
        raise GrammarRefused("pattern: a character class has no characters")
    return Chars(ranges)


def _node(tree: Tree, chars: Callable[[Ranges, bool], Node], define: Define | None) -> Node:
    """Returns the node of a tree without anchors and lookaheads. Long repeated groups become rules if `define` is given."""
    match tree:
        case Class(ranges, _, vague):
            return chars(ranges, vague)
        case Sequence(items):
            return seq(*(_node(item, chars, define) for item in items))
        case Choice(options):
            return choice(_node(option, chars, define) for option in options)
        case Times(item, low, high):
            node = _node(item, chars, define)
            is_long = (_lengths(item)[1] or 0) > COUNTED_CHARS
            counted = high is not None and high > 1
            return Repeat(define(node) if define is not None and is_long and counted else node, low, high)
    raise AssertionError("a tree with anchors or lookaheads is not translated directly")


def _looks(tree: Tree) -> bool:
    """Returns whether the tree contains an anchor or a lookahead."""
    match tree:
        case Look() | Anchor():
            return True
        case Sequence(items) | Choice(items):
            return any(map(_looks, items))
        case Times(item, _, _):
            return _looks(item)
    return False


def _lengths(tree: Tree) -> tuple[int, int | None]:
    """Returns the smallest and largest number of characters that the tree matches. None means unlimited."""
    match tree:
        case Class():
            return 1, 1
        case Sequence(items):
            found = [_lengths(item) for item in items]
            highs = [high for _, high in found]
            return sum(low for low, _ in found), None if None in highs else sum(high or 0 for high in highs)
        case Choice(options):
            found = [_lengths(option) for option in options]
            highs = [high for _, high in found]
            return min(low for low, _ in found), None if None in highs else max(high or 0 for high in highs)
        case Times(item, low, high):
            fewest, most = _lengths(item)
            return fewest * low, 0 if most == 0 else None if most is None or high is None else most * high
    return 0, 0


@dataclass(slots=True)
class _Threads:
    """A pattern's positions and the moves between them. Position 0 is the start, position 1 the end of the pattern."""

    wide: bool  # whether classes have the members of all dialects, as inside a negative lookahead
    plain_text: bool  # whether the text is plain; in a JSON string, a vague class has no characters that need an escape
    known: _Known  # cached automata of lookaheads, shared with nested patterns; without it, each nesting doubles the work
    # Per position: moves that read no character, as (target, condition). A condition is a pair of indices into `looks`: for the
    # start of the text and for other positions. (-1, -1) allows the move only at the start of the text.
    silent: list[list[tuple[int, tuple[int, int] | None]]] = field(default_factory=lambda: [[], []])
    reads: list[tuple[Ranges, int] | None] = field(default_factory=lambda: [None, None])  # per position: (character, target)
    looks: list[Automaton] = field(default_factory=lambda: [automaton.END_ALONE])  # automata of lookaheads; 0 is the end of text

    def position(self) -> int:
        if len(self.reads) >= MAX_EXPLORED:
            raise TooLarge(f"more than {MAX_EXPLORED} positions")
        self.silent.append([])
        self.reads.append(None)
        return len(self.reads) - 1

    def lay(self, tree: Tree, first: int, last: int) -> None:
        """Adds the moves of a part of the pattern between two positions."""
        match tree:
            case Class(ranges, wide, vague):
                sure = ranges if self.plain_text or not vague else intersection(ranges, SAFE.ranges)
                at = self.position()
                self.silent[first].append((at, None))
                self.reads[at] = (wide if self.wide else sure, last)
            case Sequence(items):
                for item in items[:-1]:
                    onward = self.position()
                    self.lay(item, first, onward)
                    first = onward
                if items:
                    self.lay(items[-1], first, last)
                else:
                    self.silent[first].append((last, None))
            case Choice(options):
                for option in options:
                    self.lay(option, first, last)
            case Times(item, low, high):
                self._lay_times(item, low, high, first, last)
            case Anchor(at_end):
                self.silent[first].append((last, (0, 0) if at_end else (-1, -1)))
            case Look(body, negative):
                self.silent[first].append((last, self._look(body, negative)))

    def _lay_times(self, item: Tree, low: int, high: int | None, first: int, last: int) -> None:
        for _ in range(low):
            onward = self.position()
            self.lay(item, first, onward)
            first = onward
        if high is None:
            again = self.position()
            self.silent[first].append((again, None))
            onward = self.position()
            self.lay(item, again, onward)
            self.silent[onward].append((again, None))
            first = again
        for _ in range((high or low) - low):
            self.silent[first].append((last, None))
            onward = self.position()
            self.lay(item, first, onward)
            first = onward
        self.silent[first].append((last, None))

    def _look(self, body: Tree, negative: bool) -> tuple[int, int]:
        """Returns the indices of the lookahead's automata: for the start of the text, and for other positions."""
        wide = self.wide != negative
        numbers = []
        for at_start in (True, False):
            look = self.known.get((body, negative, wide, at_start))
            if look is None:
                found = _language(Sequence((body, _ANY)), plain_text=True, wide=wide, at_start=at_start, known=self.known)
                look = self.known[body, negative, wide, at_start] = inverted(found) if negative else found
            self.looks.append(look)
            numbers.append(len(self.looks) - 1)
        return numbers[0], numbers[1]

    def closure(self, threads: Iterable[tuple[int, Pending]], at_start: bool) -> Threads:
        """Returns the threads that the given threads reach without reading a character.

        Each returned thread is at the end of the pattern or reads a character next. A thread is omitted if another thread at the
        same position has a subset of its pending lookaheads, because that thread accepts at least as many texts.
        """
        waiting = list(threads)
        seen = set(waiting)
        while waiting:
            position, pending = waiting.pop()
            for target, condition in self.silent[position]:
                onward = self._with(pending, condition, at_start)
                if onward is not None and (target, onward) not in seen:
                    seen.add((target, onward))
                    waiting.append((target, onward))
            if len(seen) > MAX_EXPLORED:
                raise TooLarge(f"more than {MAX_EXPLORED} threads")
        resting = {thread for thread in seen if thread[0] == 1 or self.reads[thread[0]] is not None}
        easiest: dict[int, list[Pending]] = {}
        for position, pending in sorted(resting, key=lambda thread: len(thread[1])):
            if not any(other <= pending for other in easiest.get(position, ())):
                easiest.setdefault(position, []).append(pending)
        return frozenset((position, pending) for position, all_of in easiest.items() for pending in all_of)

    def _with(self, pending: Pending, condition: tuple[int, int] | None, at_start: bool) -> Pending | None:
        """Returns the pending lookaheads after a move, or None if the condition forbids the move."""
        if condition is None:
            return pending
        if condition == (-1, -1):
            return pending if at_start else None
        number = condition[0] if at_start else condition[1]
        look = self.looks[number]
        if look.is_empty:
            return None
        return pending if look.loops_on_everything(0) else pending | {(number, 0)}

    def step(self, threads: Threads) -> tuple[bool, list[tuple[int, int, Threads]]]:
        accepted = any(
            position == 1 and all(self.looks[number].accepts[at] for number, at in pending) for position, pending in threads
        )
        moves: list[tuple[int, int, tuple[int, Pending]]] = []
        for position, pending in threads:
            read = self.reads[position]
            if read is not None:
                ranges, target = read
                moves += [(low, high, (target, onward)) for low, high, onward in self._advanced(ranges, pending)]
        bounds = sorted({move[0] for move in moves} | {move[1] + 1 for move in moves})
        found: list[tuple[int, int, Threads]] = []
        starting: dict[int, list[tuple[int, int, tuple[int, Pending]]]] = {}
        for move in moves:
            starting.setdefault(move[0], []).append(move)
        open_moves: list[tuple[int, int, tuple[int, Pending]]] = []
        known: dict[frozenset[tuple[int, Pending]], Threads] = {}
        for low, after in itertools.pairwise(bounds):
            open_moves = [move for move in open_moves if move[1] >= low] + starting.get(low, [])
            targets = frozenset(move[2] for move in open_moves)
            if targets:
                if targets not in known:
                    known[targets] = self.closure(targets, False)
                if known[targets]:
                    found.append((low, after - 1, known[targets]))
        return accepted, found

    def _advanced(self, ranges: Ranges, pending: Pending) -> list[tuple[int, int, Pending]]:
        """Returns the parts of the ranges on which all lookaheads can advance, each with its remaining pending lookaheads."""
        spans: list[tuple[int, int, Pending]] = [(low, high, frozenset()) for low, high in ranges]
        for number, at in pending:
            look = self.looks[number]
            spans = [
                (max(low, a), min(high, b), onward if look.loops_on_everything(target) else onward | {(number, target)})
                for low, high, onward in spans
                for a, b, target in look.spans[at]
                if max(low, a) <= min(high, b)
            ]
        return spans


def _language(
    tree: Tree, *, plain_text: bool, wide: bool = False, at_start: bool = True, known: _Known | None = None
) -> Automaton:
    """Returns the automaton of the texts that the tree matches completely.

    It recurses into nested lookaheads, whose depth is limited.

    Args:
        at_start: whether `^` matches at the first character.
        known: cache of the automata of lookaheads; None: a new cache.
    """
    threads = _Threads(wide, plain_text, {} if known is None else known)
    threads.lay(tree, 0, 1)
    return explored(threads.closure([(0, frozenset())], at_start), threads.step)
