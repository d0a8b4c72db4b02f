"""The real core on FakeExecutor, with what CORE.md says checked after every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.worker.core.config import SchedulerConfig
from services.worker.core.finish import first_stop
from services.worker.core.invariants import violations
from services.worker.core.messages import ErrorCode, Finish, FinishReason, Submit
from services.worker.core.plan import BatchPlan
from services.worker.core.sampling import SamplingParams
from services.worker.core.scheduler import Scheduler
from services.worker.exec.fake import FakeExecutor, FakeRun, hashed_token


class LetterDecoder:
    """Token t is the letter a + t mod 26."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


class Engine:
    """Turns the loop by hand. `outputs` and `finishes` gather what a front end would see, by handle."""

    def __init__(self, config: SchedulerConfig, overlap: bool = True) -> None:
        self.config = config
        self.core = Scheduler(config, LetterDecoder())
        self.executor = FakeExecutor(
            config.num_pages, config.page_size, config.max_running_requests, config.max_pages_per_request, config.vocab_size
        )
        self.overlap = overlap
        self.now = 0.0
        self.prev: FakeRun | None = None
        self.plans: list[BatchPlan] = []
        self.submitted: dict[int, Submit] = {}
        self.outputs: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.idle_turns = 0

    def submit(
        self,
        handle: int,
        prompt: Sequence[int],
        peer: int = 0,
        stream: bool = True,
        salt: str = "",
        timeout_s: float = 0.0,
        **params: Any,
    ) -> None:
        ids, sampling = np.array(prompt, dtype=np.int32), SamplingParams(**params)
        message = Submit(peer, handle, f"r{handle}", ids, sampling, stream, salt, timeout_s=timeout_s)
        self.submitted[handle] = message
        self.core.submit(message, self.now)
        self.check()

    def abort(self, handle: int) -> None:
        self.core.abort(0, handle, self.now)
        self.check()

    def turn(self) -> bool:
        """One turn of the worker's loop. False: nothing was planned and nothing was in flight."""
        self.now += 0.01
        if not self.overlap:
            self._commit()
        plan = self.core.plan(self.now)
        self.check()
        run = None
        if plan is not None:
            self.plans.append(plan)
            run = self.executor.forward(plan)
        busy = run is not None or self.prev is not None
        if self.overlap:
            self._commit()
        if run is not None:
            self.executor.sample(run, {})
        self.prev = run
        self.check()
        self._take()
        self.idle_turns = 0 if busy or self.core.idle else self.idle_turns + 1
        return busy

    def drain(self, limit: int = 100_000) -> None:
        for _ in range(limit):
            self.turn()
            if self.core.idle and self.prev is None:
                return
            assert self.idle_turns < 3, "the scheduler is stuck with requests waiting"
        raise AssertionError("livelock: the requests did not end")

    def expected(self, handle: int) -> list[int]:
        """What the fake model says to this request by itself: its tokens until a stop rule holds."""
        message = self.submitted[handle]
        params = message.params
        eos = () if params.ignore_eos else self.config.eos_token_ids
        out: list[int] = []
        while True:
            context = np.concatenate([message.prompt_ids, np.array(out, dtype=np.int32)])
            token = hashed_token(context, self.config.vocab_size)
            out.append(token)
            if len(out) >= params.max_new_tokens:
                return out
            if len(out) >= params.min_new_tokens and token in (*params.stop_token_ids, *eos):
                return out
            if params.stop and first_stop(LetterDecoder().decode(out), params.stop):
                return out

    def check_answer(self, handle: int) -> None:
        finish = self.finishes[handle]
        got, want = self.outputs.get(handle, []), self.expected(handle)
        if finish.reason is FinishReason.ABORT:
            assert finish.error in (ErrorCode.CANCELLED, ErrorCode.OUT_OF_MEMORY, ErrorCode.TIMEOUT), finish
            assert got == want[: len(got)]
        else:
            assert got == want, f"request {handle}: {got} is not {want}"
            assert finish.completion_tokens == len(want)

    def check(self) -> None:
        found = violations(self.core.table)
        assert not found, found
        for node in self.core.table.memory.tree.nodes():
            held = self.executor.kv[node.pages].reshape(-1)
            assert held.tobytes() == node.key, "a cached page holds other tokens than those that lead to it"

    def _commit(self) -> None:
        if self.prev is not None:
            run, self.prev = self.prev, None
            self.core.commit(self.executor.wait(run), self.now)
            self.check()
            self._take()

    def _take(self) -> None:
        output = self.core.take_output()
        for peer in output.peers if output else ():
            at = 0
            for handle, count in zip(peer.handles, peer.counts, strict=True):
                assert handle not in self.finishes, "tokens after the terminal output"
                self.outputs.setdefault(handle, []).extend(peer.tokens[at : at + count])
                at += count
            assert at == len(peer.tokens)
            for finish in peer.finishes:
                assert finish.handle not in self.finishes, "two terminal outputs"
                self.finishes[finish.handle] = finish
