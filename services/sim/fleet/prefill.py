"""Which prompts a prefill worker computes: the rule of ModelPool.pick_prefill (services/gateway/dispatch/model_pool.py), among
workers that all have the same weights and layout."""

from __future__ import annotations

from dataclasses import replace

from services.gateway.routing.columns import Ask, Pick, WorkerColumns
from services.gateway.routing.policies import Policy

MOST_QUEUED_TOKENS = 1 << 15  # of prompts at a prefill worker, as there


def pick_prefill(policy: Policy, columns: WorkerColumns, ask: Ask, decode: Pick, min_tokens: int) -> Pick | None:
    """Who computes the prompt for the worker that was picked for it; None: that one itself. min_tokens: of a prompt that are not
    cached there, below which it does."""
    if ask.prompt_tokens - decode.predicted_tokens < min_tokens:
        return None
    pick = policy.pick(replace(ask, prefill=True), columns)
    if pick is None:
        return None
    queued, idle = int(columns.tokens[pick.row]), not columns.requests[decode.row]
    return None if queued > MOST_QUEUED_TOKENS or (queued and idle) else pick
