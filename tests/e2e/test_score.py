"""/v1/score gives the scores of transformers, samples no token, computes a shared query once, and frees its pages if aborted."""

from __future__ import annotations

import json
import random
import shutil
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.e2e.system import DEMO, System, wait_until
from tests.exec.tiny_models import TinyModel

CONTEXT, VOCAB, PAGE = 1024, 1280, 16
SIZES = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0, "sliding_window": 24}
MODELS = {
    "qwen3": TinyModel("Qwen3", {"head_dim": 32, "tie_word_embeddings": True, **SIZES}),
    "llama": TinyModel("Llama", {"tie_word_embeddings": False, **SIZES}),
    "gemma2": TinyModel("Gemma2", {**GEMMA, **SIZES}),
}
LABELS = [17, 900, 3, 17]
CLOSE = 1e-4
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Scorer:
    """A running system, and transformers' model of the same checkpoint."""

    system: System
    model: Any
    tokenizer: Any

    def post(self, **body: Any) -> tuple[int, dict[str, Any]]:
        return self.system.post("/v1/score", {"label_token_ids": LABELS, **body})

    def expected(self, ids: list[int], softmax: bool = False) -> Any:
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids])).logits[0, -1].float()
        values = logits[LABELS].softmax(-1) if softmax else logits.softmax(-1)[LABELS]
        return pytest.approx(values.tolist(), abs=CLOSE)

    def ids_of(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    @property
    def num_used(self) -> float:
        """Number of KV tokens that running requests use."""
        return self.system.metric("worker-0", "sglang:kv_used_tokens")


@pytest.fixture(scope="module", params=MODELS)
def scorer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scorer]:
    folder = tmp_path_factory.mktemp("scored") / request.param
    model = MODELS[request.param].build(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    tokenizer: Any = AutoTokenizer
    with System(folder.parent / "logs", model=str(folder)) as running:
        yield Scorer(running, model, tokenizer.from_pretrained(DEMO))


def ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("softmax", [False, True])
def test_scores_equal_the_scores_of_transformers(scorer: Scorer, softmax: bool, item_first: bool) -> None:
    query, items = ids(40, 1), [ids(count, count) for count in (1, 5, 33)]
    status, answer = scorer.post(query=query, items=items, apply_softmax=softmax, item_first=item_first)
    assert status == 200, answer
    prompts = [item + query if item_first else query + item for item in items]
    assert answer["scores"] == [scorer.expected(prompt, softmax) for prompt in prompts]
    usage, tokens = answer["usage"], sum(map(len, prompts))
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (tokens, 0, tokens)
    assert answer["object"] == "scoring"


def test_score_of_an_item_equals_the_score_of_query_and_item_as_one_text(scorer: Scorer) -> None:
    """Query and item are tokenized together, so a token may contain the end of the query and the beginning of the item."""
    query, items = "Is the sky blue? The answer is", [" yes", " no", "n't known, they say"]
    status, answer = scorer.post(query=query, items=items)
    assert status == 200, answer
    prompts = [scorer.ids_of(query + item) for item in items]
    assert answer["scores"] == [scorer.expected(prompt) for prompt in prompts]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_items_of_a_score_request_share_the_kv_pages_of_the_query(scorer: Scorer) -> None:
    query = ids(512, 2)
    items = [ids(1 + number % 7, 100 + number) for number in range(64)]
    before = scorer.system.metric("worker-0", "sglang:generation_tokens_total")
    status, answer = scorer.post(query=query, items=items)
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 63 * (512 - PAGE)
    assert answer["usage"]["completion_tokens"] == 0
    for number in (0, 31, 63):
        assert answer["scores"][number] == scorer.expected(query + items[number])
    assert scorer.system.metric("worker-0", "sglang:generation_tokens_total") == before, "the worker must sample no token"


def test_prompt_of_a_score_may_fill_the_context(scorer: Scorer) -> None:
    query = ids(CONTEXT - 2, 3)
    status, answer = scorer.post(query=query, items=[[7, 8]])
    assert status == 200, answer
    assert answer["scores"] == [scorer.expected([*query, 7, 8])]
    status, answer = scorer.post(query=query, items=[[7, 8, 9]])
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "items[0]")


def test_abort_frees_the_pages_of_a_score(scorer: Scorer) -> None:
    """The items share no page, so the request computes hundreds of thousands of tokens and still runs at the abort."""
    query, items = ids(900, 4), [[3 + number, *ids(20, number)] for number in range(1024)]
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(scorer.post, query=query, items=items, item_first=True, rid="long")
        wait_until(lambda: scorer.num_used > 0, 60, "the worker to compute the request")
        wait_until(
            lambda: scorer.system.post("/abort_request", {"rid": "long"})[1]["aborted"] > 0, 60, "the abort to find the request"
        )
        status, answer = pending.result(60)
    assert (status, answer["error"]["code"]) == (400, "aborted")
    wait_until(lambda: scorer.num_used == 0, 60, "the pages to be free")
    assert scorer.post(query=[5], items=[[6]])[1]["scores"] == [scorer.expected([5, 6])]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_request_with_max_tokens_0_samples_no_token(scorer: Scorer, stream: bool) -> None:
    """The log probabilities of the prompt equal those of transformers, and the worker samples no token."""
    prompt, labels = ids(40, 5), {"return_logprob": True, "logprob_start_len": 0, "stream": stream}
    before = scorer.system.metric("worker-0", "sglang:generation_tokens_total")
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 0}, **labels}
    request = urllib.request.Request(scorer.system.url + "/generate", json.dumps(body).encode(), JSON)
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read().decode()
    answer = json.loads(text.removeprefix("data: ").split("\n\n")[0])
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"], meta["completion_tokens"]) == ("", [], 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0} and meta["output_token_logprobs"] == []
    with torch.inference_mode():
        values = scorer.model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    expected = [float(values[at, token]) for at, token in enumerate(prompt[1:])]
    assert [value for value, _, _ in meta["input_token_logprobs"][1:]] == pytest.approx(expected, abs=CLOSE * 10)
    assert scorer.system.metric("worker-0", "sglang:generation_tokens_total") == before
