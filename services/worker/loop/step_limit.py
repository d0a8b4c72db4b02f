"""How long one step may take on this worker, so that a long one is told from one that hangs.

The longest step that the settings allow, at the pace of the largest ones that were measured. Written on the loop's thread, one
plain attribute at a time; read by any other.
"""

from __future__ import annotations

from collections.abc import Callable

from services.worker.core.contracts.config import SchedulerConfig
from services.worker.core.contracts.plan import BatchPlan
from services.worker.exec.contracts.model_info import LoadedInfo

FLOOR_S = 10.0  # no limit is shorter: a machine may be busy with something else for as long
SLACK = 3.0  # what a step may take beyond its estimate
FADES = 0.99  # of the worst pace, with each further step of that size: one stall is not remembered for ever
QUERY_HEADS = 4.0  # that share a KV head, as a rule


def attention_span(info: LoadedInfo) -> float:
    """Positions whose attention costs a token about as much as all weights do; infinite where nothing is known.

    A token takes two operations per weight, and per position two for each element of all layers' keys and values, for each
    of the query heads that share them.
    """
    if not info.weight_bytes or not info.kv_bytes_per_token:
        return float("inf")
    return info.weight_bytes / (info.kv_bytes_per_token * QUERY_HEADS)


def work_of(plan: BatchPlan, span: float) -> float:
    """Of a step, in tokens: a token at position `span` counts twice."""
    attended = float((plan.num_tokens * (plan.starts + 0.5 * plan.num_tokens)).sum())
    return float(plan.num_tokens.sum()) + attended / span


def largest_work(config: SchedulerConfig, span: float) -> float:
    """Of any step that the settings allow, at most: a prefill step's budget at the end of the context."""
    budget, chunk = max(config.max_prefill_tokens, config.page_size), config.chunked_prefill_size
    tokens = min(budget, chunk) if chunk else max(budget, config.context_len)
    rows = config.max_running_requests
    if config.enable_mixed_chunk:  # decode rows take from the budget, but for a page
        tokens = max(tokens, rows + config.page_size)
    return max(tokens, rows) * (1.0 + config.context_len / span)


class StepLimit:
    """config: the scheduler's as it is. cap_s: the longest limit, and the limit while nothing has been measured."""

    def __init__(self, config: Callable[[], SchedulerConfig], span: float, cap_s: float) -> None:
        self._config = config
        self._span = span
        self._cap_s = cap_s
        self._size = 0  # of the steps that count: bits of their work
        self._pace = 0.0  # the worst of them lately, in seconds per token of work

    def took(self, plan: BatchPlan, seconds: float) -> None:
        """A step has ended. The largest ones tell most of what the largest could take: smaller ones do not count."""
        work = work_of(plan, self._span)
        size = int(work).bit_length()
        if size < self._size:
            return
        faded = self._pace * FADES if size == self._size else 0.0
        self._size, self._pace = size, max(seconds / max(work, 1.0), faded)

    @property
    def seconds(self) -> float:
        if not self._size:
            return self._cap_s
        estimate = self._pace * largest_work(self._config(), self._span)
        return min(max(FLOOR_S, SLACK * estimate), self._cap_s)
