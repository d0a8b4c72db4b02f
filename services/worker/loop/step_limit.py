"""The time limit of one step on this worker, by which a long step is told from a hung one.

The limit is the estimated time of the longest step that the settings allow, at the pace of the largest steps that were measured.
The loop's thread writes it, one plain attribute at a time; other threads read it.
"""

from __future__ import annotations

from collections.abc import Callable

from services.worker.core.contracts.config import SchedulerConfig
from services.worker.core.contracts.plan import BatchPlan
from services.worker.exec.contracts.model_info import LoadedInfo

FLOOR_S = 10.0  # seconds; the limit is never shorter, because other work may block the machine for this long
SLACK = 3.0  # factor of the estimated time
FADES = 0.99  # factor of the worst pace at each further step of that size, so that one stall is forgotten
QUERY_HEADS = 4.0  # typical number of query heads that share a KV head


def attention_span(info: LoadedInfo) -> float:
    """Returns the number of positions whose attention costs a token as much as all weights; infinite if unknown.

    A token takes two operations per weight. For each position, it takes two operations for each element of all layers' keys and
    values and for each of the query heads that share them.
    """
    if not info.weight_bytes or not info.kv_bytes_per_token:
        return float("inf")
    return info.weight_bytes / (info.kv_bytes_per_token * QUERY_HEADS)


def work_of(plan: BatchPlan, span: float) -> float:
    """Returns the work of a step in tokens. A token at position `span` counts twice."""
    attended = float((plan.num_tokens * (plan.starts + 0.5 * plan.num_tokens)).sum())
    return float(plan.num_tokens.sum()) + attended / span


def largest_work(config: SchedulerConfig, span: float) -> float:
    """Returns the largest work of a step under these settings: a prefill budget at the end of the context."""
    budget, chunk = max(config.max_prefill_tokens, config.page_size), config.chunked_prefill_size
    tokens = min(budget, chunk) if chunk else max(budget, config.context_len)
    rows = config.max_running_requests
    if config.enable_mixed_chunk:  # decode rows take from the budget, which keeps one page
        tokens = max(tokens, rows + config.page_size)
    return max(tokens, rows) * (1.0 + config.context_len / span)


class StepLimit:
    """The present time limit of a step, by the times of earlier steps."""

    def __init__(self, config: Callable[[], SchedulerConfig], span: float, cap_s: float) -> None:
        """Starts with the limit `cap_s`.

        Args:
            config: returns the scheduler's present configuration.
            span: see attention_span().
            cap_s: largest limit in seconds, which applies until a step was measured.
        """
        self._config = config
        self._span = span
        self._cap_s = cap_s
        self._size = 0  # bit length of the work of the largest steps
        self._pace = 0.0  # worst recent pace of these steps, in seconds per token of work

    def took(self, plan: BatchPlan, seconds: float) -> None:
        """Records the time of a step. Only the largest steps count, because they say most about the longest possible one."""
        work = work_of(plan, self._span)
        size = int(work).bit_length()
        if size < self._size:
            return
        faded = self._pace * FADES if size == self._size else 0.0
        self._size, self._pace = size, max(seconds / max(work, 1.0), faded)

    @property
    def seconds(self) -> float:
        """Largest number of seconds that a step may take."""
        if not self._size:
            return self._cap_s
        estimate = self._pace * largest_work(self._config(), self._span)
        return min(max(FLOOR_S, SLACK * estimate), self._cap_s)
