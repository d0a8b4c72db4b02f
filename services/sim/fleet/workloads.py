"""Workloads by name, at the sizes that fleets are compared with. size: workers that they are made for."""

from __future__ import annotations

from collections.abc import Callable

from services.sim.core.trace import workloads
from services.sim.core.trace.trace import Trace

PREFIX, SUFFIX, OUTPUT = 2048, 128, 256  # tokens


def shared_prefix(size: int, rate: float, seed: int) -> Trace:
    """8 groups of 16 requests for each worker, shuffled: for 8 workers the generated-shared-prefix of SGLang's benchmark."""
    return workloads.shared_prefix(8 * size, 16, PREFIX, SUFFIX, OUTPUT, rate, seed)


def no_sharing(size: int, rate: float, seed: int) -> Trace:
    """As many and as long ones, all unlike each other, lengths within half of the mean."""
    return workloads.random_lengths(128 * size, PREFIX + SUFFIX, OUTPUT, 0.5, rate, seed)


def hot_prefix(size: int, rate: float, seed: int) -> Trace:
    """As many, of which six in ten begin with the same prefix."""
    return workloads.hot_prefix(128 * size, 0.6, PREFIX, SUFFIX, OUTPUT, rate, seed)


def multi_turn(size: int, rate: float, seed: int) -> Trace:
    """32 conversations of 5 turns for each worker, over one system prompt; rate is that of conversations."""
    return workloads.multi_turn(32 * size, 5, 512, 256, OUTPUT, 5.0, rate, seed)


def long_prompts(size: int, rate: float, seed: int) -> Trace:
    """128 for each worker: streams, beside a quarter that have prompts of 4096 tokens and say little."""
    return workloads.two_lengths(128 * size, 0.25, (4096, 64), (256, OUTPUT), 0.25, rate, seed)


def chat(size: int, rate: float, seed: int) -> Trace:
    """As many, all with short prompts."""
    return workloads.random_lengths(128 * size, 192, OUTPUT, 0.5, rate, seed)


WORKLOADS: dict[str, Callable[[int, float, int], Trace]] = {
    "shared-prefix": shared_prefix,
    "no-sharing": no_sharing,
    "hot-prefix": hot_prefix,
    "multi-turn": multi_turn,
    "long-prompts": long_prompts,
    "chat": chat,
}
