"""Sums over the loop's turns, which metrics read. The loop's thread writes them and replaces each value as a whole."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from services.worker.core.contracts.counters import StepStats
from services.worker.core.contracts.plan import BatchPlan, ForwardMode
from services.worker.core.kv.cache_events import CacheEvents

RATE_WINDOW_S = 10.0  # window of throughput, hit rate and acceptance
SAMPLE_S = 1.0  # least seconds between two samples of this window


class LoopCounts:
    """The sums of one loop."""

    def __init__(self, page_size: int, num_pages: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.page_size, self.num_pages = page_size, num_pages
        self.stats: StepStats | None = None  # stats of the latest turn; unset before the first one
        self.steps = 0
        self.prefill_tokens = self.decode_tokens = 0
        self.stored_blocks = self.removed_blocks = self.cleared = 0
        # Seconds of steps, by mode.
        self.forward_s: dict[ForwardMode, float] = {mode: 0.0 for mode in ForwardMode if mode is not ForwardMode.IDLE}
        # Seconds in which no step was in flight although requests ran, which leaves out idle times of a device between overlapped
        # steps; seconds in which the loop waited for messages.
        self.bubble_s = self.idle_s = 0.0
        self._clock = clock
        self._plan: BatchPlan | None = None  # plan of the latest step
        self._ended_step, self._ended_at = -1, 0.0
        self._rests_since = 0.0
        self._samples: deque[tuple[float, StepStats, float]] = deque()  # (time, stats, forward_s of all modes)

    def rests(self) -> None:
        self._rests_since = self._clock()

    def wakes(self) -> None:
        self.idle_s += self._clock() - self._rests_since

    def planned(self, plan: BatchPlan) -> None:
        """Counts a step that is about to be launched."""
        if self._plan is not None and self._plan.step_id == self._ended_step and self._had_work:
            self.bubble_s += self._clock() - self._ended_at
        self._plan = plan
        self.steps += 1
        self.prefill_tokens += len(plan.input_ids)
        self.decode_tokens += plan.num_rows - plan.num_extend

    def ended(self, plan: BatchPlan, seconds: float) -> None:
        """Adds the time of a step."""
        self.forward_s[plan.mode] += seconds
        self._ended_step, self._ended_at = plan.step_id, self._clock()

    @property
    def _had_work(self) -> bool:
        """Whether requests ran at the latest turn."""
        return self.stats is not None and self.stats.num_running > 0 and not self.stats.paused

    def turned(self, stats: StepStats) -> None:
        self.stats = stats
        now = self._clock()
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now, stats, sum(self.forward_s.values())))
            while now - self._samples[0][0] > RATE_WINDOW_S:
                self._samples.popleft()

    def cached(self, events: CacheEvents) -> None:
        self.stored_blocks += len(events.stored)
        self.removed_blocks += len(events.removed)
        self.cleared += events.cleared

    # Read by scrapes

    @property
    def used_tokens(self) -> int:
        """Tokens of KV that running requests use."""
        return self.stats.pages_used * self.page_size if self.stats is not None else 0

    @property
    def decode_context_tokens(self) -> int:
        """Tokens of context of the decode rows in the latest step, including the tokens of that step."""
        plan = self._plan
        if plan is None or self.stats is None or not self.stats.num_running:
            return 0
        return int(plan.starts[plan.num_extend :].sum()) + plan.num_rows - plan.num_extend

    @property
    def throughput(self) -> float:
        """Output tokens per second in the window."""
        seconds, then, now, _ = self._lately()
        return (now.generated_tokens_total - then.generated_tokens_total) / seconds if then and now else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens admitted in the window that were cached."""
        _, then, now, _ = self._lately()
        prompt = now.prompt_tokens_total - then.prompt_tokens_total if then and now else 0
        return (now.cached_tokens_total - then.cached_tokens_total) / prompt if then and now and prompt else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens per row with draft tokens in the window, including the token that was not drafted; 0 without such rows."""
        _, then, now, _ = self._lately()
        rows = now.verified_rows_total - then.verified_rows_total if then and now else 0
        return 1 + (now.accepted_tokens_total - then.accepted_tokens_total) / rows if then and now and rows else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of the draft tokens in the window that were accepted."""
        _, then, now, _ = self._lately()
        drafted = now.drafted_tokens_total - then.drafted_tokens_total if then and now else 0
        return (now.accepted_tokens_total - then.accepted_tokens_total) / drafted if then and now and drafted else 0.0

    @property
    def occupancy(self) -> float:
        """Percentage of the window in which a step was computed."""
        seconds, _, _, forward_s = self._lately()
        return min(100.0 * forward_s / seconds, 100.0) if seconds else 0.0

    def _lately(self) -> tuple[float, StepStats | None, StepStats | None, float]:
        """Returns the window: its length in seconds, its first stats, the present stats, and the seconds of steps in it."""
        now = self._clock()
        for at, then, forward_s in list(self._samples):
            if now - at <= RATE_WINDOW_S and now > at:
                return now - at, then, self.stats, sum(self.forward_s.values()) - forward_s
        return 0.0, None, None, 0.0
