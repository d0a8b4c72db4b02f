"""What is asked of the server: sessions of one or more turns, drawn from a seed.

The same Spec gives the same sessions on every machine. Lengths are in tokens where prompts are token ids; a text prompt has that
many words instead, because the client has no tokenizer: the server's `usage` tells how many tokens it read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias

import numpy as np

Content: TypeAlias = str | tuple[int, ...]

WARMUP_SEED_OFFSET = 1_000_003
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
    content: Content  # what the user adds; never what was said before
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow one another: each is sent when the answer to the one before is complete."""

    group: int  # sessions of one group share `system`
    system: Content | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    """All that the sessions depend on. Lengths in tokens (token ids) or words (text); ids are drawn from [id_min, id_max)."""

    name: str
    seed: int = 0
    num_requests: int | None = None  # None: 100 for `random`, and all there are for the others
    input_len: int = 256
    output_len: int = 64
    range_ratio: float = 1.0  # shortest length as a fraction of the longest; 1 fixes the length
    token_ids: bool = False
    id_min: int = 256
    id_max: int = 30_000
    groups: int = 8
    prompts_per_group: int = 8
    system_len: int = 1024
    question_len: int = 128
    conversations: int = 16
    turns: int = 4


class Source:
    """Draws lengths and contents. They are separate streams: another output length leaves the prompts as they are."""

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
    """groups times prompts_per_group single questions, shuffled; those of one group begin with the same system prompt."""
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


WORKLOADS: dict[str, Callable[[Spec], list[Session]]] = {
    "random": random_sessions,
    "generated-shared-prefix": shared_prefix_sessions,
    "multi-turn": multi_turn_sessions,
}


def make_sessions(spec: Spec) -> list[Session]:
    """The sessions of a run, cut to spec.num_requests requests. Raises ValueError for a spec that cannot be met."""
    check(spec)
    sessions = WORKLOADS[spec.name](spec)
    return sessions if spec.num_requests is None else first_requests(sessions, spec.num_requests)


def make_warmup(spec: Spec, count: int) -> list[Session]:
    """Requests of the same kind with other contents, so that no measured request finds its prefix cached by the warm-up."""
    spec = replace(spec, seed=spec.seed + WARMUP_SEED_OFFSET, num_requests=None)
    sessions = WORKLOADS[spec.name](replace(spec, num_requests=count) if spec.name == "random" else spec)
    return first_requests(sessions, min(count, sum(len(s.turns) for s in sessions)))


def first_requests(sessions: Sequence[Session], count: int) -> list[Session]:
    """The sessions that hold the first `count` turns; the last one may lose turns. ValueError where there are fewer."""
    total = sum(len(s.turns) for s in sessions)
    if total < count:
        raise ValueError(f"the workload has {total} requests, fewer than the {count} asked for")
    before = accumulate((len(s.turns) for s in sessions), initial=0)
    return [replace(s, turns=s.turns[: count - b]) for s, b in zip(sessions, before, strict=False) if b < count]


def check(spec: Spec) -> None:
    if spec.name not in WORKLOADS:
        raise ValueError(f"no workload {spec.name!r}; there are {', '.join(WORKLOADS)}")
    if spec.name == "multi-turn" and spec.token_ids:
        raise ValueError("multi-turn needs the answer's text in the next prompt; it cannot be sent as token ids")
    if not 0.0 <= spec.range_ratio <= 1.0:
        raise ValueError("range ratio must lie between 0 and 1")
    if not 0 <= spec.id_min < spec.id_max:
        raise ValueError("token ids need 0 <= min < max")
    counts = (spec.input_len, spec.output_len, spec.groups, spec.prompts_per_group, spec.system_len, spec.question_len)
    if min(*counts, spec.conversations, spec.turns, 1 if spec.num_requests is None else spec.num_requests) < 1:
        raise ValueError("lengths and counts must be at least 1")
