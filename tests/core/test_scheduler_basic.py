from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, FinishReason
from rootstock_llm.services.worker.core.contracts.plan import RowFault, SamplingParams
from rootstock_llm.services.worker.core.requests.finish import check_finished
from rootstock_llm.services.worker.core.requests.request import Request
from tests.core.deployed_config import deployed_config
from tests.core.harness import Engine, LetterDecoder


def make(overlap: bool = True, **changes: Any) -> Engine:
    values: dict[str, Any] = {
        "num_pages": 64,
        "page_size": 4,
        "context_len": 128,
        "vocab_size": 1000,
        "max_running_requests": 8,
        "chunked_prefill_size": 16,
        "eos_token_ids": (7,),
    }
    return Engine(deployed_config(**{**values, **changes}), overlap)


def finish_of(engine: Engine, handle: int) -> tuple[FinishReason, ErrorCode]:
    return engine.finishes[handle].reason, engine.finishes[handle].error


@pytest.mark.by_day(one_in=4, seed=2)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
def test_scheduler_returns_the_models_tokens(overlap: bool, mixed: bool) -> None:
    engine = make(overlap, enable_mixed_chunk=mixed)
    for handle in range(20):
        engine.submit(handle, range(handle, handle * 2 + 3), max_new_tokens=5 + handle)
    engine.drain()
    for handle in range(20):
        engine.check_answer(handle)


class TestTimeouts:
    def test_timeout_ends_a_request_once_when_two_time_limits_pass(self) -> None:
        engine = make(max_running_requests=1, waiting_timeout_s=1, running_timeout_s=1)
        engine.submit(0, [1] * 8, timeout_s=1, max_new_tokens=100, ignore_eos=True)
        engine.submit(1, [2] * 8, timeout_s=1, max_new_tokens=100)
        engine.turn()
        engine.now += 2
        engine.drain()
        assert finish_of(engine, 0) == finish_of(engine, 1) == (FinishReason.ABORT, ErrorCode.TIMEOUT)

    def test_waiting_timeout_no_longer_applies_after_the_first_admission(self) -> None:
        engine = make(max_running_requests=1, waiting_timeout_s=0.1)
        engine.submit(0, [1] * 8, max_new_tokens=60, ignore_eos=True)
        engine.submit(1, [2] * 8, max_new_tokens=5)
        engine.drain()
        assert engine.finishes[0].reason is FinishReason.LENGTH
        assert engine.finishes[1].error is ErrorCode.TIMEOUT

    def test_deadlines_of_ended_requests_are_dropped(self) -> None:
        engine = make(max_queued_requests=1000)
        for handle in range(600):
            engine.submit(handle, [1] * 4, timeout_s=3600, max_new_tokens=1)
            engine.drain()
        assert len(engine.core.lifecycle._deadlines) < 100


class TestFaults:
    def test_exception_of_the_decoder_ends_only_requests_with_stop_strings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = make()
        monkeypatch.setattr(LetterDecoder, "decode", raising)
        engine.submit(0, [1] * 8, max_new_tokens=9, ignore_eos=True)
        engine.submit(1, [2] * 8, max_new_tokens=9, stop=("zzz",))
        engine.drain()
        assert finish_of(engine, 0) == (FinishReason.LENGTH, ErrorCode.NONE)
        assert finish_of(engine, 1) == (FinishReason.ABORT, ErrorCode.INTERNAL)

    @pytest.mark.by_day(one_in=2, seed=4)
    @pytest.mark.parametrize("fault", RowFault)
    def test_request_with_a_faulty_row_ends_and_publishes_no_pages(self, fault: RowFault) -> None:
        engine = make()
        engine.executor.row_faults = {1: {0: fault}}
        engine.submit(0, [1] * 12, max_new_tokens=9)
        engine.submit(1, [2] * 3, max_new_tokens=9, ignore_eos=True)
        engine.drain()
        error = ErrorCode.INVALID_ARGUMENT if fault is RowFault.NO_TOKEN_ALLOWED else ErrorCode.INTERNAL
        assert finish_of(engine, 0) == (FinishReason.ABORT, error)
        assert engine.finishes[0].completion_tokens == 0
        assert finish_of(engine, 1) == (FinishReason.LENGTH, ErrorCode.NONE)
        engine.submit(2, [1] * 12, max_new_tokens=2)
        engine.drain()
        assert engine.finishes[2].cached_tokens == 0

    @pytest.mark.by_day(one_in=2, seed=2)
    @pytest.mark.parametrize("overlap", [True, False])
    def test_failed_step_ends_only_the_requests_in_that_step(self, overlap: bool) -> None:
        engine = make(overlap)
        engine.submit(0, [1] * 8, max_new_tokens=20, ignore_eos=True)
        for _ in range(4):
            engine.turn()
        engine.submit(1, [2] * 8, max_new_tokens=5, ignore_eos=True)
        failing = engine.plans[-1].step_id
        assert engine.prev is not None and engine.prev.plan.step_id == failing
        engine.core.fail(failing, "broken", engine.now)
        engine.prev = None
        engine.drain()
        assert finish_of(engine, 0) == (FinishReason.ABORT, ErrorCode.INTERNAL)
        engine.check_answer(1)
        assert engine.core.memory.num_leased == 0


class TestOutput:
    @pytest.mark.by_day(one_in=3, seed=1)
    @pytest.mark.parametrize(("stream", "interval"), [(True, 1), (True, 4), (False, 1)])
    def test_outputs_are_not_delayed_when_every_step_retracts_a_request(self, stream: bool, interval: int) -> None:
        engine = make(retract_interval=1)
        engine.submit(0, [1] * 8, stream=stream, max_new_tokens=100, ignore_eos=True, stream_interval=interval)
        due = interval if stream else 50
        for _ in range(60):
            engine.turn()
            request = engine.core.queues.by_key[0, 0]
            assert len(request.progress.output_ids) - len(engine.outputs.get(0, [])) < due
        engine.drain()
        engine.check_answer(0)

    def test_stop_string_matches_across_tokens_without_text(self) -> None:
        decoder = SilentBelowTen()
        request = Request(
            1, 0, 0, "r", np.array([1], dtype=np.int32), SamplingParams(99, stop=("abc",)), (), "", 0, 1, 0.0, 1.0, 4, 0
        )
        request.progress.output_ids = [5 + 26, 0 + 26, 1, 2, 3, 4, 5, 1 + 26, 2 + 26]
        ending = check_finished(request, decoder)
        assert ending is not None and ending.matched_stop == "abc"


def raising(decoder: LetterDecoder, ids: Sequence[int], skip_special_tokens: bool) -> str:
    raise OverflowError("no text")


class SilentBelowTen(LetterDecoder):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return super().decode([i for i in ids if i >= 10])


class TestBudgets:
    def test_prompts_are_not_cut_when_chunking_is_off(self) -> None:
        engine = make(chunked_prefill_size=0, max_prefill_tokens=64)
        for handle, length in enumerate((40, 100, 20)):
            engine.submit(handle, [handle] * length, max_new_tokens=3)
        engine.drain()
        extends = [plan for plan in engine.plans if plan.num_extend]
        assert [plan.num_tokens[: plan.num_extend].tolist() for plan in extends] == [[40], [100], [20]]
        assert all(plan.sample.all() for plan in extends)

    def test_retracted_request_ends_when_larger_than_the_pool(self) -> None:
        engine = make(num_pages=16, retract_interval=1, eos_token_ids=())
        engine.submit(0, [1] * 48, max_new_tokens=60)
        engine.drain()
        assert engine.finishes[0].error is ErrorCode.OUT_OF_MEMORY
        assert len(engine.outputs[0]) >= 15
