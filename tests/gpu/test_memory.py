"""Tests steps that do not fit into memory: they run in pieces and give equal tokens, or the largest request ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rootstock_llm.services.worker.core.contracts.messages import ErrorCode
from tests.exec.device_executors import executor_of
from tests.exec.tiny_models import MODELS
from tests.gpu.served import Served, config_for, greedy
from tests.gpu.truth import generated, prompts_of

VOCAB, NEW_TOKENS = 257, 8
LENGTHS = (3, 20, 40, 90, 150)


class Cramped:
    """A model that raises OutOfMemoryError for a pass with more than `max_tokens` tokens or a context above `max_context`."""

    def __init__(self, model: Any, max_tokens: int, max_context: int = 1 << 30) -> None:
        self._model, self._max_tokens, self._max_context = model, max_tokens, max_context
        self.refused = 0

    def forward(self, input_ids: Any, rows: Any, pool: Any) -> None:
        if len(input_ids) > self._max_tokens or rows.max_context > self._max_context:
            self.refused += 1
            raise torch.OutOfMemoryError("made to fail")
        self._model.forward(input_ids, rows, pool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_step_runs_in_pieces_when_memory_is_short(tmp_path: Path, device: str) -> None:
    model = MODELS["qwen3"].build(tmp_path).to(device)
    prompts = prompts_of(VOCAB, LENGTHS)
    want = [generated(model, prompt, NEW_TOKENS) for prompt in prompts]
    executor: Any = executor_of(tmp_path, device)
    cramped = executor.runner.passes.model = Cramped(executor.runner.passes.model, max_tokens=48)
    served = Served(config_for(VOCAB, enable_mixed_chunk=True), executor)
    answers = served.run([(prompt, greedy(NEW_TOKENS)) for prompt in prompts])
    assert [answer.tokens for answer in answers] == want
    assert cramped.refused and executor.runner.stats.pieces
    executor.close()


def test_largest_request_ends_when_one_token_does_not_fit(tmp_path: Path, device: str) -> None:
    model = MODELS["qwen3"].build(tmp_path).to(device)
    prompts = prompts_of(VOCAB, LENGTHS)
    want = [generated(model, prompt, NEW_TOKENS) for prompt in prompts]
    # With overlap, the next step still has the row that has ended for lack of memory. The row has no sampled token, and its
    # result is not used.
    executor: Any = executor_of(tmp_path, device, cuda_graphs=False, check_relay=False)
    executor.runner.passes.model = Cramped(executor.runner.passes.model, max_tokens=64, max_context=120)
    answers = Served(config_for(VOCAB), executor).run([(prompt, greedy(NEW_TOKENS)) for prompt in prompts])
    assert [answer.tokens for answer in answers[:-1]] == want[:-1]
    finish = answers[-1].finish
    assert finish is not None and "ran out of memory" in finish.message, finish
    assert Served(config_for(VOCAB), executor).run([(prompts[0], greedy(NEW_TOKENS))])[0].tokens == want[0]
    executor.close()


@contextmanager
def little_left(device: str, num_bytes: int) -> Iterator[None]:
    """Limits torch's allocator to `num_bytes` more than it has reserved now."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + num_bytes) / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_other_requests_continue_when_the_allocator_has_no_memory(tmp_path: Path, device: str) -> None:
    """Leaves almost no memory for the log probabilities of a long prompt with a large vocabulary.

    The buffers of a step are allocated before the memory is limited. The request ends for lack of memory, or its log
    probabilities are right. Other requests must not be affected.
    """
    shape = MODELS["qwen3"]
    wide = type(shape)(shape.family, {**shape.options, "vocab_size": 65_536})
    model = wide.build(tmp_path).to(device)
    prompts = prompts_of(65_536, (400, 3, 20))
    want = [generated(model, prompt, NEW_TOKENS) for prompt in prompts]
    del model
    executor: Any = executor_of(tmp_path, device, max_slots=4)
    asked = [(prompt, greedy(NEW_TOKENS, prompt_logprobs_from=1 if len(prompt) == 400 else -1)) for prompt in prompts]
    config = config_for(65_536, max_running_requests=4, chunked_prefill_size=512)
    Served(config, executor).run(asked[1:])  # compiles kernels before the memory is limited
    with little_left(device, 24 << 20):  # float32 logits of 400 tokens would be 100 MiB
        answers = Served(config, executor).run(asked)
    assert [answer.tokens for answer in answers[1:]] == want[1:]
    finish = answers[0].finish
    assert finish is not None
    if finish.error is ErrorCode.NONE:
        assert answers[0].tokens == want[0] and len(answers[0].prompt_values) == 399
    else:
        assert "ran out of memory" in finish.message, finish
    executor.close()
