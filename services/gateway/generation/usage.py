"""The counts and times of a request, for responses, metrics and the access log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rootstock_llm.services.gateway.generation.choice import TIERS, Choice, Ending
from rootstock_llm.services.gateway.generation.running import RunningRequest
from rootstock_llm.services.gateway.observe.access_log import ABORTED, ERROR_CODE, GENERATION, INTERRUPTED, GenerationFields


def usage_of(request: RunningRequest) -> dict[str, Any]:
    """Returns OpenAI's `usage`. Each prompt counts once, with the cached tokens of its first choice."""
    ended = [(choice, choice.ending) for choice in request.choices if choice.ending]
    first = [ending for choice, ending in ended if choice.number == 0]
    prompt_tokens = sum(ending.prompt_tokens for ending in first)
    output_tokens = sum(ending.completion_tokens for _, ending in ended)
    cached_tokens = sum(ending.cached_tokens for ending in first)
    details = {**_reasoned(request), **_predicted(request)}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens, **_by_tier(first)},
        **({"completion_tokens_details": details} if details else {}),
    }


def report_of(request: RunningRequest) -> dict[str, Any]:
    """Returns the request's waiting times, workers and counts, for a client that requests a report.

    Each time is the longest of any choice. Counts are sums over all choices, but the cached tokens are those of usage_of().
    """
    endings = [choice.ending for choice in request.choices if choice.ending is not None]
    return {
        "gateway_queue_s": round(request.longest_wait_s, 6),
        "worker_queue_s": max((ending.queue_ms for ending in endings), default=0) / 1000,
        "cached_tokens": usage_of(request)["prompt_tokens_details"]["cached_tokens"],
        "workers": list(request.workers),
        "retractions": sum(ending.retractions for ending in endings),
        "drafted_tokens": sum(ending.drafted_tokens for ending in endings),
        "accepted_tokens": sum(ending.accepted_tokens for ending in endings),
    }


def access_state(running: RunningRequest, code: str, *, interrupted: bool) -> dict[str, Any]:
    """Returns the argument `state` of AccessLog.ended() for a batch line or a background response.

    Args:
        code: Code of the request's error, or "".
        interrupted: Whether the request has neither a response nor an error, because its task was cancelled.
    """
    return {
        "request_id": running.request_id,
        "key": running.key,
        "model": running.model.name if running.prompts else "",
        ERROR_CODE: code,
        INTERRUPTED: interrupted,
        **generation_state(running),
    }


def generation_state(running: RunningRequest) -> dict[str, Any]:
    """Returns the entries of the argument `state` of AccessLog.ended() that describe the output of a request.

    For an incomplete response, the entries count the output that has arrived.
    """
    ended = [ending for choice in running.choices if (ending := choice.ending) is not None]
    first_s = running.first_output_s if running.choices and running.choices[0].generates else None
    usage = running.usage
    if usage is None:
        usage = usage_of(running)
        usage["prompt_tokens"] = sum(len(prompt.ids) for prompt in running.prompts) if running.reached_worker else 0
        usage["completion_tokens"] = sum(len(choice.output_ids) for choice in running.choices)
    generation: GenerationFields = {
        "queue_ms": round(running.longest_wait_s * 1e3 + max([ending.queue_ms for ending in ended], default=0), 1),
        "ttft_ms": None if first_s is None else round(first_s * 1e3, 1),
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "output_tokens": usage["completion_tokens"],
        "trace_id": None if running.trace is None else running.trace.trace_id,
    }
    return {GENERATION: generation, ABORTED: "abort" in [ending.finish_reason for ending in ended]}


def _by_tier(endings: Sequence[Ending]) -> dict[str, Any]:
    known = [ending.cached_by_tier for ending in endings if ending.cached_by_tier is not None]
    if not known:
        return {}
    return {"cached_tokens_details": {tier: sum(each[tier] for each in known) for tier in TIERS}}


def _reasoned(request: RunningRequest) -> dict[str, int]:
    counts = [_reasoning_tokens(choice) for choice in request.choices if choice.ending]
    known = [count for count in counts if count is not None]
    return {"reasoning_tokens": sum(known)} if known else {}


def _reasoning_tokens(choice: Choice) -> int | None:
    parsing = choice.params.parsing
    return None if parsing is None else parsing.reasoning_tokens(choice.output_ids)


def _predicted(request: RunningRequest) -> dict[str, int]:
    """Returns OpenAI's counts of accepted and rejected prediction tokens; {} for a request without a prediction."""
    endings = [choice.ending for choice in request.choices if choice.prompt.prediction is not None and choice.ending]
    if not endings:
        return {}
    return {
        "accepted_prediction_tokens": sum(ending.accepted_prediction_tokens for ending in endings),
        "rejected_prediction_tokens": sum(ending.rejected_prediction_tokens for ending in endings),
    }
