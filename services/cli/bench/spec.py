"""Parameters of a workload. This module imports no library, so that flags can use it without numpy."""

from __future__ import annotations

from dataclasses import dataclass

WORKLOADS = ("random", "generated-shared-prefix", "multi-turn")


@dataclass(frozen=True, slots=True)
class Spec:
    """Parameters that determine the sessions of a workload. Lengths are in tokens for token ids and in words for text."""

    name: str
    seed: int = 0
    num_requests: int | None = None  # None: 100 for `random`, the whole workload for the others
    input_len: int = 256  # length of a prompt, or of a user's turn
    output_len: int = 64  # max_tokens of a request
    range_ratio: float = 1.0  # shortest length as a fraction of the longest; 1 fixes the length
    token_ids: bool = False  # whether prompts are token ids instead of words
    id_min: int = 256  # smallest random token id
    id_max: int = 30_000  # end of the random token ids, exclusive
    groups: int = 8  # generated-shared-prefix: number of groups; the prompts of a group share a prefix
    prompts_per_group: int = 8  # generated-shared-prefix: prompts of a group
    system_len: int = 1024  # generated-shared-prefix: length of a group's prefix
    question_len: int = 128  # generated-shared-prefix: length of the question after the prefix
    conversations: int = 16  # multi-turn: number of conversations
    turns: int = 4  # multi-turn: turns of each conversation


def check(spec: Spec) -> None:
    if spec.name not in WORKLOADS:
        raise ValueError(f"unknown workload {spec.name!r}; the workloads are {', '.join(WORKLOADS)}")
    if spec.name == "multi-turn" and spec.token_ids:
        raise ValueError("multi-turn cannot use token ids, because the next prompt needs the completion's text")
    if not 0.0 <= spec.range_ratio <= 1.0:
        raise ValueError(f"range_ratio is {spec.range_ratio}; it must be between 0 and 1")
    if not 0 <= spec.id_min < spec.id_max:
        raise ValueError("id_min must be at least 0 and below id_max")
    counts = (spec.input_len, spec.output_len, spec.groups, spec.prompts_per_group, spec.system_len, spec.question_len)
    if min(*counts, spec.conversations, spec.turns, 1 if spec.num_requests is None else spec.num_requests) < 1:
        raise ValueError("lengths and counts must be at least 1")
