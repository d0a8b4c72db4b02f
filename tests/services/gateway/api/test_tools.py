"""Tests of chats with tools and reasoning: the grammar that the worker receives, and the output that the client receives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from openai import OpenAI

from rootstock_llm.services.shared import limits
from tests.services.gateway.api.test_sglang import Waiting
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.system import System, chat_body, events, wait_until

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
TWO_CALLS = CALL + '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
# max_tokens is larger than every output here: the fake worker makes one token per character.
TOOLS = {"tools": [WEATHER, CLOCK], "max_tokens": 400}


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with System(formats=("hermes", "think")) as started:
        yield started


@pytest.fixture
def set_output(system: System) -> Iterator[Any]:
    """Yields a function that sets the model's output."""
    yield lambda text: setattr(system.worker, "answer", lambda submit: text)
    system.worker.answer = lambda submit: "Hello, world!"


def client(system: System) -> OpenAI:
    return system.openai()


def streamed_message(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Joins the deltas of a stream. Returns the message without the ids of calls, and its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    reason = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            message["content"] += delta.get("content", "")
            message["reasoning_content"] += delta.get("reasoning_content", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["calls"]) and call["type"] == "function"
                    message["calls"].append([call["function"]["name"], ""])
                message["calls"][call["index"]][1] += call["function"]["arguments"]
    return message, str(reason)


def document_message(document: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the message of a response without the ids of calls, in the form of streamed_message(), and its finish reason."""
    [choice] = document["choices"]
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    assert (message["content"] is None) is (bool(calls) and not message["content"])
    found = {"content": message["content"] or "", "reasoning_content": message.get("reasoning_content", ""), "calls": calls}
    return found, choice["finish_reason"]


@pytest.mark.by_day(one_in=2, seed=10)
@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        pytest.param("Hello.", "Hello.", "", [], id="text"),
        pytest.param(CALL, "", "", [["weather", '{"city": "Bonn"}']], id="call"),
        pytest.param(
            "Let me see.\n" + TWO_CALLS,
            "Let me see.",
            "",
            [["weather", '{"city": "Bonn"}'], ["clock", "{}"]],
            id="text and two calls",
        ),
        pytest.param("<think>\nHm.\n</think>\n\nHello.", "Hello.", "Hm.", [], id="reasoning"),
        pytest.param("<think>Hm.</think>" + CALL, "", "Hm.", [["weather", '{"city": "Bonn"}']], id="reasoning and call"),
        pytest.param(CALL.replace("weather", "unknown") + "\nOh.", "\nOh.", "", [], id="unknown tool"),
        pytest.param("<tool_call>\n{oops", "{oops", "", [], id="malformed call"),
        pytest.param("<think>Hm.\n" + CALL, "", "Hm.", [["weather", '{"city": "Bonn"}']], id="call in unclosed reasoning"),
        pytest.param(f"<think>{CALL} or not", "", f"{CALL} or not", [], id="call quoted in reasoning"),
        pytest.param(CALL.replace('{"city": "Bonn"}', ""), "", "", [["weather", "{}"]], id="call without arguments"),
        pytest.param(CALL.replace('"Bonn"', '"a\n",'), "", "", [["weather", r'{"city": "a\n"}']], id="damaged arguments"),
        # The last 16 characters are the quote of "Bonn", two braces and the end mark. The parser closes the JSON.
        pytest.param(CALL[:-16], "", "", [["weather", '{"city": "Bonn"}']], id="unfinished call"),
    ],
)
def test_stream_and_whole_response_have_the_same_message(
    system: System, set_output: Any, text: str, content: str, reasoning: str, calls: list[list[str]]
) -> None:
    set_output(text)
    expected = {"content": content, "reasoning_content": reasoning, "calls": calls}
    reason = "tool_calls" if calls else "stop"
    found = document_message(system.chat(**TOOLS).json())
    # Line ends between content and a call are not compared.
    found[0]["content"], expected["content"] = found[0]["content"].strip(), content.strip()
    assert found == (expected, reason)
    streamed = streamed_message(events(system.chat(stream=True, **TOOLS).text))
    streamed[0]["content"] = streamed[0]["content"].strip()
    assert streamed == (expected, reason)


# The arguments are the characters from 30 to 14 before the end of CALL. With each `size`, the output ends within the arguments.
@pytest.mark.parametrize("size", range(len(CALL) - 30, len(CALL) - 15, 3))
def test_tool_call_is_cut_off_when_the_output_reaches_max_tokens(system: System, set_output: Any, size: int) -> None:
    set_output(CALL)
    body = {**TOOLS, "max_tokens": size}
    message, reason = document_message(system.chat(**body).json())
    assert reason == "length" and '{"city": "Bonn"}'.startswith(message["calls"][0][1]) and message["content"] == ""
    assert streamed_message(events(system.chat(stream=True, **body).text)) == (message, reason)


def test_stream_with_tool_calls_has_all_logprobs_and_all_token_ids(system: System, set_output: Any) -> None:
    set_output("So:\n" + TWO_CALLS)
    more = {"logprobs": True, "return_token_ids": True, **TOOLS}
    document = system.chat(**more).json()["choices"][0]
    choices = [choice for chunk in events(system.chat(stream=True, **more).text) for choice in chunk["choices"]]
    pieces = [piece for choice in choices if choice["logprobs"] for piece in choice["logprobs"]["content"]]
    assert pieces == document["logprobs"]["content"]
    assert [token for choice in choices for token in choice.get("token_ids", ())] == document["token_ids"]


def test_openai_client_collects_the_tool_calls_of_a_stream(system: System, set_output: Any) -> None:
    set_output(TWO_CALLS)
    messages: Any = [{"role": "user", "content": "Hi"}]
    with client(system).chat.completions.stream(model=MODEL, messages=messages, tools=[STRICT, CLOCK]) as stream:
        for _ in stream:
            pass
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert calls is not None and [call.function.name for call in calls] == ["weather", "clock"]
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize(
    ("fields", "names", "forced"),
    [
        pytest.param({"tools": [WEATHER, CLOCK]}, None, False, id="auto"),
        pytest.param({"tools": [STRICT, CLOCK]}, {"weather", "clock"}, False, id="strict"),
        pytest.param({"tools": [WEATHER, CLOCK], "tool_choice": "required"}, {"weather", "clock"}, True, id="required"),
        pytest.param(
            {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}}},
            {"clock"},
            True,
            id="named",
        ),
        pytest.param(
            {
                "tools": [WEATHER, CLOCK],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}},
            },
            {"weather"},
            True,
            id="allowed",
        ),
        pytest.param({"tools": [STRICT], "tool_choice": "none"}, None, False, id="none"),
    ],
)
def test_worker_receives_a_grammar_when_a_tool_is_strict_or_a_call_is_forced(
    system: System, fields: dict[str, Any], names: set[str] | None, forced: bool
) -> None:
    assert system.chat(**fields).status_code == 200
    grammar = system.worker.submits[-1].sampling.grammar
    assert bool(grammar.structural_tag) is (names is not None)
    if names is not None:
        text = grammar.structural_tag
        assert {name for name in ("weather", "clock") if f'\\"{name}\\"' in text} == names
        assert ("triggered_tags" in text) is not forced and "</think>" in text


def test_response_has_one_call_when_parallel_tool_calls_is_false(system: System, set_output: Any) -> None:
    set_output(TWO_CALLS)
    found, reason = document_message(system.chat(parallel_tool_calls=False, **TOOLS).json())
    assert found["calls"] == [["weather", '{"city": "Bonn"}']] and reason == "tool_calls"


def test_metric_counts_dropped_tool_calls(system: System, set_output: Any) -> None:
    def dropped() -> float:
        return system.metric("rootstock_gateway_tool_calls_dropped_total")

    set_output(TWO_CALLS.replace("weather", "wether"))
    before = dropped()
    message, _ = document_message(system.chat(**TOOLS).json())
    assert message["calls"] == [["clock", "{}"]], "only the call of the unknown tool is dropped"
    assert dropped() == before + 1


def test_forced_calls_use_the_fallback_format_when_the_model_has_no_tool_format(shared: System) -> None:
    shared.worker.answer = lambda submit: CALL
    try:
        found, _ = document_message(shared.chat(tool_choice="required", **TOOLS).json())
        plain, _ = document_message(shared.chat(**TOOLS).json())
    finally:
        shared.worker.answer = lambda submit: "Hello, world!"
    assert found["calls"] == [["weather", '{"city": "Bonn"}']]
    assert plain["content"] == CALL and not plain["calls"]


@pytest.mark.parametrize(
    "field", [{"response_format": {"type": "json_object"}}, {"guided_regex": "a+"}, {"ebnf": 'root ::= "a"'}]
)
def test_constraint_starts_after_the_reasoning(system: System, field: dict[str, Any]) -> None:
    assert system.chat(**field).status_code == 200
    assert "</think>" in system.worker.submits[-1].sampling.grammar.structural_tag
    assert system.chat(separate_reasoning=False, **field).status_code == 200
    assert not system.worker.submits[-1].sampling.grammar.structural_tag


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMED_SCHEMA = {"name": "answer", "schema": SCHEMA}
FLAT = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
CUSTOM = {"name": "weather", "input_schema": SCHEMA}
FORCED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # path, body with a required call, text format
    "chat": (
        "/v1/chat/completions",
        chat_body(tools=[WEATHER], tool_choice="required"),
        {"response_format": {"type": "json_schema", "json_schema": NAMED_SCHEMA}},
    ),
    "responses": (
        "/v1/responses",
        {"input": "Hi", "tools": [FLAT], "tool_choice": {"type": "function", "name": "weather"}},
        {"text": {"format": {"type": "json_schema", **NAMED_SCHEMA}}},
    ),
    "messages": (
        "/v1/messages",
        chat_body(max_tokens=400, tools=[CUSTOM], tool_choice={"type": "any"}),
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
}


@pytest.mark.parametrize(("path", "body", "text_format"), FORCED.values(), ids=FORCED.keys())
def test_worker_receives_the_grammar_of_the_calls_when_a_request_with_a_text_format_requires_a_call(
    system: System, set_output: Any, path: str, body: dict[str, Any], text_format: dict[str, Any]
) -> None:
    """The Agents SDK sends both for an agent with an output type and a required tool; instructor does in its Responses mode."""
    set_output(CALL)
    answers = [system.post(path, {"model": MODEL, **body, **fields}) for fields in ({}, text_format)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[-1].text
    plain, formatted = (submit.sampling.grammar for submit in system.worker.submits[-2:])
    assert formatted == plain and plain.structural_tag


@pytest.mark.parametrize(
    "field", [{"guided_regex": "a+"}, {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}}]
)
def test_required_call_is_refused_when_the_constraint_is_no_text_format(system: System, field: dict[str, Any]) -> None:
    error = system.chat(tool_choice="required", **TOOLS, **field)
    assert error.status_code == 400 and error.json()["error"]["param"] == next(iter(field))


def test_content_includes_reasoning_when_not_separated(system: System, set_output: Any) -> None:
    set_output("<think>Hm.</think>Hello.")
    found, _ = document_message(system.chat(separate_reasoning=False).json())
    assert found["content"] == "<think>Hm.</think>Hello." and not found["reasoning_content"]


def test_detokenizer_keeps_the_tool_call_tokens_when_the_request_has_tools(system: System) -> None:
    for skips in (True, False):
        system.chat(skip_special_tokens=skips, **TOOLS)
        opened = [opened for batch in system.detokenizers[0].servicer.batches for opened in batch.opens][-1]
        assert set(opened.kept_tokens) >= {"<tool_call>", "</tool_call>", "<think>", "</think>"}
        assert opened.skip_special_tokens is skips
    system.chat()
    assert (
        "<tool_call>"
        not in [opened for batch in system.detokenizers[0].servicer.batches for opened in batch.opens][-1].kept_tokens
    )


def test_reasoning_tokens_are_counted() -> None:
    """The gateway counts the tokens from the opening to the closing mark of reasoning, including both marks.

    The marks are "(" and ")" here. The end-of-sequence token counts if it ends the reasoning.
    """
    with System(formats=("", "think"), reasoning_marks=(ord("("), ord(")"))) as system:
        for text, tokens in (
            ("(Hm.)Hello.", 5),  # the marks count
            ("Hello (you).", 0),  # reasoning is only at the beginning
            ("(Hm", 4),  # "(", "H", "m" and the end-of-sequence token
        ):
            system.worker.answer = lambda submit, text=text: text  # type: ignore[misc]
            usage = system.chat().json()["usage"]
            assert usage["completion_tokens_details"] == {"reasoning_tokens": tokens}
        chunks = events(system.chat(stream=True, stream_options={"include_usage": True}, n=2).text)
        assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}, (
            "each of the 2 choices has 4 reasoning tokens"
        )


def test_number_of_tools_and_length_of_a_tool_name_are_limited(system: System) -> None:
    tools = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(limits.MAX_TOOLS)]
    assert system.chat(tools=tools).status_code == 200
    error = system.chat(tools=[*tools, CLOCK])
    assert error.status_code == 400 and error.json()["error"]["param"] == "tools"
    for size, status in ((limits.MAX_TOOL_NAME_CHARS, 200), (limits.MAX_TOOL_NAME_CHARS + 1, 400)):
        assert system.chat(tools=[{"type": "function", "function": {"name": "f" * size}}]).status_code == status


def test_tool_calls_beyond_the_maximum_number_are_dropped(
    system: System, set_output: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CALLS", 1)
    set_output(TWO_CALLS)
    assert len(document_message(system.chat(**TOOLS).json())[0]["calls"]) == 1


def test_tokenizer_receives_the_tools(system: System) -> None:
    body = chat_body(messages=[{"role": "user", "content": "Hi"}])
    system.post("/v1/chat/completions", {**body, "model": MODEL, "tools": [CLOCK]})
    assert orjson.loads(system.tokenizer.calls[-1].tools_json) == [CLOCK]


def first_call(path: str, result: dict[str, Any]) -> tuple[str, Any]:
    """Returns how a whole response ended, and the arguments or the input of its first tool call."""
    if path == "/v1/messages":
        (block,) = [block for block in result["content"] if block["type"] == "tool_use"]
        return result["stop_reason"], block["input"]
    if path == "/v1/responses":
        (item,) = [item for item in result["output"] if item["type"] == "function_call"]
        return item["status"], item["arguments"]
    choice = result["choices"][0]
    return choice["finish_reason"], choice["message"]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "Hi"}],
                "max_tokens": 500,
                "tools": [{"name": "write", "input_schema": {"type": "object"}}],
            },
            ("max_tokens", {"path": "a"}),
        ),
        (
            "/v1/responses",
            {"input": "Hi", "tools": [{"type": "function", "name": "write", "parameters": {"type": "object"}}]},
            ("incomplete", '{"path": "a", "text": "line 1'),
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "Hi"}],
                "tools": [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}],
            },
            ("abort", '{"path": "a", "text": "line 1'),
        ),
    ],
)
def test_tool_call_of_an_aborted_output_stays_incomplete(path: str, body: dict[str, Any], expected: tuple[str, Any]) -> None:
    output = '<tool_call>\n{"name": "write", "arguments": {"path": "a", "text": "line 1 and more"}}\n</tool_call>'
    cut = output.index("line 1") + len("line 1")

    def set_up(workers: list[Any]) -> None:
        for worker in workers:
            worker.answer, worker.steps_left = (lambda submit: output), cut

    with System(formats=("hermes", ""), configure=set_up) as system:
        waiting = Waiting(system, path, {**body, "model": MODEL}, {"x-request-id": "r1"})
        wait_until(lambda: system.has_tokens(cut), "the tokens before the cut")
        assert system.post("/abort_request", {"rid": "r1"}).json()["aborted"] == 1
        assert first_call(path, waiting.result().json()) == expected
