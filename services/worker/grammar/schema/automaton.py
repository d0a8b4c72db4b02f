"""Deterministic automata over characters: intersections, complements and lengths of regular languages.

A state is an index; state 0 is the start. If a state has no edge for the next character, the text is not in the language. A
construction with more than MAX_EXPLORED states raises TooLarge.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rootstock_llm.services.worker.grammar.schema.ebnf import Alternatives, Node, Ranges, Ref, Seq, choice, complement

MAX_EXPLORED = 5_000  # largest number of states during a construction
MAX_STATES = 1_000  # largest number of states that become rules; for 150,000 tokens, xgrammar compiles a state in about 3 ms

Edge = tuple[int, int, int]  # (first code point, last code point, target state)
S = TypeVar("S", bound=Hashable)
Step = Callable[[S], tuple[bool, Sequence[tuple[int, int, S]]]]


class TooLarge(ValueError):
    """A construction would have more states than its limit allows."""


@dataclass(frozen=True, slots=True)
class Automaton:
    """A language: the texts that lead from state 0 to an accepting state."""

    accepts: tuple[bool, ...]  # per state: whether a text may end there
    spans: tuple[tuple[Edge, ...], ...]  # per state: its edges, sorted and disjoint

    @property
    def is_empty(self) -> bool:
        """Whether the language has no text. Valid only for minimal automata, because all their states are reachable."""
        return not any(self.accepts)

    def loops_on_everything(self, state: int) -> bool:
        """Whether every continuation from this state is accepted."""
        targets = {target for _, _, target in self.spans[state]}
        covered = sum(high - low + 1 for low, high, _ in self.spans[state])
        return self.accepts[state] and targets == {state} and covered == _ALL_CHARS

    def lengths(self) -> tuple[int, int | None]:
        """Returns the smallest and the largest number of characters of the language's texts.

        Returns:
            (smallest, largest). `largest` is None if it is unlimited. (0, 0) if the language has no text.
        """
        if self.is_empty:
            return 0, 0
        layer, shortest = {0}, 0
        while not any(self.accepts[state] for state in layer):
            layer = {target for state in layer for _, _, target in self.spans[state]}
            shortest += 1
        entries = [0] * len(self.accepts)
        for edges in self.spans:
            for _, _, target in edges:
                entries[target] += 1
        longest = [0] * len(self.accepts)
        waiting = [state for state, count in enumerate(entries) if not count]
        for state in waiting:
            for _, _, target in self.spans[state]:
                longest[target] = max(longest[target], longest[state] + 1)
                entries[target] -= 1
                if not entries[target]:
                    waiting.append(target)
        is_finite = len(waiting) == len(self.accepts)
        return shortest, max(longest) if is_finite else None


_ALL = complement(())
_ALL_CHARS = sum(high - low + 1 for low, high in _ALL)
END_ALONE = Automaton((True,), ((),))  # the language that has only the empty text


def explored(start: S, step: Step[S]) -> Automaton:
    """Builds the minimal automaton of a step function.

    Args:
        start: the first state, of any hashable type.
        step: returns (whether the state accepts, its disjoint edges as (first code point, last code point, next state)).
    """
    numbers: dict[S, int] = {start: 0}
    waiting = [start]
    accepts: list[bool] = []
    spans: list[tuple[Edge, ...]] = []
    for state in waiting:
        accepted, found = step(state)
        edges = []
        for low, high, target in sorted(found, key=lambda span: span[0]):
            if target not in numbers:
                if len(numbers) >= MAX_EXPLORED:
                    raise TooLarge(f"more than {MAX_EXPLORED} states")
                numbers[target] = len(numbers)
                waiting.append(target)
            edges.append((low, high, numbers[target]))
        accepts.append(accepted)
        spans.append(_joined(edges))
    return minimal(Automaton(tuple(accepts), tuple(spans)))


def intersection(left: Automaton, right: Automaton) -> Automaton:
    """Returns the automaton of the texts that both automata accept."""

    def step(pair: tuple[int, int]) -> tuple[bool, list[tuple[int, int, tuple[int, int]]]]:
        first, second = pair
        found = [
            (max(a, c), min(b, d), (target, other))
            for a, b, target in left.spans[first]
            for c, d, other in right.spans[second]
            if max(a, c) <= min(b, d)
        ]
        return left.accepts[first] and right.accepts[second], found

    return explored((0, 0), step)


def inverted(automaton: Automaton) -> Automaton:
    """Returns the automaton of all texts that the given automaton does not accept."""
    sink = len(automaton.accepts)
    spans = []
    for edges in (*automaton.spans, ()):
        gaps = complement((low, high) for low, high, _ in edges)
        spans.append(_joined(sorted([*edges, *((low, high, sink) for low, high in gaps)])))
    return minimal(Automaton((*(not each for each in automaton.accepts), True), tuple(spans)))


def of_length(low: int, high: int | None) -> Automaton:
    """Returns the automaton of all texts with low to high characters. None means no upper limit."""
    last = low if high is None else high
    if last >= MAX_EXPLORED:
        raise TooLarge(f"a length of {last} characters; the limit is {MAX_EXPLORED - 1}")
    spans = [tuple((a, b, state + 1) for a, b in _ALL) for state in range(last)]
    spans.append(tuple((a, b, last) for a, b in _ALL) if high is None else ())
    return Automaton(tuple(state >= low for state in range(last + 1)), tuple(spans))


def of_texts(texts: Iterable[str]) -> Automaton:
    """Returns the automaton that accepts exactly these texts."""
    every = sorted(set(texts))

    def step(beginning: tuple[int, int, int]) -> tuple[bool, list[tuple[int, int, tuple[int, int, int]]]]:
        first, last, length = beginning
        following: dict[int, list[int]] = {}
        for index in range(first, last):
            if len(every[index]) > length:
                following.setdefault(ord(every[index][length]), []).append(index)
        found = [(code, code, (group[0], group[-1] + 1, length + 1)) for code, group in following.items()]
        return first < last and len(every[first]) == length, found

    return explored((0, len(every), 0), step)


def minimal(automaton: Automaton) -> Automaton:
    """Returns the automaton of the same language with the fewest states. Each state is reachable and reaches an accepting state.

    The algorithm is partition refinement. States stay in one block while their edges lead to the same blocks. A state is checked
    again only after a target of its edges has moved to another block.
    """
    alive = _alive(automaton)
    spans = [tuple(span for span in edges if span[2] in alive) for edges in automaton.spans]
    before: list[list[int]] = [[] for _ in spans]
    for state, edges in enumerate(spans):
        for _, _, target in edges:
            before[target].append(state)
    block = [int(accepted) for accepted in automaton.accepts]
    members: dict[int, set[int]] = {0: set(), 1: set()}
    for state, name in enumerate(block):
        members[name].add(state)
    shape: dict[int, tuple[Edge, ...]] = {}
    changed = set(range(len(spans)))
    fresh = 2
    while changed:
        groups: dict[int, dict[tuple[Edge, ...], list[int]]] = {}
        for state in changed:
            signature = _joined([(low, high, block[target]) for low, high, target in spans[state]])
            groups.setdefault(block[state], {}).setdefault(signature, []).append(state)
        changed = set()
        for name, by_shape in groups.items():
            rest = len(members[name]) - sum(map(len, by_shape.values()))
            if rest == 0:
                shape[name] = max(by_shape, key=lambda signature: len(by_shape[signature]))
            for signature, states in by_shape.items():
                if signature == shape[name]:
                    continue
                shape[fresh] = signature
                members[fresh] = set(states)
                members[name] -= members[fresh]
                for state in states:
                    block[state] = fresh
                    changed.update(before[state])
                fresh += 1
    return _merged(automaton.accepts, spans, block)


def _merged(accepts: Sequence[bool], spans: Sequence[Sequence[Edge]], block: Sequence[int]) -> Automaton:
    """Returns the automaton that has one state for each block that is reachable from the start."""
    numbers = {block[0]: 0}
    waiting = [0]
    found_accepts, found_spans = [], []
    for state in waiting:
        edges = []
        for low, high, target in spans[state]:
            if block[target] not in numbers:
                numbers[block[target]] = len(numbers)
                waiting.append(target)
            edges.append((low, high, numbers[block[target]]))
        found_accepts.append(accepts[state])
        found_spans.append(_joined(edges))
    return Automaton(tuple(found_accepts), tuple(found_spans))


def _alive(automaton: Automaton) -> set[int]:
    """Returns state 0 and all states from which an accepting state is reachable."""
    before: list[list[int]] = [[] for _ in automaton.spans]
    for state, edges in enumerate(automaton.spans):
        for _, _, target in edges:
            before[target].append(state)
    alive = {state for state, accepted in enumerate(automaton.accepts) if accepted}
    waiting = list(alive)
    while waiting:
        for state in before[waiting.pop()]:
            if state not in alive:
                alive.add(state)
                waiting.append(state)
    return alive | {0}


def _joined(edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """Merges adjacent edges with the same target. The edges must be sorted and disjoint."""
    joined: list[Edge] = []
    for low, high, target in edges:
        if joined and joined[-1][1] + 1 == low and joined[-1][2] == target:
            joined[-1] = (joined[-1][0], high, target)
        else:
            joined.append((low, high, target))
    return tuple(joined)


def rules_of(automaton: Automaton, chars: Callable[[Ranges], Node], end: Node, prefix: str) -> dict[str, Node]:
    """Converts an automaton to rules.

    Args:
        chars: returns the node that matches one character of the ranges.
        end: node that is matched at the end of a text.
        prefix: name of the start rule, and beginning of the other rules' names.

    Raises:
        TooLarge: the automaton has more than MAX_STATES states.
    """
    if len(automaton.accepts) > MAX_STATES:
        raise TooLarge(f"{len(automaton.accepts)} states; the limit is {MAX_STATES}")
    entries = [0] * len(automaton.accepts)
    for edges in automaton.spans:
        for target in {target for _, _, target in edges}:
            entries[target] += 1
    onward = [_by_target(edges) for edges in automaton.spans]
    is_inlined = [count == 1 and len(onward[state]) == 1 and not automaton.accepts[state] for state, count in enumerate(entries)]
    rules: dict[str, Node] = {}
    for state in range(len(automaton.accepts)):
        if state and is_inlined[state]:
            continue  # the rule of the state's only predecessor contains the state
        options = [end] if automaton.accepts[state] else []
        for target, ranges in onward[state].items():
            items = [chars(ranges)]
            while target and is_inlined[target]:
                ((following, between),) = onward[target].items()
                items.append(chars(between))
                target = following
            options.append(Seq((*items, Ref(_name(prefix, target)))))
        rules[_name(prefix, state)] = choice(options) if options else Alternatives((Seq((chars(()),)),))
    return rules


def _name(prefix: str, state: int) -> str:
    return f"{prefix}s{state}" if state else prefix


def _by_target(edges: Sequence[Edge]) -> dict[int, Ranges]:
    found: dict[int, list[tuple[int, int]]] = {}
    for low, high, target in edges:
        found.setdefault(target, []).append((low, high))
    return {target: tuple(ranges) for target, ranges in found.items()}
