"""Workloads: sessions of one or more turns, drawn from a seed.

The same Spec gives the same sessions on every machine. Lengths are in tokens if prompts are token ids. A text prompt has
that number of words instead, because the client has no tokenizer; the server's `usage` has the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from rootstock_llm.services.cli.bench.spec import Spec, check

Content: TypeAlias = str | tuple[int, ...]

WARMUP_SEED_OFFSET = 1_000_003  # added to the seed for the warm-up
TEXT = """
the of and to in is was for on that by this with you it not or be are from at as your all have new more an we will
home can us about if page my has search free but our one other do no time they site he up may what which their news
out use any there see only so his when here who also now help get view first am been would how were me some these
click its like than find date back top people had list name just over state year day into two health world next used
go work last most music data make them should product system post her city add policy number such please support
message after best software then good video well where info rights public books high school through each links she
review years order very privacy book items company read
"""
WORDS = TEXT.split()


@dataclass(frozen=True, slots=True)
class Turn:
    content: Content  # the user's text or token ids in this turn, without earlier turns
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """The turns of one conversation. A turn is sent when the completion of the turn before it has ended."""

    group: int  # sessions of one group share `system`
    system: Content | None
    turns: tuple[Turn, ...]


class Source:
    """Draws lengths and contents from separate random streams, so that the prompts do not depend on the output length."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._inputs, self._outputs, self._contents, self._order = (np.random.default_rng([spec.seed, k]) for k in range(4))

    def content(self, length: int) -> Content:
        if self._spec.token_ids:
            return tuple(self._contents.integers(self._spec.id_min, self._spec.id_max, size=length).tolist())
        return " ".join(WORDS[i] for i in self._contents.integers(0, len(WORDS), size=length).tolist())

    def turn(self, longest_input: int) -> Turn:
        content = self.content(self._length(self._inputs, longest_input))
        return Turn(content, self._length(self._outputs, self._spec.output_len))

    def shuffled(self, sessions: Sequence[Session]) -> list[Session]:
        return [sessions[i] for i in self._order.permutation(len(sessions)).tolist()]

    def _length(self, rng: np.random.Generator, longest: int) -> int:
        shortest = max(1, int(longest * self._spec.range_ratio))
        return int(rng.integers(shortest, longest + 1))


def random_sessions(spec: Spec) -> list[Session]:
    source = Source(spec)
    count = 100 if spec.num_requests is None else spec.num_requests
    return [Session(i, None, (source.turn(spec.input_len),)) for i in range(count)]


def shared_prefix_sessions(spec: Spec) -> list[Session]:
    """Returns spec.groups x spec.prompts_per_group sessions of one question, shuffled.

    The sessions of a group share a system prompt.
    """
    source = Source(spec)
    systems = [source.content(spec.system_len) for _ in range(spec.groups)]
    sessions = [
        Session(group, system, (source.turn(spec.question_len),))
        for group, system in enumerate(systems)
        for _ in range(spec.prompts_per_group)
    ]
    return source.shuffled(sessions)


def multi_turn_sessions(spec: Spec) -> list[Session]:
    source = Source(spec)
    return [Session(i, None, tuple(source.turn(spec.input_len) for _ in range(spec.turns))) for i in range(spec.conversations)]


MAKERS: dict[str, Callable[[Spec], list[Session]]] = {
    "random": random_sessions,
    "generated-shared-prefix": shared_prefix_sessions,
    "multi-turn": multi_turn_sessions,
}


def make_sessions(spec: Spec) -> list[Session]:
    """Returns the sessions of a run, cut to spec.num_requests requests. Raises ValueError for an impossible spec."""
    check(spec)
    sessions = MAKERS[spec.name](spec)
    return sessions if spec.num_requests is None else first_requests(sessions, spec.num_requests)


def make_warmup(spec: Spec, count: int) -> list[Session]:
    """Returns the sessions of at most `count` warm-up requests; fewer if the workload has fewer requests.

    Their contents differ from make_sessions(), so that the warm-up caches no measured prefix.
    """
    spec = replace(spec, seed=spec.seed + WARMUP_SEED_OFFSET, num_requests=None)
    sessions = MAKERS[spec.name](replace(spec, num_requests=count) if spec.name == "random" else spec)
    return first_requests(sessions, min(count, sum(len(s.turns) for s in sessions)))


def first_requests(sessions: Sequence[Session], count: int) -> list[Session]:
    """Returns the sessions with the first `count` turns, cutting the last session. Raises ValueError if there are fewer turns."""
    total = sum(len(s.turns) for s in sessions)
    if total < count:
        raise ValueError(f"the workload has {total} requests, but num_requests is {count}")
    before = accumulate((len(s.turns) for s in sessions), initial=0)
    return [replace(s, turns=s.turns[: count - b]) for s, b in zip(sessions, before, strict=False) if b < count]
