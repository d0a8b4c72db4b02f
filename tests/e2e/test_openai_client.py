"""The official OpenAI client: a streamed response has the text of a whole one, and usage counts the output tokens."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.e2e.system import DEMO, System
from tests.night import NIGHTLY

NUM_PROMPTS = 200 if NIGHTLY else 60
WORDS = [
    "naïve",
    "日本語",
    "Ωμέγα",
    "привет",
    "🙂🙃",
    "e\u0301",
    "عربي",
    "plain",
    "words",
    "{json: 1}",
    "\n\n",
    "½",
    "👩‍👩‍👧",
    "ﬀ",
    "\u200b",
]
STOPS = [["3, 4"], ["a-"], ["é"], ["日"], [" 1", "= 4"], ["\n\n"], ["🙂"], ['": "'], [", 5, 6"], ["語", "ω", "p-l"]]


def random_question(rng: random.Random) -> str:
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 6)))
    first = rng.randrange(20)
    return rng.choice(
        [
            f"Repeat: {text}",
            f"Count from {first} to {first + rng.randrange(12)}.",
            f"Spell the word {rng.choice(['lantern', 'garden', 'papel', 'stone'])}.",
            f"Give the JSON for name Ada, age {rng.randrange(90)}.",
            text,
        ]
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


def client_of(system: System) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=120)


def options(rng: random.Random) -> dict[str, Any]:
    return {
        "model": "demo",
        "seed": rng.randrange(2**31),
        "temperature": rng.choice([0, 0.7, 1.0, 1.5]),
        "top_p": rng.choice([1.0, 0.9]),
        "max_tokens": rng.choice([1, 8, 24, 48]),
        "stop": rng.choice([None, *STOPS]),
    }


async def chat_both_ways(client: openai.AsyncOpenAI, rng: random.Random, tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": random_question(rng)}]
    chosen = options(rng)
    extra = {"return_token_ids": True}
    whole = await client.chat.completions.create(messages=messages, extra_body=extra, **chosen)  # type: ignore[arg-type]
    text, chunks = "", []
    stream = await client.chat.completions.create(
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
        **chosen,  # type: ignore[arg-type]
    )
    async for chunk in stream:
        chunks.append(chunk)
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    choice = whole.choices[0]
    assert text == choice.message.content
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == [choice.finish_reason]
    assert whole.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    prompt_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens == len(prompt_ids)
    check_text(choice, whole.usage.completion_tokens, text, chosen, tokenizer)


async def completion_both_ways(client: openai.AsyncOpenAI, rng: random.Random, tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = random_question(rng)
    chosen = options(rng)
    extra = {"return_token_ids": True}
    whole = await client.completions.create(prompt=prompt, extra_body=extra, **chosen)
    text = ""
    async for chunk in await client.completions.create(prompt=prompt, stream=True, **chosen):
        text += "".join(choice.text for choice in chunk.choices)
    assert text == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(tokenizer(prompt).input_ids)
    check_text(whole.choices[0], whole.usage.completion_tokens, text, chosen, tokenizer)


def check_text(
    choice: Any, completion_tokens: int, text: str, chosen: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Checks that the text is the decoded tokens before the stop string, and that usage counts the tokens."""
    ids = choice.token_ids
    assert completion_tokens == len(ids) <= chosen["max_tokens"]
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    stops = chosen["stop"] or []
    assert not any(stop in text for stop in stops)
    if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str):
        assert choice.stop_reason in stops
        assert text == decoded[: decoded.index(choice.stop_reason)]
    else:
        assert text == decoded


async def each_of(system: System, check: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """Runs the check for all prompts and returns their number. Raises the first failure."""
    client = client_of(system)
    limit = asyncio.Semaphore(16)

    async def one(seed: int) -> None:
        async with limit:
            await check(client, random.Random(seed), tokenizer)

    await asyncio.gather(*(one(seed) for seed in range(NUM_PROMPTS)))
    await client.close()
    return NUM_PROMPTS


@pytest.mark.parametrize("check", [chat_both_ways, completion_both_ways])
def test_stream_equals_the_whole_response_and_usage_counts_the_output_tokens(
    exact_system: System, check: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Runs in float32, because in bfloat16, a sampled token can depend on the other requests of a step and on cached prefixes."""
    assert asyncio.run(each_of(exact_system, check, tokenizer)) == NUM_PROMPTS


@pytest.mark.parametrize("question", ["What is 17 + 25?", "Count from 3 to 9.", "Spell the word lantern."])
def test_usage_equals_the_token_count_of_the_returned_text(
    system: System, question: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    client = openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].finish_reason == "stop"
    again = tokenizer(answer.choices[0].message.content, add_special_tokens=False).input_ids
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(again) + 1, "usage must count the text's tokens and the end-of-turn token"


def test_openai_client_gets_the_models_and_several_choices_and_errors(system: System) -> None:
    client = openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["demo"]
    messages: Any = [{"role": "user", "content": "Count from 3 to 9."}]
    answer = client.chat.completions.create(model="demo", messages=messages, n=3, seed=5, temperature=6, max_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    again = client.chat.completions.create(model="demo", messages=messages, n=3, seed=5, temperature=6, max_tokens=12)
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=messages)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="demo", messages=messages, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="demo", prompt="word " * 5000)
    assert long.value.code == "context_length_exceeded"


def test_stop_string_may_be_a_special_token_when_special_tokens_are_not_skipped(system: System) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Count from 3 to 9."}], "temperature": 0}
    shown = {**body, "ignore_eos": True, "skip_special_tokens": False, "stop": "<|im_end|>", "max_tokens": 200}
    status, answer = system.post("/v1/chat/completions", shown)
    assert status == 200, answer
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (
        "3, 4, 5, 6, 7, 8, 9",
        "stop",
        "<|im_end|>",
    )


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_both_names_of_max_tokens_limit_the_output(system: System, field: str, path: str) -> None:
    asked = {"prompt": "Hi"} if path == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    status, answer = system.post(f"/v1/{path}", {"model": "demo", field: 3, "ignore_eos": True, **asked})
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 3
