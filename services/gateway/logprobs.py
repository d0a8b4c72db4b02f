"""Log probabilities as they come from a worker: one entry per token, in the order of the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rootstock.v1 import worker_pb2
from services.gateway.reconnect import StreamBroken


class TokenLogprob(NamedTuple):
    """Of one token (natural logarithms): its own, the top ones in falling order, and those of the ids that were asked for by
    id (SamplingParams.logprobs.token_ids), in their order."""

    value: float
    top_ids: Sequence[int]
    top_values: Sequence[float]
    chosen_values: Sequence[float]


def entries_of(rows: worker_pb2.LogprobRows) -> Iterator[TokenLogprob]:
    """Raises StreamBroken for arrays that do not fit each other."""
    values, k = list(rows.values), rows.k
    top_ids, top_values, chosen = list(rows.top_ids), list(rows.top_values), list(rows.chosen_values)
    count = len(values)
    per_token = len(chosen) // count if count else 0
    if len(top_ids) != count * k or len(top_values) != count * k or len(chosen) != count * per_token:
        raise StreamBroken("log probabilities whose arrays do not fit")
    for i, value in enumerate(values):
        tops = slice(i * k, (i + 1) * k)
        yield TokenLogprob(value, top_ids[tops], top_values[tops], chosen[i * per_token : (i + 1) * per_token])
