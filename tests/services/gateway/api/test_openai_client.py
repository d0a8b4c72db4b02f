"""Tests of the gateway with the unmodified openai client."""

from __future__ import annotations

import openai
import pytest
from anthropic import Anthropic

from tests.services.gateway.fakes import CONTEXT_LEN, MODEL, chat_text, ids_of
from tests.services.gateway.system import System

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
PROMPT_TOKENS = len(chat_text(MESSAGES))
ANSWER = "Hello, world!"
ANSWER_TOKENS = len(ANSWER) + 1  # characters of ANSWER, and the end-of-sequence token


def test_chat_response_has_an_answer_and_usage(shared: System) -> None:
    answer = shared.openai().chat.completions.create(model=MODEL, messages=MESSAGES)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    assert answer.model == MODEL and answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (PROMPT_TOKENS, ANSWER_TOKENS)
    assert usage.total_tokens == PROMPT_TOKENS + ANSWER_TOKENS
    assert usage.prompt_tokens_details.cached_tokens == 3


def test_chat_stream_equals_the_whole_response(shared: System) -> None:
    chunks = list(shared.openai().chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
    first = chunks[0].choices[0]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None and chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_of_a_stream_is_in_a_last_chunk_without_choices(shared: System) -> None:
    stream = shared.openai().chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (PROMPT_TOKENS, ANSWER_TOKENS)


def test_completion_has_text_and_usage(shared: System) -> None:
    answer = shared.openai().completions.create(model=MODEL, prompt="Once", max_tokens=5)
    assert answer.choices[0].text == "Hello" and answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion" and answer.usage.completion_tokens == 5


def test_completion_has_at_most_16_tokens_by_default(shared: System) -> None:
    shared.openai().completions.create(model=MODEL, prompt="Once")
    assert shared.worker.submits[-1].sampling.max_new_tokens == 16


def test_completion_stream_equals_the_whole_text(shared: System) -> None:
    chunks = list(shared.openai().completions.create(model=MODEL, prompt="Once", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        (ids_of("ab"), ["ab"]),
        ([ids_of("ab"), ids_of("cde")], ["ab", "cde"]),
    ],
    ids=["string", "strings", "ids", "lists of ids"],
)
def test_completion_echoes_every_form_of_prompt(shared: System, prompt: object, texts: list[str]) -> None:
    answer = shared.openai().completions.create(model=MODEL, prompt=prompt, echo=True, max_tokens=5)
    assert [choice.text for choice in answer.choices] == [text + "Hello" for text in texts]
    assert answer.usage.prompt_tokens == sum(map(len, texts))


def test_stream_echoes_the_prompt_once(shared: System) -> None:
    chunks = list(shared.openai().completions.create(model=MODEL, prompt=ids_of("ab"), echo=True, max_tokens=5, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abHello"


def test_completion_returns_n_choices_for_each_prompt(shared: System) -> None:
    shared.worker.answer = lambda submit: f"{len(submit.prompt_ids)}/{submit.sampling.seed}"
    try:
        answer = shared.openai().completions.create(model=MODEL, prompt=["a", "bb"], n=3, seed=40, temperature=0)
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert [choice.text for choice in answer.choices] == ["1/40", "1/41", "1/42", "2/40", "2/41", "2/42"]
        assert answer.usage.prompt_tokens == 3  # each prompt counts once
        assert answer.usage.completion_tokens == 6 * 5
        assert answer.usage.prompt_tokens_details.cached_tokens == 3  # 1 + 2, of the first choice of each prompt
    finally:
        shared.worker.answer = lambda submit: ANSWER


def test_stream_chunks_of_several_choices_have_the_index_of_the_choice(shared: System) -> None:
    shared.worker.answer = lambda submit: f"seed {submit.sampling.seed}" + "." * submit.sampling.seed
    try:
        texts = {0: "", 1: "", 2: ""}
        finished = []
        stream = shared.openai().chat.completions.create(model=MODEL, messages=MESSAGES, n=3, seed=0, stream=True)
        for chunk in stream:
            choice = chunk.choices[0]
            texts[choice.index] += choice.delta.content or ""
            finished += [choice.index] if choice.finish_reason else []
        assert texts == {0: "seed 0", 1: "seed 1.", 2: "seed 2.."}
        assert sorted(finished) == [0, 1, 2]
    finally:
        shared.worker.answer = lambda submit: ANSWER


def test_unset_sampling_fields_stay_unset(shared: System) -> None:
    """Only fields for which the model has a default are set. Another worker can then continue with the same values."""
    shared.openai().chat.completions.create(model=MODEL, messages=MESSAGES)
    sampling = shared.worker.submits[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (1, 1, -1, 0, 1)
    assert sampling.max_new_tokens == CONTEXT_LEN - PROMPT_TOKENS
    for name in ("min_new_tokens", "ignore_eos", "frequency_penalty", "presence_penalty", "stream_interval"):
        assert not sampling.HasField(name), name


def test_client_can_send_fields_of_other_servers(shared: System) -> None:
    answer = shared.openai().chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        reasoning_effort="low",
        stop="world",
        max_tokens=20,
        metadata={"a": "b"},
        prompt_cache_key="c",
        store=True,
        extra_body={"extra_key": "k", "no_stop_trim": True, "session_params": {"id": "s"}, "rid": "mine"},
    )
    submit = shared.worker.submits[-1]
    assert answer.choices[0].message.content == "Hello, world"
    assert (submit.cache_salt, submit.session.session_id, submit.request_id) == ("k", "s", "mine")
    assert b'"reasoning_effort":"low"' in shared.tokenizer.calls[-1].template_kwargs_json
    with pytest.raises(openai.BadRequestError) as error:
        shared.openai().completions.create(model=MODEL, prompt="Hi", extra_body={"custom_logit_processor": "x"})
    assert error.value.param == "custom_logit_processor"


def test_gateway_chooses_a_seed_when_the_temperature_is_above_0(shared: System) -> None:
    """With the seed, another worker continues with the same draws."""
    seeds = set()
    for _ in range(2):
        shared.openai().chat.completions.create(model=MODEL, messages=MESSAGES, n=2)
        seeds |= {submit.sampling.seed for submit in shared.worker.submits[-2:]}
    assert len(seeds) == 4
    shared.openai().chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    assert not shared.worker.submits[-1].sampling.HasField("seed")


def test_models_are_listed_and_retrieved(shared: System) -> None:
    client = shared.openai()
    assert [model.id for model in client.models.list()] == [MODEL]
    theirs = Anthropic(base_url=shared.url(""), api_key="none", max_retries=0).models
    assert [model.id for model in theirs.list()] == [MODEL] and theirs.retrieve(MODEL).display_name == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("another")
    assert error.value.code == "model_not_found"


def test_client_raises_an_exception_for_each_error(shared: System) -> None:
    client = shared.openai()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="another", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt="x" * CONTEXT_LEN)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"


def test_api_keys_are_checked() -> None:
    with System(keys=("first", "second")) as system:
        with pytest.raises(openai.AuthenticationError) as error:
            system.openai(api_key="third").models.list()
        assert error.value.code == "invalid_api_key"
        assert system.get("/v1/models").status_code == 401
        assert [model.id for model in system.openai(api_key="second").models.list()] == [MODEL]
        assert system.get("/health").status_code == 200
