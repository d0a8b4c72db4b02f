"""Chooses the prompts that a prefill worker computes, and that worker (docs/design/prefill-and-decode.md).

The functions are pure, as the routing policies are.
"""

from __future__ import annotations

from dataclasses import replace

from services.gateway.routing.columns import Ask, Pick, WorkerColumns
from services.gateway.routing.policies import Policy

MOST_QUEUED_TOKENS = 1 << 15  # of prompts at such a worker: with more of them one waits longer than it gains


def pick_prefill(policy: Policy, columns: WorkerColumns, ask: Ask, decode: Pick, min_tokens: int) -> Pick | None:
    """Who computes the prompt for the worker that was picked for it; None: that one itself. ask: with `allowed` where not all may
    exchange pages with it. min_tokens: of a prompt that are not cached there, below which it computes it. Changes nothing."""
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
    """What is being computed for others will want room there: what finds none has its pages kept in vain. What is read ahead is
    of these, and counted once."""
    takes = columns.takes
    room = int((columns.limit + columns.ahead - columns.requests)[takes].sum())
    return int(columns.requests[columns.used & ~columns.serves].sum()) < room
