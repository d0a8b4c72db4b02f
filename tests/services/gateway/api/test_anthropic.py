"""Tests of Anthropic's Messages API with its official client: blocks, streams, tools, thinking, token counts and errors."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import anthropic
import orjson
import pytest
from anthropic import Anthropic, DefaultHttpxClient
from jiter import from_json

from tests.services.gateway.fakes import MODEL
from tests.services.gateway.system import System

WEATHER: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
ALL = "<think>Hm.</think>It rains.\n" + CALL
HI: Any = [{"role": "user", "content": "Hi"}]
OMITTED_THINKING: Any = {"thinking": {"type": "adaptive", "display": "omitted"}}
THINKING: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with System(formats=("hermes", "think"), sse_comment_s=0.2) as started:
        yield started


@pytest.fixture
def set_output(system: System) -> Iterator[Any]:
    """Yields a function that sets the model's output."""
    yield lambda text: setattr(system.worker, "answer", lambda submit: text)
    system.worker.answer = lambda submit: "Hello, world!"


@pytest.fixture
def client(system: System) -> Anthropic:
    return client_of(system)


def client_of(system: System, key: str = "none") -> Anthropic:
    return Anthropic(base_url=system.url(""), api_key=key, max_retries=0, http_client=DefaultHttpxClient(verify=False))


def ask(client: Anthropic, **more: Any) -> Any:
    return client.messages.create(**{"model": MODEL, "max_tokens": 400, "messages": HI, **more})


def shown(system: System) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the messages and the template variables of the latest tokenizer call."""
    call = system.tokenizer.calls[-1]
    return orjson.loads(call.messages_json), orjson.loads(call.template_kwargs_json or b"{}")


def plain(message: Any) -> dict[str, Any]:
    """Returns the message without random ids."""
    found = message.to_dict()
    found["content"] = [{name: value for name, value in block.items() if name != "id"} for block in found["content"]]
    return {name: value for name, value in found.items() if name not in ("id", "parsed_output", "stop_details")}


@pytest.mark.by_day(one_in=3, seed=4)
@pytest.mark.parametrize(
    ("text", "more", "kinds", "reason"),
    [
        pytest.param("Hello.", {}, ["text"], "end_turn", id="text"),
        pytest.param(CALL, {}, ["tool_use"], "tool_use", id="call"),
        pytest.param(ALL, THINKING, ["thinking", "text", "tool_use"], "tool_use", id="thinking, text and call"),
        pytest.param(ALL, {}, ["text", "tool_use"], "tool_use", id="thinking not requested"),
        pytest.param(
            ALL,
            OMITTED_THINKING,
            ["thinking", "text", "tool_use"],
            "tool_use",
            id="thinking omitted",
        ),
        pytest.param("one two three", {"stop_sequences": ["two"]}, ["text"], "stop_sequence", id="stop sequence"),
        pytest.param("one two three", {"max_tokens": 5}, ["text"], "max_tokens", id="max_tokens"),
        pytest.param(CALL, {"max_tokens": 60}, ["tool_use"], "max_tokens", id="call cut by max_tokens"),
    ],
)
def test_stream_and_response_have_the_same_content(
    client: Anthropic, set_output: Any, text: str, more: dict[str, Any], kinds: list[str], reason: str
) -> None:
    set_output(text)
    document = ask(client, tools=[WEATHER], **more)
    assert ([block.type for block in document.content], document.stop_reason) == (kinds, reason)
    assert document.stop_sequence == ("two" if reason == "stop_sequence" else None)
    body: Any = {"model": MODEL, "max_tokens": 400, "messages": HI, "tools": [WEATHER], **more}
    with client.messages.stream(**body) as stream:
        for _ in stream:
            pass
        final = stream.get_final_message()
    assert plain(final) == plain(document)
    if kinds[-1] == "tool_use" and reason == "tool_use":
        assert document.content[-1].input == {"city": "Bonn"}
    if "thinking" in kinds:
        hidden = "display" in more["thinking"]
        assert document.content[0].thinking == ("" if hidden else "Hm.") and document.content[0].signature


def test_input_of_a_tool_call_omits_arguments_after_a_json_fault(client: Anthropic, set_output: Any) -> None:
    """The client receives the complete members before the fault, including an integer of 30 digits."""
    arguments = '{"city": "Bonn", "day": 123456789012345678901234567890, "x": nope}'
    set_output(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>')
    document = ask(client, tools=[WEATHER])
    body: Any = {"model": MODEL, "max_tokens": 400, "messages": HI, "tools": [WEATHER]}
    with client.messages.stream(**body) as stream:
        final = stream.get_final_message()
    assert plain(final)["content"] == plain(document)["content"]


def test_usage_reports_the_number_of_cached_tokens(client: Anthropic) -> None:
    usage = ask(client).usage
    assert usage.cache_read_input_tokens == 3 and usage.cache_creation_input_tokens == 0
    counted = client.messages.count_tokens(model=MODEL, messages=HI)
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("empty", ["", []])
def test_chat_template_receives_no_system_message_when_the_system_prompt_is_empty(
    system: System, client: Anthropic, empty: Any
) -> None:
    ask(client, system=empty, messages=[{"role": "user", "content": "Hi"}])
    assert shown(system)[0] == [{"role": "user", "content": "Hi"}]


def test_chat_template_receives_the_history_as_chat_messages(system: System, client: Anthropic) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bonn"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
    thought = [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "redacted_thinking", "data": "y"}]
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [*thought, {"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        {"role": "assistant", "content": "It is"},
    ]
    ask(client, system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}], messages=messages, tools=[WEATHER])
    function = {"name": "weather", "arguments": '{"city":"Bonn"}'}
    calls = [{"id": "toolu_1", "type": "function", "function": function}]
    found, variables = shown(system)
    assert found == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "It is"},
    ]
    assert system.tokenizer.calls[-1].continue_final_message and not system.tokenizer.calls[-1].add_generation_prompt
    assert variables == {"enable_thinking": False, "thinking": False}
    error = {**result, "is_error": True, "content": "none"}
    users: Any = [{"role": "user", "content": content} for content in ([error], "A", "B")]
    ask(client, system="x-anthropic-billing-header: 1\nBe brief.", messages=[*messages[:2], *users], tools=[WEATHER])
    found = shown(system)[0]
    assert [found[0]["content"], found[-2]["content"], found[-1]["content"]] == ["Be brief.", "Error: none", "A\n\nB"]
    ask(client, **THINKING, output_config={"effort": "high"})
    assert shown(system)[1] == {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}


def test_worker_receives_the_tool_choice_and_the_output_format(system: System, client: Anthropic) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        ask(client, tools=[WEATHER], tool_choice=choice)
        assert "weather" in system.worker.submits[-1].sampling.grammar.structural_tag
    ask(client, tools=[WEATHER], tool_choice={"type": "none"})
    assert not system.worker.submits[-1].sampling.HasField("grammar") and not system.tokenizer.calls[-1].tools_json
    ask(
        client,
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
        extra_body={"top_k": 3, "temperature": 0.5},
    )
    sampling = system.worker.submits[-1].sampling
    assert sampling.HasField("grammar") and (sampling.top_k, sampling.temperature) == (3, 0.5)


def test_silent_stream_has_pings(system: System, client: Anthropic, set_output: Any) -> None:
    """A stream also gets pings while the model writes reasoning that the client did not request."""
    system.do(lambda: system.worker.allow(0))
    with client.messages.stream(model=MODEL, max_tokens=400, messages=HI) as stream:
        lines = stream.response.iter_lines()
        assert [next(lines), next(lines)] == ["event: ping", 'data: {"type":"ping"}']
        system.allow(None)
        rest = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    names = [name for name in rest if name != "ping"]
    assert (names[0], names[1], names[-2:]) == ("message_start", "content_block_start", ["message_delta", "message_stop"])
    set_output("<think>" + "Hm. " * 20 + "</think>Hi.")
    system.allow(0)
    over = threading.Event()

    def think() -> None:
        while not over.wait(0.03):
            system.allow(1)

    thinking = threading.Thread(target=think)
    thinking.start()
    try:
        with client.messages.stream(model=MODEL, max_tokens=400, messages=HI) as stream:
            lines = (line.removeprefix("event: ") for line in stream.response.iter_lines() if line.startswith("event: "))
            begun = list(takewhile(lambda name: name != "content_block_start", lines))
    finally:
        over.set()
        thinking.join()
        system.allow(None)
    pings = begun[begun.index("message_start") + 1 :]
    assert len(pings) >= 3 and set(pings) == {"ping"}, "the model writes reasoning that the stream omits"


@pytest.mark.by_day(one_in=3, seed=52)
@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type' 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "input": {}}]}]},
            "messages[0].content[0].name",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "Web search", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "context"),
    ],
)
def test_error_names_the_refused_field(client: Anthropic, body: dict[str, Any], word: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(client, extra_body=body)
    error: Any = refused.value.body
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error" and word in error["error"]["message"]
    assert error["request_id"] == refused.value.request_id == refused.value.response.headers["x-request-id"]


def test_client_raises_the_matching_exception_for_each_error_of_the_messages_api() -> None:
    keys = [{"name": "a", "key": "a", "requests_per_minute": 1}, "b"]
    with System(keys=keys, max_concurrent_requests=1, sse_comment_s=0.1) as system:
        with pytest.raises(anthropic.AuthenticationError):
            ask(client_of(system))
        with pytest.raises(anthropic.NotFoundError) as unknown:
            ask(client_of(system, "b"), model="other")
        assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index, call-overload]
        limited = client_of(system, "a")
        ask(limited)
        with pytest.raises(anthropic.RateLimitError):
            ask(limited)
        system.do(lambda: system.worker.allow(0))
        with client_of(system, "b").messages.stream(model=MODEL, max_tokens=9, messages=HI):
            with pytest.raises(anthropic.APIStatusError) as busy:
                ask(client_of(system, "b"))
            assert busy.value.status_code == 529 and int(busy.value.response.headers["retry-after"]) > 0
            assert busy.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index, call-overload]
            system.allow(None)


def test_input_of_a_tool_call_equals_the_parsed_stream_when_the_output_is_cut(client: Anthropic, set_output: Any) -> None:
    """The client's own parser reads the pieces of the stream, for random arguments and values of max_tokens."""
    rng = random.Random(7)
    for _ in range(60):
        text = json.dumps({"a": _value(rng), "b": _value(rng)}, ensure_ascii=rng.random() < 0.5)
        set_output('<tool_call>\n{"name": "weather", "arguments": ' + text[: rng.randrange(len(text) + 1)])
        asked = {"tools": [WEATHER], "max_tokens": rng.randrange(40, 60)}
        with client.messages.stream(model=MODEL, messages=HI, **asked) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
        document, parsed = ask(client, **asked), from_json("".join(pieces).encode() or b"{}", partial_mode=True)
        assert [block.input for block in document.content if block.type == "tool_use"] in ([parsed], []), text


def _value(rng: random.Random) -> Any:
    text = "".join(rng.choice('ab"\\\té😀/') for _ in range(rng.randrange(6)))
    return rng.choice((rng.randrange(-(10**6), 10**25), rng.random(), True, None, text, [text, 1, {}], {text: {"c": [text]}}))
