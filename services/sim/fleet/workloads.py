"""Defines the named workloads of fleet comparisons. `size` is the number of workers for which a workload is made."""

from __future__ import annotations

from collections.abc import Callable

from rootstock_llm.services.sim.core.trace import workloads
from rootstock_llm.services.sim.core.trace.trace import Trace

PREFIX, SUFFIX, OUTPUT = 2048, 128, 256  # tokens


def shared_prefix(size: int, rate: float, seed: int) -> Trace:
    """Makes 8 groups of 16 requests per worker, shuffled. For 8 workers this is SGLang's generated-shared-prefix benchmark."""
    return workloads.shared_prefix(8 * size, 16, PREFIX, SUFFIX, OUTPUT, rate, seed)


def no_sharing(size: int, rate: float, seed: int) -> Trace:
    """Makes 128 requests per worker without shared prefixes, with lengths from 0.5 to 1.5 times the mean."""
    return workloads.random_lengths(128 * size, PREFIX + SUFFIX, OUTPUT, 0.5, rate, seed)


def hot_prefix(size: int, rate: float, seed: int) -> Trace:
    """Makes 128 requests per worker, six in ten of which begin with the same prefix."""
    return workloads.hot_prefix(128 * size, 0.6, PREFIX, SUFFIX, OUTPUT, rate, seed)


def multi_turn(size: int, rate: float, seed: int) -> Trace:
    """Makes 32 conversations per worker, each of 5 turns and with the same system prompt.

    `rate` is the mean number of conversations that begin per second.
    """
    return workloads.multi_turn(32 * size, 5, 512, 256, OUTPUT, 5.0, rate, seed)


def long_prompts(size: int, rate: float, seed: int) -> Trace:
    """Makes 128 requests per worker, a quarter of which have prompts of about 4096 tokens and outputs of about 64 tokens.

    The others have prompts and outputs of about 256 tokens.
    """
    return workloads.two_lengths(128 * size, 0.25, (4096, 64), (256, OUTPUT), 0.25, rate, seed)


def chat(size: int, rate: float, seed: int) -> Trace:
    """Makes 128 requests per worker with short prompts."""
    return workloads.random_lengths(128 * size, 192, OUTPUT, 0.5, rate, seed)


WORKLOADS: dict[str, Callable[[int, float, int], Trace]] = {
    "shared-prefix": shared_prefix,
    "no-sharing": no_sharing,
    "hot-prefix": hot_prefix,
    "multi-turn": multi_turn,
    "long-prompts": long_prompts,
    "chat": chat,
}
