"""Measures the progress of the scheduler loop: its last sign of life, the time limit of a step, and a watchdog for hangs.

The loop's thread writes the attributes of Pulse and StepLimit, one plain attribute at a time, without a lock. The watchdog's
thread reads Pulse, and the asyncio loop reads both. Load reports to gateways contain the age of the step in flight and the limit
of a step, so that a gateway can distinguish a long step from a hang.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable

from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan
from rootstock_llm.services.worker.exec.contracts.model_info import LoadedInfo

# Smallest limit of a step in seconds, unless watchdog_timeout_s is smaller. Other processes may block the machine for this long.
FLOOR_S = 10.0
SLACK = 3.0  # the limit of a step is this factor times the estimated time
# The worst measured pace is multiplied by this factor at each later step of its size class, so that one stall is forgotten.
FADE = 0.99
QUERY_HEADS = 4.0  # typical number of query heads that share a KV head

logger = logging.getLogger(__name__)


class Pulse:
    """The time of the loop's last sign of life."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = clock()  # time of the last sign of life; None while the loop waits for messages
        self._until = 0.0  # deadline of the running command; 0: no command is running

    def beat(self) -> None:
        """Records a sign of life, such as the beginning or the end of a step, and the end of an operator's command."""
        self._since = self._clock()
        self._until = 0.0

    def begin_command(self, until: float) -> None:
        """Records the beginning of an operator's command, which may run until `until`. Valid until the next beat()."""
        self._since = self._clock()
        self._until = until

    def rest(self) -> None:
        """Records that the loop waits for messages, for example because no request can run. No step is in flight."""
        self._since = None

    @property
    def age_s(self) -> float:
        """Seconds since the last sign of life; 0 while the loop waits for messages."""
        since = self._since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life, or since the running command's deadline if that is later.

        0 while the loop waits for messages.
        """
        since = self._since
        return 0.0 if since is None else max(0.0, self._clock() - max(since, self._until))


def attention_span(info: LoadedInfo) -> float:
    """Returns the context length at which the attention of a token takes as many operations as all weights; infinite if unknown.

    A token takes 2 operations per weight. For each position of its context, it takes 2 * QUERY_HEADS operations per element of
    the keys and values of all layers. Weights and KV elements are assumed to have the same size in bytes.
    """
    if not info.weight_bytes or not info.kv_bytes_per_token:
        return float("inf")
    return info.weight_bytes / (info.kv_bytes_per_token * QUERY_HEADS)


def work_of(plan: BatchPlan, span: float) -> float:
    """Returns the work of a step in tokens: a token at position p counts as 1 + p / span tokens."""
    attended = float((plan.num_tokens * (plan.starts + 0.5 * plan.num_tokens)).sum())
    return float(plan.num_tokens.sum()) + attended / span


def largest_work(config: SchedulerConfig, span: float) -> float:
    """Returns the work of the largest step that the settings allow: the full token budget at the end of the context."""
    budget, chunk = max(config.max_prefill_tokens, config.page_size), config.chunked_prefill_size
    tokens = min(budget, chunk) if chunk else max(budget, config.context_len)
    rows = config.max_running_requests
    if config.enable_mixed_chunk:  # decode rows count in the budget, but at least one page of prompt tokens is computed
        tokens = max(tokens, rows + config.page_size)
    return max(tokens, rows) * (1.0 + config.context_len / span)


class StepLimit:
    """The time limit of a step: SLACK times the estimated time of the largest step that the settings allow.

    The estimate is the work of that step times the pace (seconds per token of work) of the largest measured steps. The limit is
    at least FLOOR_S and at most cap_s.
    """

    def __init__(self, config: Callable[[], SchedulerConfig], span: float, cap_s: float) -> None:
        """Creates the limit. It is `cap_s` until the first step is measured.

        Args:
            config: returns the scheduler's present configuration.
            span: result of attention_span().
            cap_s: largest limit in seconds.
        """
        self._config = config
        self._span = span
        self._cap_s = cap_s
        self._size = 0  # bit length of the work of the largest measured steps; 0: no step was measured
        self._pace = 0.0  # worst recent pace of these steps, in seconds per token of work

    def record_step(self, plan: BatchPlan, seconds: float) -> None:
        """Records the time of a step. Ignores it if its size class (bit length of the work) is below the largest class so far."""
        work = work_of(plan, self._span)
        size = int(work).bit_length()
        if size < self._size:
            return
        faded = self._pace * FADE if size == self._size else 0.0
        self._size, self._pace = size, max(seconds / max(work, 1.0), faded)

    @property
    def seconds(self) -> float:
        """Largest number of seconds that a step may take."""
        if not self._size:
            return self._cap_s
        estimate = self._pace * largest_work(self._config(), self._span)
        return min(max(FLOOR_S, SLACK * estimate), self._cap_s)


class Watchdog:
    """A thread that watches the pulse of one loop."""

    def __init__(self, pulse: Pulse, timeout_s: float, on_hang: Callable[[], None], on_recover: Callable[[], None]) -> None:
        """Prepares the watchdog; start() starts its thread.

        Args:
            pulse: the loop's signs of life.
            timeout_s: seconds without a sign of life after which the loop counts as hung.
            on_hang: called once per hang, on the watchdog's thread.
            on_recover: called on the watchdog's thread when a hung loop shows a sign of life again.
        """
        self._pulse = pulse
        self._timeout_s = timeout_s
        self._on_hang, self._on_recover = on_hang, on_recover
        self._hung = False
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def check(self) -> None:
        """Checks once whether the loop hangs or has recovered, and calls on_hang() or on_recover()."""
        silent = self._pulse.silent_s
        if silent > self._timeout_s and not self._hung:
            self._hung = True
            logger.error("the loop has hung for %.0f s; the stacks of all threads follow", silent)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            self._on_hang()
        elif silent <= self._timeout_s and self._hung:
            self._hung = False
            logger.warning("the loop runs again after a hang")
            self._on_recover()

    def _watch(self) -> None:
        while not self._stopped.wait(min(self._timeout_s / 4, 5.0)):
            self.check()
