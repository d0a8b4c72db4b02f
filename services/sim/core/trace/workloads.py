"""Generates traces.

Each function gives the same trace for the same arguments. `rate` is the mean number of arrivals per second, with exponential
gaps. If it is 0, all requests arrive at once, for runs at fixed concurrency. Lengths are in tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.sim.core.trace.trace import BLOCK_SIZE, Trace, TraceRequest

F64 = NDArray[np.float64]


def shared_prefix(
    groups: int, per_group: int, prefix: int, suffix: int, output: int, rate: float, seed: int, adjacent: bool = False
) -> Trace:
    """Makes `groups` x `per_group` requests. The requests of a group begin with the same `prefix` tokens.

    With `adjacent`, the requests of a group are in sequence; otherwise the order is random.
    """
    rng = np.random.default_rng(seed)
    blocks = -(-prefix // BLOCK_SIZE)
    if prefix % BLOCK_SIZE:
        raise ValueError(f"prefix must be a multiple of {BLOCK_SIZE}, the tokens of a block")
    order = np.arange(groups * per_group) // per_group if adjacent else rng.permutation(groups * per_group) % groups
    return _trace(
        (
            TraceRequest(at, tuple(range(group * blocks, (group + 1) * blocks)), prefix + suffix, output, output)
            for at, group in zip(_arrivals(len(order), rate, rng).tolist(), order.tolist(), strict=True)
        )
    )


def scores(queries: int, items: int, query: int, item: int, rate: float, seed: int) -> Trace:
    """Makes `queries` x `items` requests that end with their prompt.

    The requests of one query arrive together, and their prompts begin with the query's tokens.
    """
    if query % BLOCK_SIZE:
        raise ValueError(f"query must be a multiple of {BLOCK_SIZE}, the tokens of a block")
    blocks = query // BLOCK_SIZE
    times = _arrivals(queries, rate, np.random.default_rng(seed)).tolist()
    return _trace(
        TraceRequest(at, tuple(range(number * blocks, (number + 1) * blocks)), query + item, 0, 0)
        for number, at in enumerate(times)
        for _ in range(items)
    )


def hot_prefix(requests: int, share: float, prefix: int, suffix: int, output: int, rate: float, seed: int) -> Trace:
    """Makes requests with prompts of `prefix + suffix` tokens.

    A random `share` of the prompts begin with the same prefix; the others have no common tokens.
    """
    if not 0 <= share <= 1:
        raise ValueError("share must be between 0 and 1")
    if prefix % BLOCK_SIZE:
        raise ValueError(f"prefix must be a multiple of {BLOCK_SIZE}, the tokens of a block")
    rng = np.random.default_rng(seed)
    hot = rng.permutation(requests) < round(share * requests)
    blocks = tuple(range(prefix // BLOCK_SIZE))
    rows = zip(_arrivals(requests, rate, rng).tolist(), hot.tolist(), strict=True)
    return _trace(TraceRequest(at, blocks if is_hot else (), prefix + suffix, output, output) for at, is_hot in rows)


def random_lengths(
    requests: int, input_len: int, output: int, spread: float, rate: float, seed: int, priorities: int = 1
) -> Trace:
    """Makes requests without common tokens.

    Lengths are uniform from `mean * (1 - spread)` to `mean * (1 + spread)`, priorities from 0 to `priorities - 1`.
    """
    if priorities < 1:
        raise ValueError("priorities must be at least 1")
    rng = np.random.default_rng(seed)
    prompts, outputs = (_around(mean, spread, requests, rng) for mean in (input_len, output))
    times = _arrivals(requests, rate, rng)
    rows = zip(times.tolist(), prompts, outputs, rng.integers(0, priorities, requests).tolist(), strict=True)
    return _trace(TraceRequest(at, (), prompt, output_len, output_len, priority) for at, prompt, output_len, priority in rows)


def two_lengths(
    requests: int, share: float, long: tuple[int, int], short: tuple[int, int], spread: float, rate: float, seed: int
) -> Trace:
    """Makes requests without common tokens. A random `share` of them are long, the others short.

    Args:
        requests: number of requests.
        share: share of long requests.
        long: mean (prompt, output) of long requests.
        short: mean (prompt, output) of short requests.
        spread: as in random_lengths().
        rate: see the module.
        seed: seed of all random choices.
    """
    if not 0 <= share <= 1:
        raise ValueError("share must be between 0 and 1")
    rng = np.random.default_rng(seed)
    is_long = rng.permutation(requests) < round(share * requests)
    times = _arrivals(requests, rate, rng)
    both = [list(zip(*(_around(mean, spread, requests, rng) for mean in kind), strict=True)) for kind in (short, long)]
    rows = zip(times.tolist(), is_long.tolist(), *both, strict=True)
    chosen = ((at, second if longer else first) for at, longer, first, second in rows)
    return _trace(TraceRequest(at, (), prompt, output_len, output_len) for at, (prompt, output_len) in chosen)


def multi_turn(sessions: int, turns: int, system: int, user: int, output: int, think_s: float, rate: float, seed: int) -> Trace:
    """Makes sessions. `rate` is the mean number of sessions that begin per second.

    A turn's prompt is the common system prompt, all earlier turns and completions, and `user` new tokens. Completions are part
    of later prompts, so their KV is reused.
    """
    rng = np.random.default_rng(seed)
    shared = system // BLOCK_SIZE
    per_session = -(-(system + turns * (user + output)) // BLOCK_SIZE) - shared
    requests = []
    for session, begun in enumerate(_arrivals(sessions, rate, rng).tolist()):
        own = range(shared + session * per_session, shared + (session + 1) * per_session)
        context = (*range(shared), *own)
        for turn in range(turns):
            prompt = system + turn * (user + output) + user
            blocks = context[: -(-(prompt + output) // BLOCK_SIZE)]
            first = TraceRequest(begun, blocks, prompt, output, output, session=f"s{session}")
            requests.append(replace(first, think_s=think_s if turn else 0.0))
    return _trace(sorted(requests, key=lambda request: request.arrival))


def storm(requests: int, input_len: int, output: int, factor: int, begin: float, end: float, rate: float, seed: int) -> Trace:
    """Makes requests whose limit is `factor * output` tokens. Most requests end after `output` tokens.

    Requests that arrive from `begin` to `end` (shares of the trace) use their whole limit. In this time, outputs are `factor`
    times as long as the scheduler has learned to expect.
    """
    rng = np.random.default_rng(seed)
    times = _arrivals(requests, rate, rng)
    stormy = range(round(begin * requests), round(end * requests))
    return _trace(
        TraceRequest(at, (), input_len, output * factor if index in stormy else output, output * factor)
        for index, at in enumerate(times.tolist())
    )


def grammars(
    requests: int, share: float, input_len: int, output: int, between: int, runs: tuple[int, ...], rate: float, seed: int
) -> Trace:
    """Makes requests without common tokens, of which a random `share` have a grammar.

    The grammar lets the model sample 1 to `2 * between - 1` tokens, then forces a run of a length drawn from `runs`, and so on.
    """
    if not 0 <= share <= 1:
        raise ValueError("share must be between 0 and 1")
    if between < 1 or not runs or min(runs) < 1:
        raise ValueError("between and runs must be at least 1")
    rng = np.random.default_rng(seed)
    constrained = rng.permutation(requests) < round(share * requests)
    times = _arrivals(requests, rate, rng).tolist()
    return _trace(
        TraceRequest(at, (), input_len, output, output, forced=_forced(output, between, runs, rng) if is_constrained else ())
        for at, is_constrained in zip(times, constrained.tolist(), strict=True)
    )


def _forced(output: int, between: int, runs: tuple[int, ...], rng: np.random.Generator) -> tuple[tuple[int, int], ...]:
    """Returns the forced runs. None of them includes the last token, which is EOS."""
    found, index = [], int(rng.integers(1, 2 * between))
    while index < output - 1:
        count = min(int(rng.choice(runs)), output - 1 - index)
        found.append((index, count))
        index += count + int(rng.integers(1, 2 * between))
    return tuple(found)


def _trace(requests: Iterable[TraceRequest]) -> Trace:
    return Trace(BLOCK_SIZE, tuple(requests))


def _arrivals(count: int, rate: float, rng: np.random.Generator) -> F64:
    """Returns arrival times in seconds, float64[count], rising and rounded to microseconds; zeros if `rate` is 0."""
    if not rate:
        return np.zeros(count)
    times: F64 = np.cumsum(rng.exponential(1 / rate, count)).round(6)
    return times


def _around(mean: int, spread: float, count: int, rng: np.random.Generator) -> list[int]:
    if not 0 <= spread < 1:
        raise ValueError("spread must be at least 0 and below 1")
    low, high = max(round(mean * (1 - spread)), 1), max(round(mean * (1 + spread)), 1)
    return [int(value) for value in rng.integers(low, high, count, endpoint=True)]
