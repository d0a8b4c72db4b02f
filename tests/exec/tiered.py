"""A scheduler and a real executor with KV tiers or with a remote worker. The test runs each iteration of the scheduler loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.cache_groups import CacheKind
from rootstock_llm.services.worker.core.contracts.messages import Finish, PagesReady, Submit
from rootstock_llm.services.worker.core.contracts.plan import RowLogprobs, SamplingParams
from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, KvSource
from rootstock_llm.services.worker.core.invariants import violations
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.core.tiers.page_keys import SECRET_BYTES, PageKeys
from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from rootstock_llm.services.worker.exec.contracts.options import TierOptions
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from tests.core.deployed_config import deployed_config
from tests.core.harness import LetterDecoder

PAGE_SIZE, CONTEXT = 16, 256
SECRET = bytes(range(SECRET_BYTES))
DEADLINE_S = 60.0


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def bits(self) -> list[tuple[int, str, tuple[int, ...], tuple[str, ...]]]:
        """Tokens and log probabilities in a form that is equal only for equal bits."""
        rows = zip(self.tokens, self.logprobs, strict=True)
        return [(token, row.sampled.hex(), row.top_ids, tuple(value.hex() for value in row.top)) for token, row in rows]


def build(
    folder: Path,
    num_pages: int,
    tiers: TierOptions | None,
    max_slots: int = 8,
    dtype: str = "float32",
    context_len: int = CONTEXT,
    **options: Any,
) -> tuple[DeviceExecutor, Scheduler]:
    """Builds an executor and its scheduler. By default, the executor is deterministic and runs on the CPU with one thread."""
    device = DeviceOptions(**{"device": "cpu", "num_threads": 1, "deterministic": True, "tiers": tiers, **options})
    executor, info = build_device_executor(
        str(folder), dtype, PAGE_SIZE, max_slots, num_pages, 0.5, context_len, device, lambda _: None
    )
    config = deployed_config(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        context_len=context_len,
        vocab_size=info.vocab_size,
        max_running_requests=max_slots,
        chunked_prefill_size=max(64, context_len // 4),
        host_pages=info.host_pages,
        has_storage=info.has_storage,
        page_bytes=info.page_bytes,
        max_drafts=info.max_drafts,
        drafts_by_model=info.drafts_by_model,
        reads_peers=info.reads_peers,
        groups=info.groups,
    )
    secret = SECRET if tiers is None else tiers.secret
    keys = PageKeys(secret, info.kv_layout.encode(), PAGE_SIZE) if info.host_pages or info.reads_peers else None
    return executor, Scheduler(config, LetterDecoder(), revision="r1", keys=keys)


class Served:
    """A scheduler and its executor."""

    def __init__(self, executor: DeviceExecutor, core: Scheduler, prefers_reading: bool = True, poisoned: bool = False) -> None:
        """Creates a worker's scheduler loop without requests.

        Args:
            executor: the executor.
            core: the scheduler.
            prefers_reading: whether reading pages always counts as faster than computing them, so that tests of reads do
                not depend on the machine's speed.
            poisoned: whether _poison() overwrites free pages after each step, so that a read of one changes results.
        """
        self.executor, self.core = executor, core
        self.answers: dict[int, Answer] = {}
        self.ready: list[PagesReady] = []
        self._next, self._poisoned = 0, poisoned
        self._has_facts = threading.Event()
        executor.wake_on_facts(self._has_facts.set)
        if prefers_reading and core.tiers is not None:
            rates = core.tiers.rates
            rates.reading_pays = lambda source, pages, lane, forgives, computed: True  # type: ignore[method-assign]
            rates.is_over = lambda source, pages, elapsed, rest, lane, computed: False  # type: ignore[method-assign]

    def submit(
        self,
        prompt: Sequence[int],
        seed: int = 0,
        output: Sequence[int] = (),
        hand_over: KvReservation | None = None,
        source: KvSource | None = None,
        salt: str = "",
        handle: int | None = None,
        **params: Any,
    ) -> int:
        """Submits a request and returns its handle.

        Args:
            prompt: token ids of the prompt.
            seed: sampling seed.
            output: token ids that an earlier worker has output (Submit.output_ids).
            hand_over: reservation for the decode worker that continues the request; None if this worker decodes.
            source: KV source of the prompt's pages on a remote worker.
            salt: cache salt.
            handle: handle from reserve(); None for a new one.
            params: further sampling parameters.
        """
        handle = self.reserve() if handle is None else handle
        self.answers[handle] = Answer()
        sampling = SamplingParams(**{"max_new_tokens": 8, "ignore_eos": True, "top_logprobs": 2, "seed": seed, **params})
        ids = np.array(prompt, dtype=np.int32)
        more = {"output_ids": tuple(output), "hand_over": hand_over, "source": source, "salt": salt}
        self.core.submit(Submit(0, handle, f"r{handle}", ids, sampling, **more), time.monotonic())  # type: ignore[arg-type]
        return handle

    def reserve(self) -> int:
        """Returns a handle for a request that is submitted later."""
        self._next += 1
        return self._next - 1

    def turn(self, wait_s: float = 0.0) -> bool:
        """Runs one iteration of the scheduler loop. Returns whether a request or a page operation is unfinished.

        Args:
            wait_s: longest wait in seconds for the end of an operation if there is no step to run.
        """
        core, executor = self.core, self.executor
        self._has_facts.clear()
        for fact in executor.facts():
            core.ended(fact, time.monotonic())
        plan = core.plan(time.monotonic())
        self._tell_rooms()
        if plan is not None:
            executor.transfer(plan.operations)
        if plan is not None and plan.num_rows:
            run = executor.forward(plan)
            executor.sample(run, {})
            core.commit(executor.wait(run), time.monotonic())
        self._tell_rooms()
        if self._poisoned:
            self._poison()
        self._take()
        assert not violations(core.queues, core.memory, core.sessions, core.tiers)
        if plan is None and wait_s:
            self._has_facts.wait(wait_s)
        storing = core.tiers is not None and core.tiers.num_storing > 0
        return plan is not None or storing or not core.settled or not core.idle

    def drain(self) -> None:
        """Runs the scheduler loop until all requests have ended and no page operation runs."""
        began = time.monotonic()
        while self.turn():
            assert time.monotonic() - began < DEADLINE_S, f"requests or page operations have not ended after {DEADLINE_S:.0f} s"

    def ask(self, prompt: Sequence[int], **params: Any) -> Answer:
        handle = self.submit(prompt, **params)
        self.drain()
        return self.answers[handle]

    def abort(self, handle: int) -> None:
        self.core.abort(0, handle, time.monotonic())

    def close(self) -> None:
        self.executor.close()

    def _tell_rooms(self) -> None:
        events = self.core.take_reservation_events()
        if events is not None:
            self.executor.change_reservations(events)

    def _poison(self) -> None:
        """Overwrites free pages and units with NaN (a large number on a GPU), so that a read of them changes results.

        This is safe: no step is in flight, and if a load still writes a free page, no request will read that page.
        """
        memory, pool = self.core.memory, self.executor.runner.passes.pool
        free: dict[CacheKind | None, NDArray[np.int32]] = {None: memory.pages.free_pages()}
        if memory.units is not None:
            free |= {group.kind: memory.units.pools[at].free_units() for at, group in enumerate(self.core.config.groups)}
        with torch.inference_mode():
            for layer in range(len(pool.keys)):
                ids = torch.from_numpy(free[pool.kind(layer)].astype(np.int64))
                for each in (pool.keys[layer], pool.values[layer]):
                    # FlashInfer multiplies masked values by 0, and 0 times NaN is NaN. A GPU's free pages therefore get a large
                    # number, which also changes the result of a step that reads beyond its context.
                    each[ids.to(each.device)] = torch.nan if each.device.type == "cpu" else 1e4

    def _take(self) -> None:
        outputs = self.core.take_output()
        for peer in outputs:
            at = 0
            self.ready += peer.ready
            for handle, count in zip(peer.handles, peer.counts, strict=True):
                self.answers[handle].tokens += peer.tokens[at : at + count]
                at += count
            for handle, rows in peer.logprobs:
                self.answers[handle].logprobs += rows
            for finish in peer.finishes:
                self.answers[finish.handle].finish = finish
