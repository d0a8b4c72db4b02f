"""Chooses the prompts that a prefill worker computes, and that worker (docs/design/prefill-and-decode.md).

The functions are pure, as the routing policies are.
"""

from __future__ import annotations

from dataclasses import replace

from services.gateway.routing.columns import Ask, Pick, WorkerColumns
from services.gateway.routing.policies import Policy

MOST_QUEUED_TOKENS = 1 << 15  # prompt tokens at a prefill worker beyond which another prompt would wait longer than it gains


def pick_prefill(policy: Policy, columns: WorkerColumns, ask: Ask, decode: Pick, min_tokens: int) -> Pick | None:
    """Chooses the prefill worker that computes a prompt for the chosen decode worker. Changes nothing.

    Args:
        ask: The request. `allowed` has the workers that can exchange pages with the decode worker.
        decode: The chosen decode worker.
        min_tokens: If fewer prompt tokens are uncached at the decode worker, it computes them itself.

    Returns:
        None if the decode worker computes the prompt itself.
    """
    if ask.prompt_tokens - decode.predicted_tokens < min_tokens or not _is_room_behind(columns):
        return None
    short = columns.tokens <= MOST_QUEUED_TOKENS
    allowed = short if ask.allowed is None else short & ask.allowed
    pick = policy.pick(replace(ask, allowed=allowed, prefill=True), columns)
    if pick is None:
        return None
    waits, is_idle = columns.tokens[pick.row] > 0, columns.requests[decode.row] == 0
    return None if waits and is_idle else pick


def _is_room_behind(columns: WorkerColumns) -> bool:
    """Returns whether the decode workers have free slots for all prompts at prefill workers and for one more.

    A prompt without a free slot would occupy pages of the prefill worker for nothing. A prompt whose pages a decode worker
    prefetches is counted once, at its prefill worker.
    """
    takes = columns.takes
    room = int((columns.limit + columns.ahead - columns.requests)[takes].sum())
    return int(columns.requests[columns.used & ~columns.serves].sum()) < room
