"""Rules for regular expressions, for a whole output or for a JSON string, in which some characters must be escaped.

A pattern without lookaheads and length limits is translated directly. Other patterns become an automaton, whose states become
rules. A state of the automaton is a set of threads. A thread is a position in the pattern, with the pending lookaheads, which the
rest of the text must still satisfy. Each lookahead is a separate automaton, for the lookahead's body followed by any text.
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
Pending = frozenset[tuple[int, int]]  # pending lookaheads as (index of the lookahead's automaton, state of that automaton)
Threads = frozenset[tuple[int, Pending]]  # threads as (position, pending lookaheads)
_Known = dict[tuple[Tree, bool, bool, bool], Automaton]  # automata of lookaheads by (body, negative, wide, at_start)


def regex_ebnf(pattern: str) -> str:
    """Returns the EBNF of a pattern that the whole output must match, even without `^` and `$`. Raises GrammarRefused."""
    tree = parse(pattern)
    branches = [branch for branch, _, _ in _branches(tree)]
    if not any(map(_has_assertion, branches)):
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

    def direct_node(self, define: Define) -> Node | None:
        """Returns the direct translation of the first pattern.

        Returns:
            None if a direct translation is not possible: there are several patterns, the first pattern has lookaheads, or the
            length limits exclude some texts in which it matches.

        Raises:
            GrammarRefused: the first pattern is malformed or not supported.
        """
        tree = parse(self.patterns[0])
        fewest, most = _found_lengths(tree)
        within = self.low <= fewest and (self.high is None or (most is not None and most <= self.high))
        return _string_with(tree, define) if within and len(self.patterns) == 1 else None

    @property
    def is_bounded(self) -> bool:
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
    """Removes the count from a leading lookahead that limits the length of the whole text, such as `^(?=.{1,253}$)`.

    Otherwise, the count would multiply the states of the automaton. The rest of the lookahead, `^(?=.*$)`, stays.

    Returns:
        (pattern, smallest number of characters, largest number). A pattern without such a lookahead does not change; the numbers
        are then 0 and None.
    """
    if not isinstance(tree, Sequence) or tree.items[:1] != (START,) or len(tree.items) < 2:
        return tree, 0, None
    look = tree.items[1]
    if not isinstance(look, Look) or look.negative or not isinstance(look.body, Sequence) or len(look.body.items) < 2:
        return tree, 0, None
    counted, *optional, last = look.body.items
    if not isinstance(counted, Times) or not isinstance(counted.item, Class) or last != END:
        return tree, 0, None
    if any(_has_assertion(item) or _lengths(item)[0] for item in optional):
        return tree, 0, None
    every_char = Look(Sequence((Times(counted.item, 0, None), END)), negative=False)
    return Sequence((START, every_char, *tree.items[2:])), counted.low, counted.high


def _string_with(tree: Tree, define: Define) -> Node | None:
    """Returns the node of JSON strings in which the pattern matches somewhere, or None if the pattern needs an automaton."""
    options = []
    for branch, starts, ends in _branches(tree):
        if _has_assertion(branch):
            return None
        options.append(Sequence((*(() if starts else (_FILLER,)), branch, *(() if ends else (_FILLER,)))))
    return seq(QUOTE, choice(_node(option, _json_chars, define) for option in options), QUOTE)


def _found_lengths(tree: Tree) -> tuple[int, int | None]:
    """Returns the smallest and largest length of texts in which the pattern matches somewhere. None means unlimited."""
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
        vague: whether the pattern defines the characters by exclusion. Characters that need an escape are then omitted.
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
    """Returns the node of a tree without anchors and lookaheads.

    Args:
        chars: returns the node of one character of the ranges; the second argument is Class.vague.
        define: turns a node into a rule. A repeated group of more than COUNTED_CHARS characters then becomes a rule. None: no
            rules.
    """
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


def _has_assertion(tree: Tree) -> bool:
    """Returns whether the tree contains an anchor or a lookahead."""
    match tree:
        case Look() | Anchor():
            return True
        case Sequence(items) | Choice(items):
            return any(map(_has_assertion, items))
        case Times(item, _, _):
            return _has_assertion(item)
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
    """A pattern's positions and the moves between them. Position 0 is the start of the pattern, and position 1 is its end."""

    wide: bool  # whether classes have the members of all dialects, as inside a negative lookahead
    plain_text: bool  # whether the text is plain; in a JSON string, a vague class has no characters that need an escape
    known: _Known  # cache of lookahead automata, shared with nested patterns; without it, each nesting level doubles the work
    # Per position: moves that read no character, as (target, condition). None allows the move everywhere, and (-1, -1) only at
    # the start of the text. Any other condition has two indices into `looks`. The automaton at the first index must accept the
    # rest of the text if the move is at the start of the text. At other positions, the automaton at the second index must.
    empty_moves: list[list[tuple[int, tuple[int, int] | None]]] = field(default_factory=lambda: [[], []])
    # Per position: the move that reads a character, as (allowed characters, target); None: there is none.
    reads: list[tuple[Ranges, int] | None] = field(default_factory=lambda: [None, None])
    looks: list[Automaton] = field(default_factory=lambda: [automaton.END_ALONE])  # automata of lookaheads; index 0: end of text

    def new_position(self) -> int:
        if len(self.reads) >= MAX_EXPLORED:
            raise TooLarge(f"more than {MAX_EXPLORED} positions")
        self.empty_moves.append([])
        self.reads.append(None)
        return len(self.reads) - 1

    def add_moves(self, tree: Tree, first: int, last: int) -> None:
        """Adds the moves of a part of the pattern between two positions."""
        match tree:
            case Class(ranges, wide, vague):
                sure = ranges if self.plain_text or not vague else intersection(ranges, SAFE.ranges)
                at = self.new_position()
                self.empty_moves[first].append((at, None))
                self.reads[at] = (wide if self.wide else sure, last)
            case Sequence(items):
                for item in items[:-1]:
                    onward = self.new_position()
                    self.add_moves(item, first, onward)
                    first = onward
                if items:
                    self.add_moves(items[-1], first, last)
                else:
                    self.empty_moves[first].append((last, None))
            case Choice(options):
                for option in options:
                    self.add_moves(option, first, last)
            case Times(item, low, high):
                self._add_repetition(item, low, high, first, last)
            case Anchor(at_end):
                self.empty_moves[first].append((last, (0, 0) if at_end else (-1, -1)))
            case Look(body, negative):
                self.empty_moves[first].append((last, self._look(body, negative)))

    def _add_repetition(self, item: Tree, low: int, high: int | None, first: int, last: int) -> None:
        for _ in range(low):
            onward = self.new_position()
            self.add_moves(item, first, onward)
            first = onward
        if high is None:
            again = self.new_position()
            self.empty_moves[first].append((again, None))
            onward = self.new_position()
            self.add_moves(item, again, onward)
            self.empty_moves[onward].append((again, None))
            first = again
        for _ in range((high or low) - low):
            self.empty_moves[first].append((last, None))
            onward = self.new_position()
            self.add_moves(item, first, onward)
            first = onward
        self.empty_moves[first].append((last, None))

    def _look(self, body: Tree, negative: bool) -> tuple[int, int]:
        """Returns the indices into `looks` of a lookahead's automata: (at the start of the text, at other positions)."""
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

        Each returned thread is at the end of the pattern or reads a character next. Two threads at one position may have pending
        lookaheads A and B. If A is a subset of B, the thread with B is omitted, because the thread with A accepts all its texts.
        """
        waiting = list(threads)
        seen = set(waiting)
        while waiting:
            position, pending = waiting.pop()
            for target, condition in self.empty_moves[position]:
                onward = self._with(pending, condition, at_start)
                if onward is not None and (target, onward) not in seen:
                    seen.add((target, onward))
                    waiting.append((target, onward))
            if len(seen) > MAX_EXPLORED:
                raise TooLarge(f"more than {MAX_EXPLORED} states")
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

    Recurses into nested lookaheads, whose depth MAX_GROUP_DEPTH limits.

    Args:
        plain_text, wide: as in _Threads.
        at_start: whether `^` matches at the first character.
        known: cache of lookahead automata; None: a new cache.
    """
    threads = _Threads(wide, plain_text, {} if known is None else known)
    threads.add_moves(tree, 0, 1)
    return explored(threads.closure([(0, frozenset())], at_start), threads.step)
