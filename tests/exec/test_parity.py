"""The executor on host streams gives the tokens of transformers, for any chunks, page sizes and batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.exec.driver import Driver, Sequence, greedy
from tests.exec.host_executors import build_host_executor, on_both_kernels
from tests.exec.tiny_models import MODELS, greedy_answers, recurrent_logits

NUM_NEW = 64


@dataclass(frozen=True)
class Reference:
    """A checkpoint, and transformers' outputs for prompts."""

    folder: Path
    model: Any  # transformers' model
    kernels: str = "cpp"
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # outputs by prompt, shared by both kernel sets

    def generate(self, *prompts: list[int]) -> list[list[int]]:
        """Returns NUM_NEW greedy tokens for each prompt. Prompts without a stored output are computed together."""
        if unknown := [prompt for prompt in prompts if tuple(prompt) not in self.answers]:
            self.answers.update(zip(map(tuple, unknown), greedy_answers(self.model, unknown, NUM_NEW), strict=True))
        return [self.answers[tuple(prompt)] for prompt in prompts]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    return {}


@pytest.fixture
def reference(
    request: pytest.FixtureRequest, references: dict[str, Reference], tmp_path_factory: Any, kernel_name: str
) -> Reference:
    name = request.param
    if name not in references:
        folder = tmp_path_factory.mktemp(name)
        references[name] = Reference(folder, MODELS[name].build(folder))
    return replace(references[name], kernels=kernel_name)


pytestmark = on_both_kernels
every_model = pytest.mark.parametrize("reference", list(MODELS), indirect=True)
some_models = pytest.mark.parametrize(
    "reference", ["mistral-window", "qwen3", "qwen3.5", "qwen3.5-window", "gemma3", "gpt-oss"], indirect=True
)
one_model = pytest.mark.parametrize("reference", ["qwen3"], indirect=True)


@contextmanager
def driver(reference: Reference, page_size: int = 16, num_pages: int = 2048) -> Iterator[Driver]:
    executor, _ = build_host_executor(
        str(reference.folder), "auto", page_size, 32, num_pages, 0.5, None, 2, lambda _: None, True, reference.kernels
    )
    try:
        yield Driver(executor, page_size)
    finally:
        executor.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, 257, (length,), generator=generator).tolist()


def run_alone(driving: Driver, prompt: list[int], chunk: int = 1 << 30, slot: int = 3) -> list[int]:
    sequence = Sequence(prompt, slot, greedy())
    driving.prefill([sequence], chunk)
    driving.decode([sequence], NUM_NEW)
    return sequence.output


@pytest.mark.by_day(one_in=4, seed=6, kernel_name="torch")
@every_model
def test_greedy_tokens_equal_transformers(reference: Reference) -> None:
    prompt = prompt_of(50)
    (expected,) = reference.generate(prompt)
    assert len(set(expected)) > 8, "the checkpoint must give varied output"
    with driver(reference) as driving:
        assert run_alone(driving, prompt) == expected


@pytest.mark.by_day(one_in=4, seed=1, kernel_name="torch")
@every_model
def test_top_logprobs_equal_transformers(reference: Reference) -> None:
    prompt = prompt_of(37)
    sequence = Sequence(prompt, 0, greedy(8, top_logprobs=20))
    with driver(reference) as driving:
        driving.prefill([sequence])
        driving.decode([sequence], 8)
    logits = recurrent_logits(reference.model, sequence.tokens)
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    for step, row in enumerate(sequence.logprobs):
        assert row.sampled == pytest.approx(float(expected[step, sequence.output[step]]), abs=1e-4)
        assert list(row.top) == pytest.approx(expected[step].topk(20).values.tolist(), abs=1e-4)
        assert [float(expected[step, i]) for i in row.top_ids] == pytest.approx(list(row.top), abs=1e-4)


@pytest.mark.by_day(one_in=3, seed=3)
@some_models
def test_tokens_equal_transformers_when_sixteen_ragged_requests_share_a_batch(reference: Reference) -> None:
    prompts = [prompt_of(1 + 7 * index, index) for index in range(16)]
    with driver(reference) as driving:
        sequences = [Sequence(prompt, 15 - index, greedy()) for index, prompt in enumerate(prompts)]
        driving.prefill(sequences)
        driving.decode(sequences, NUM_NEW)
    assert [s.output for s in sequences] == reference.generate(*prompts)


@pytest.mark.by_day(one_in=2)
@one_model
def test_tokens_equal_transformers_when_decode_rows_join_prompt_chunks(reference: Reference) -> None:
    early, late = Sequence(prompt_of(20, 1), 1, greedy()), Sequence(prompt_of(100, 2), 2, greedy())
    with driver(reference) as driving:
        driving.prefill([early])
        while late.computed < len(late.prompt):
            driving.step([(late, min(16, len(late.prompt) - late.computed)), (early, 1)])
        driving.decode([early, late], NUM_NEW)
    assert [early.output, late.output] == reference.generate(early.prompt, late.prompt)


@pytest.mark.by_day(one_in=6, seed=17)
@some_models
@pytest.mark.parametrize("chunk", [4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48])
def test_tokens_equal_transformers_when_a_prompt_is_chunked(reference: Reference, chunk: int) -> None:
    prompt = prompt_of(45)
    with driver(reference, page_size=4) as driving:
        assert [run_alone(driving, prompt, chunk)] == reference.generate(prompt)


@pytest.mark.by_day(one_in=3, seed=4)
@one_model
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_tokens_equal_transformers_for_each_page_size(reference: Reference, page_size: int) -> None:
    prompt = prompt_of(33)
    with driver(reference, page_size) as driving:
        assert [run_alone(driving, prompt)] == reference.generate(prompt)


@pytest.mark.by_day(one_in=3, seed=4)
@one_model
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_tokens_equal_transformers_when_rows_share_prefix_pages(reference: Reference, page_size: int) -> None:
    prefix = prompt_of(32)
    first, second = Sequence(prefix + prompt_of(9, 1), 0, greedy()), Sequence(prefix + prompt_of(5, 2), 1, greedy())
    with driver(reference, page_size) as driving:
        driving.prefill([first])
        second.pages = first.pages[: 32 // page_size]
        second.computed = 32
        driving.step([(second, 5), (first, 1)])
        driving.decode([first, second], NUM_NEW)
    assert [first.output, second.output] == reference.generate(first.prompt, second.prompt)


@pytest.mark.by_day(one_in=2)
@one_model
def test_tokens_equal_transformers_when_pages_are_shuffled(reference: Reference) -> None:
    prompt = prompt_of(60)
    sequence = Sequence(prompt, 0, greedy(), pages=[40, 0, 39, 7, 21, 3, 2, 30])
    with driver(reference) as driving:
        driving.prefill([sequence], 16)
        driving.decode([sequence], NUM_NEW)
    assert [sequence.output] == reference.generate(prompt)


VISION: dict[str, dict[str, Any]] = {
    "Qwen3_5": {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
    "Qwen3_5Moe": {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
    "Gemma3": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
}


@pytest.mark.parametrize(("name", "family"), [("qwen3.5", "Qwen3_5"), ("qwen3.5-moe", "Qwen3_5Moe"), ("gemma3", "Gemma3")])
def test_text_decoder_of_an_image_model_gives_the_same_bits_as_the_text_model(
    name: str, family: str, kernel_name: str, tmp_path: Path
) -> None:
    text = MODELS[name].build(tmp_path / "text")
    config = getattr(transformers, f"{family}Config")(text_config=text.config.to_dict(), vision_config=VISION[family])
    config.tie_word_embeddings = text.config.tie_word_embeddings
    whole = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    missing, _ = whole.model.language_model.load_state_dict(text.model.state_dict(), strict=False)
    assert not missing
    whole.save_pretrained(tmp_path / "whole")
    prompt, logprobs = prompt_of(40), []
    for folder in ("text", "whole"):
        sequence = Sequence(prompt, 0, greedy(8, top_logprobs=5))
        with driver(Reference(tmp_path / folder, None, kernel_name)) as driving:
            driving.prefill([sequence], 16)
            driving.decode([sequence], 8)
        logprobs.append(sequence.logprobs)
    assert logprobs[0] == logprobs[1]
