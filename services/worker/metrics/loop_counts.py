"""What the loop's turns add up to, as metrics read it. Written on the loop's thread; what is written is replaced whole."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from services.worker.core.contracts.plan import BatchPlan
from services.worker.core.kv.cache_events import CacheEvents
from services.worker.core.stats import StepStats

RATE_WINDOW_S = 10.0  # over which throughput and hit rate are taken
SAMPLE_S = 1.0


class LoopCounts:
    """page_size in tokens. stats: of the latest turn, None before the first."""

    def __init__(self, page_size: int, num_pages: int, max_running: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.page_size, self.num_pages, self.max_running = page_size, num_pages, max_running
        self.stats: StepStats | None = None
        self.steps = 0
        self.prefill_tokens = self.decode_tokens = 0
        self.stored_blocks = self.removed_blocks = self.cleared = 0
        self._clock = clock
        self._samples: deque[tuple[float, StepStats]] = deque()

    def planned(self, plan: BatchPlan) -> None:
        self.steps += 1
        self.prefill_tokens += len(plan.input_ids)
        self.decode_tokens += plan.num_rows - plan.num_extend

    def turned(self, stats: StepStats) -> None:
        self.stats = stats
        now = self._clock()
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now, stats))
            while now - self._samples[0][0] > RATE_WINDOW_S:
                self._samples.popleft()

    def cached(self, events: CacheEvents) -> None:
        self.stored_blocks += len(events.stored)
        self.removed_blocks += len(events.removed)
        self.cleared += events.cleared

    # Read by scrapes

    @property
    def used_tokens(self) -> int:
        """Of KV, by running requests."""
        return self.stats.pages_used * self.page_size if self.stats is not None else 0

    @property
    def throughput(self) -> float:
        """Output tokens per second, lately."""
        seconds, then, now = self._lately()
        return (now.generated_tokens_total - then.generated_tokens_total) / seconds if then and now else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens admitted lately that were cached."""
        _, then, now = self._lately()
        prompt = now.prompt_tokens_total - then.prompt_tokens_total if then and now else 0
        return (now.cached_tokens_total - then.cached_tokens_total) / prompt if then and now and prompt else 0.0

    def _lately(self) -> tuple[float, StepStats | None, StepStats | None]:
        """Seconds since the oldest sample that is no older than the window, that sample, and the figures as they are."""
        now = self._clock()
        for at, then in list(self._samples):
            if now - at <= RATE_WINDOW_S and now > at:
                return now - at, then, self.stats
        return 0.0, None, None
