"""Log probabilities, seeds, embeddings and sampling parameters, through OpenAI's client and the whole system."""

from __future__ import annotations

import asyncio
import base64
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from tests.e2e.system import DEMO, System

COUNT: Any = [{"role": "user", "content": "Count from 3 to 9."}]
# Largest difference of log probabilities. In float32, cached prefixes and other requests of a step change the last digits.
TOLERANCE = 2e-4
BATCH = 16


@pytest.fixture(scope="module")
def system(exact_system: System) -> System:
    return exact_system


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


class TestLogprobs:
    @pytest.mark.by_day(one_in=2, seed=2)
    @pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 5}], ids=["greedy", "sampled"])
    def test_streamed_and_whole_chat_responses_have_equal_logprobs(self, client: openai.OpenAI, sampling: dict[str, Any]) -> None:
        messages = [{"role": "user", "content": "Repeat: naïve 日本語 🙂"}]
        options = {"model": "demo", "messages": messages, "logprobs": True, "top_logprobs": 4, "max_tokens": 40, **sampling}
        (whole,) = client.chat.completions.create(**options).choices
        chunks = [c for chunk in client.chat.completions.create(stream=True, **options) for c in chunk.choices]
        pieces = [entry for choice in chunks if choice.logprobs for entry in choice.logprobs.content or ()]
        same_entries(pieces, whole.logprobs.content)
        assert "".join(choice.delta.content or "" for choice in chunks) == whole.message.content

    def test_chat_logprobs_match_the_text(self, client: openai.OpenAI) -> None:
        messages: Any = [{"role": "user", "content": "Repeat: naïve 日本語 🙂"}]
        answer: Any = client.chat.completions.create(
            model="demo", messages=messages, temperature=0, logprobs=True, top_logprobs=3, max_tokens=40
        )
        (choice,) = answer.choices
        entries = choice.logprobs.content
        assert answer.usage is not None and len(entries) == answer.usage.completion_tokens
        assert b"".join(bytes(entry.bytes or ()) for entry in entries[:-1]).decode() == choice.message.content
        for entry in entries:
            likeliest = [other.logprob for other in entry.top_logprobs]
            assert len(likeliest) == 3 and likeliest == sorted(likeliest, reverse=True)
            assert entry.logprob == likeliest[0] <= 0, "a greedy token must have the largest log probability"
            assert sum(map(math.exp, likeliest)) <= 1 + 1e-4

    def test_streamed_and_whole_completion_responses_have_equal_logprobs(self, client: openai.OpenAI) -> None:
        options: dict[str, Any] = {
            "model": "demo",
            "prompt": "Count from 3",
            "logprobs": 3,
            "max_tokens": 24,
            "temperature": 1,
            "seed": 3,
        }
        for echo in (False, True):
            whole = client.completions.create(echo=echo, **options).choices[0]
            chunks = [c for chunk in client.completions.create(echo=echo, stream=True, **options) for c in chunk.choices]
            parts = [choice.logprobs for choice in chunks if choice.logprobs]
            assert list(itertools.chain(*(part.tokens for part in parts))) == whole.logprobs.tokens
            assert list(itertools.chain(*(part.text_offset for part in parts))) == whole.logprobs.text_offset
            joined = [value for part in parts for value in part.token_logprobs]
            assert [v is None for v in joined] == [v is None for v in whole.logprobs.token_logprobs]
            close([v or 0.0 for v in joined], [v or 0.0 for v in whole.logprobs.token_logprobs])
            assert "".join(choice.text for choice in chunks) == whole.text
            assert whole.text.startswith("Count from 3") is echo

    def test_echoed_tokens_have_the_same_logprobs_as_sampled_tokens(self, client: openai.OpenAI) -> None:
        """Compares the log probabilities of sampled tokens with those of the same tokens in a prompt."""
        extra = {"return_token_ids": True, "ignore_eos": True}
        first: Any = client.completions.create(
            model="demo", prompt="Count from 3", logprobs=2, max_tokens=40, temperature=0, extra_body=extra
        )
        ids = [*first.choices[0].prompt_token_ids, *first.choices[0].token_ids]
        again: Any = client.completions.create(model="demo", prompt=ids, logprobs=2, echo=True, max_tokens=1, temperature=0)
        echoed = again.choices[0].logprobs
        assert echoed.token_logprobs[0] is None
        close(echoed.token_logprobs[len(ids) - 40 : len(ids)], first.choices[0].logprobs.token_logprobs)

    def test_prompt_logprobs_equal_the_logprobs_of_transformers(self, client: openai.OpenAI) -> None:
        ids = [int(x) for x in np.random.default_rng(3).integers(4, 1200, 300)]
        answer: Any = client.completions.create(
            model="demo",
            prompt=ids,
            logprobs=2,
            echo=True,
            max_tokens=1,
            temperature=0,
            extra_body={"logprob_token_ids": [7, 900]},
        )
        torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
        chosen = [float(expected[i, token]) for i, token in enumerate(ids[1:])]
        logprobs = answer.choices[0].logprobs.token_logprobs
        assert logprobs[0] is None and len(logprobs) == len(ids) + 1
        close(logprobs[1 : len(ids)], chosen)


def same_entries(got: list[Any], expected: list[Any]) -> None:
    """Checks that two lists of chat log probabilities agree, including the most likely tokens."""
    flat = [[entry, *entry.top_logprobs] for entry in got]
    wanted = [[entry, *entry.top_logprobs] for entry in expected]
    assert [[x.token for x in row] for row in flat] == [[x.token for x in row] for row in wanted]
    assert [[x.bytes for x in row] for row in flat] == [[x.bytes for x in row] for row in wanted]
    close([x.logprob for row in flat for x in row], [x.logprob for row in wanted for x in row])


def close(got: list[Any], expected: list[Any]) -> None:
    np.testing.assert_allclose(np.array(got, float), np.array(expected, float), atol=TOLERANCE)


class TestSeeds:
    def test_seeded_text_is_the_same_alone_and_batched_and_with_a_cached_prefix(self, system: System) -> None:
        before = {"role": "system", "content": "stone garden " * 9}
        requests = [
            {"messages": [before, {"role": "user", "content": f"Count from {index} to {index + 9}."}], "seed": 100 + index}
            for index in range(BATCH)
        ]
        together = [asyncio.run(sampled(system, requests, "batch")) for _ in range(2)]
        alone = [[asyncio.run(sampled(system, [request], "alone"))[0] for request in requests] for _ in range(2)]
        texts = [[text for text, _ in answers] for answers in (*together, *alone)]
        assert texts == [texts[0]] * 4
        assert len(set(texts[0])) == BATCH, "different seeds and prompts must give different texts"
        assert all(cached == 0 for _, cached in alone[0][:1]), "the first request with a cache salt must have no cached prefix"
        assert all(cached >= 16 for answers in (together[1], alone[1]) for _, cached in answers), (
            "repeated requests must have a cached prefix"
        )

    def test_choice_i_samples_with_seed_plus_i(self, client: openai.OpenAI) -> None:
        options: dict[str, Any] = {"model": "demo", "messages": COUNT, "temperature": 1.5, "max_tokens": 24}
        several = client.chat.completions.create(n=4, seed=50, **options).choices
        single = [client.chat.completions.create(seed=50 + i, **options).choices[0].message.content for i in range(4)]
        assert [choice.message.content for choice in several] == single

    def test_texts_differ_without_a_seed(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(model="demo", prompt="x", n=8, temperature=5, max_tokens=24)
        assert len({choice.text for choice in answer.choices}) == 8


async def sampled(system: System, requests: list[dict[str, Any]], salt: str) -> list[tuple[str, int]]:
    """Sends all requests at once and returns the text and the number of cached tokens of each."""
    async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        extra = {"cache_salt": salt, "ignore_eos": True}
        calls = [
            client.chat.completions.create(model="demo", temperature=1, max_tokens=32, extra_body=extra, **request)
            for request in requests
        ]
        answers = await asyncio.gather(*calls)
        return [(str(a.choices[0].message.content), a.usage.prompt_tokens_details.cached_tokens) for a in answers]


class TestEmbeddings:
    TEXTS = ("Count from 3 to 9.", "naïve 日本語", "x", "stone garden " * 40)

    def vectors(self, client: openai.OpenAI, texts: Any, **options: Any) -> np.ndarray[Any, Any]:
        answer = client.embeddings.create(model="demo", input=texts, **options)
        assert [item.index for item in answer.data] == list(range(len(answer.data)))
        return np.array([item.embedding for item in answer.data])

    def test_embedding_batch_equals_single_embeddings(self, client: openai.OpenAI, tokenizer: PreTrainedTokenizerBase) -> None:
        batch = self.vectors(client, list(self.TEXTS))
        single = np.concatenate([self.vectors(client, text) for text in self.TEXTS])
        ids = self.vectors(client, [tokenizer(text).input_ids for text in self.TEXTS])
        np.testing.assert_allclose(batch, single, atol=1e-5)
        np.testing.assert_allclose(batch, ids, atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(batch, axis=1), 1, atol=1e-5)
        assert np.linalg.norm(batch[0] - batch[1]) > 0.1

    def test_dimensions_field_gives_a_normalized_vector_of_the_first_values(self, client: openai.OpenAI) -> None:
        whole, cut = (self.vectors(client, list(self.TEXTS), **options) for options in ({}, {"dimensions": 8}))
        assert cut.shape == (len(self.TEXTS), 8)
        expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
        np.testing.assert_allclose(cut, expected, atol=1e-5)
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            self.vectors(client, "x", dimensions=10_000)

    def test_base64_embeddings_equal_floats(self, system: System) -> None:
        body = {"model": "demo", "input": list(self.TEXTS)}
        _, floats = system.post("/v1/embeddings", body)
        _, packed = system.post("/v1/embeddings", {**body, "encoding_format": "base64"})
        decoded = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in packed["data"]]
        np.testing.assert_allclose(decoded, [item["embedding"] for item in floats["data"]], atol=1e-6)
        assert packed["usage"] == floats["usage"]

    def test_encode_endpoint_returns_the_same_vector_as_the_embeddings_endpoint(
        self, system: System, client: openai.OpenAI
    ) -> None:
        status, answer = system.post("/encode", {"text": self.TEXTS[0]})
        assert status == 200
        np.testing.assert_allclose(answer["embedding"], self.vectors(client, self.TEXTS[0])[0], atol=1e-5)

    def test_embeddings_equal_the_last_hidden_states_of_transformers(
        self, client: openai.OpenAI, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).model
        torch.set_num_threads(1)
        with torch.no_grad():
            states = [model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0, -1] for text in self.TEXTS]
        expected = np.array([(state / state.norm()).numpy() for state in states])
        np.testing.assert_allclose(self.vectors(client, list(self.TEXTS)), expected, atol=1e-5)


def tokens(client: openai.OpenAI, extra: dict[str, Any] | None = None, **options: Any) -> list[int]:
    """Returns the token ids of a completion, which is greedy unless the options set a temperature."""
    body = {"return_token_ids": True, **(extra or {})}
    values: dict[str, Any] = {"temperature": 0, "max_tokens": 16, **options}
    answer = client.chat.completions.create(model="demo", messages=COUNT, extra_body=body, **values)
    return list(answer.choices[0].token_ids)


@pytest.fixture(scope="module")
def ids(client: openai.OpenAI) -> list[int]:
    """Token ids that the model outputs greedily without a logit bias."""
    return tokens(client)


class TestSteering:
    @pytest.mark.by_day(one_in=2)
    @pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 1}], ids=["greedy", "sampled"])
    def test_allowed_token_ids_limit_the_output(self, client: openai.OpenAI, ids: list[int], sampling: dict[str, Any]) -> None:
        allowed = [ids[0], 70, 71]
        assert set(tokens(client, {"allowed_token_ids": allowed}, **sampling)) <= set(allowed)

    def test_banned_token_ids_are_not_sampled(self, client: openai.OpenAI, ids: list[int]) -> None:
        banned = tokens(client, {"banned_token_ids": ids})
        assert len(banned) == 16 and not set(ids) & set(banned)

    def test_logit_bias_forces_and_suppresses_tokens(self, client: openai.OpenAI, ids: list[int]) -> None:
        assert tokens(client, logit_bias={"77": 100}) == [77] * 16
        assert ids[0] not in tokens(client, logit_bias={str(ids[0]): -100})

    def test_stop_regex_ends_the_text_after_the_match(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model="demo", messages=COUNT, temperature=0, extra_body={"stop_regex": ["[q-z]{9}", r"\d, 5"]}
        )
        (choice,) = answer.choices
        assert choice.message.content == "3, 4, 5" and choice.finish_reason == "stop"
        assert choice.stop_reason == r"\d, 5"  # type: ignore[attr-defined]

    def test_min_tokens_suppresses_the_end_of_sequence(self, client: openai.OpenAI, ids: list[int]) -> None:
        full = tokens(client, max_tokens=60)
        assert len(full) < 60, "without min_tokens, the output must end by itself"
        longer = tokens(client, {"min_tokens": len(full) + 4}, max_tokens=60)
        assert len(longer) >= len(full) + 4 and longer[: len(full) - 1] == full[:-1]

    def test_penalties_reduce_repetition(self, client: openai.OpenAI) -> None:
        """Compares the outputs of a prompt with repeated words, with and without a penalty."""
        options: dict[str, Any] = {"model": "demo", "prompt": "coral, coral, coral,", "max_tokens": 40, "temperature": 0}
        texts = [
            client.completions.create(**options, extra_body=extra).choices[0].text
            for extra in ({}, {"frequency_penalty": 2}, {"dry_multiplier": 20, "dry_allowed_length": 1})
        ]
        plain, penalized, dry = (text.count("coral") for text in texts)
        assert plain > max(penalized, dry)


def test_health_generate_computes_a_token_only_when_the_worker_is_idle(system: System) -> None:
    made = [system.metric("worker-0", "sglang:num_requests_total")]
    for idle_s in (2.5, 0):  # the gateway probes only a worker that has sent nothing for 2 s
        time.sleep(idle_s)
        assert httpx.get(f"{system.url}/health_generate", timeout=60).status_code == 200
        made.append(system.metric("worker-0", "sglang:num_requests_total"))
    assert made == [made[0], made[0] + 1, made[0] + 1]


def test_metrics_have_no_created_series(system: System) -> None:
    for name, part in system.parts.items():
        if part.metrics_url:
            text = httpx.get(part.metrics_url).text
            assert "# TYPE" in text and "_created" not in text, name
