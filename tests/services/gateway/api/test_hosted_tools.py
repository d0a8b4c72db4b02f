"""Tests that hosted tools in a request are omitted and named in a header, or refused if the setting forbids the omission."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from rootstock_llm.services.gateway.generation.origin import Origin
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.system import System
from tests.services.redis_server import RedisServer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HEADER = "x-rootstock-omitted-tools"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USER = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": USER},
    RESPONSES: {"model": MODEL, "input": "Hi"},
    MESSAGES: {"model": MODEL, "messages": USER, "max_tokens": 100},
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    CHAT: {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    RESPONSES: {"type": "function", "name": "weather", "parameters": SCHEMA},
    MESSAGES: {"name": "weather", "input_schema": SCHEMA},
}
# By path: hosted tools of the API, and the value of HEADER when they are omitted.
HOSTED: dict[str, tuple[list[dict[str, Any]], str]] = {
    CHAT: (
        [{"type": "custom", "custom": {"name": "apply_patch"}}, {"type": "web_search"}],
        "custom:apply_patch, web_search",
    ),
    RESPONSES: (
        [
            {"type": "web_search", "external_web_access": True},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
            {"type": "local_shell"},
            {"type": "image_generation", "output_format": "png"},
            {"type": "mcp", "server_label": "files", "server_url": "https://files.test"},
            {"type": "web_search"},
        ],
        "web_search, custom:apply_patch, local_shell, image_generation, mcp:files",
    ),
    MESSAGES: (
        [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}],
        "web_search_20250305, bash_20250124",
    ),
}
# Tool choices that force a call of an omitted tool
FORCED: list[tuple[str, Any]] = [
    (CHAT, {"type": "custom", "custom": {"name": "apply_patch"}}),
    (CHAT, {"type": "function", "function": {"name": "apply_patch"}}),
    (RESPONSES, {"type": "web_search"}),
    (RESPONSES, {"type": "custom", "name": "apply_patch"}),
    (RESPONSES, {"type": "mcp", "server_label": "files"}),
    (RESPONSES, {"type": "function", "name": "apply_patch"}),
    (RESPONSES, {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}, {"type": "local_shell"}]}),
    (MESSAGES, {"type": "tool", "name": "web_search"}),
]
REQUIRED = {CHAT: "required", RESPONSES: "required", MESSAGES: {"type": "any"}}


@pytest.fixture(scope="module")
def system(store: RedisServer) -> Iterator[System]:
    with System(formats=("hermes", ""), state_redis_url=store.url) as started:
        yield started


@pytest.fixture(scope="module")
def strict() -> Iterator[System]:
    with System(omit_hosted_tools=False) as started:
        yield started


def ask(system: System, path: str, tools: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    return system.post(path, {**BODIES[path], "tools": tools, **fields})


def tools_of_template(system: System) -> list[str]:
    """Returns the names of the tools in the latest call of the chat template."""
    tools = system.tokenizer.calls[-1].tools_json
    return [tool["function"]["name"] for tool in orjson.loads(tools)] if tools else []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", BODIES)
def test_hosted_tools_are_omitted_and_named_in_a_header(system: System, path: str, stream: bool) -> None:
    tools, named = HOSTED[path]
    answer = ask(system, path, [tools[0], FUNCTIONS[path], *tools[1:]], stream=stream)
    assert (answer.status_code, answer.headers[HEADER]) == (200, named), answer.text
    assert tools_of_template(system) == ["weather"]


@pytest.mark.parametrize("path", BODIES)
def test_request_is_served_without_tools_when_all_are_hosted(system: System, path: str) -> None:
    tools, named = HOSTED[path]
    answer = ask(system, path, tools)
    assert (answer.status_code, answer.headers[HEADER]) == (200, named), answer.text
    assert tools_of_template(system) == []


@pytest.mark.parametrize("path", BODIES)
def test_header_with_omitted_tools_is_absent_when_no_tool_is_hosted(system: System, path: str) -> None:
    assert HEADER not in ask(system, path, [FUNCTIONS[path]]).headers


def test_response_lists_the_served_tools(system: System) -> None:
    tools, _ = HOSTED[RESPONSES]
    answer = ask(system, RESPONSES, [tools[0], FUNCTIONS[RESPONSES], *tools[1:]]).json()
    assert [tool["name"] for tool in answer["tools"]] == ["weather"]
    streamed = ask(system, RESPONSES, [*tools, FUNCTIONS[RESPONSES]], stream=True).text
    last = orjson.loads(streamed.strip().split("data: ")[-1])
    assert [tool["name"] for tool in last["response"]["tools"]] == ["weather"]
    assert ask(system, RESPONSES, tools).json()["tools"] == []


def test_allowed_tools_of_the_tool_choice_keep_only_functions(system: System) -> None:
    tools = [*HOSTED[RESPONSES][0], FUNCTIONS[RESPONSES]]
    allowed = [{"type": "web_search"}, {"type": "function", "name": "weather"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    assert ask(system, RESPONSES, tools, tool_choice=choice).json()["tool_choice"] == {**choice, "tools": allowed[1:]}
    hosted = {"type": "allowed_tools", "mode": "auto", "tools": allowed[:1]}
    assert ask(system, RESPONSES, tools, tool_choice=hosted).json()["tool_choice"] == "none"


@pytest.mark.parametrize(("path", "choice"), FORCED)
def test_tool_choice_is_refused_when_an_omitted_tool_is_forced(system: System, path: str, choice: Any) -> None:
    answer = ask(system, path, [*HOSTED[path][0], FUNCTIONS[path]], tool_choice=choice)
    assert answer.status_code == 400
    assert "tool_choice" in answer.json()["error"]["message"] and "cannot run" in answer.json()["error"]["message"]
    assert HEADER not in answer.headers


@pytest.mark.parametrize("path", BODIES)
def test_required_tool_choice_is_refused_when_all_tools_are_hosted(system: System, path: str) -> None:
    answer = ask(system, path, HOSTED[path][0], tool_choice=REQUIRED[path])
    assert answer.status_code == 400 and "cannot run any of the 'tools'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_model_calls_a_function_when_the_tool_choice_is_required(system: System, path: str) -> None:
    system.worker.answer = lambda submit: '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    answer = ask(system, path, [*HOSTED[path][0], FUNCTIONS[path]], tool_choice=REQUIRED[path])
    system.worker.answer = lambda submit: "Hello, world!"
    assert answer.status_code == 200 and "Bonn" in answer.text
    assert system.worker.submits[-1].sampling.HasField("grammar")


@pytest.mark.parametrize("path", BODIES)
def test_index_of_a_bad_function_in_an_error_counts_the_omitted_hosted_tools(system: System, path: str) -> None:
    broken = {CHAT: {"type": "function", "function": {"name": "a b"}}, RESPONSES: {"type": "function", "name": "a b"}}
    answer = ask(system, path, [HOSTED[path][0][0], broken.get(path, {"name": "a b", "input_schema": SCHEMA})])
    assert answer.status_code == 400 and "tools[1]" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_hosted_tools_are_refused_when_the_setting_forbids_omission(strict: System, path: str) -> None:
    answer = ask(strict, path, [FUNCTIONS[path], HOSTED[path][0][0]])
    assert answer.status_code == 400 and "tools[1].type" in answer.json()["error"]["message"]


def test_web_search_options_are_omitted_only_from_chats(system: System, strict: System) -> None:
    wanted = {"web_search_options": {"search_context_size": "low"}}
    answer = system.post(CHAT, {**BODIES[CHAT], **wanted})
    assert (answer.status_code, answer.headers[HEADER]) == (200, "web_search_options")
    assert system.post("/v1/completions", {"model": MODEL, "prompt": "Hi", **wanted}).status_code == 400
    assert strict.post(CHAT, {**BODIES[CHAT], **wanted}).json()["error"]["param"] == "web_search_options"


@pytest.mark.parametrize(("path", "counted"), [(RESPONSES, f"{RESPONSES}/input_tokens"), (MESSAGES, f"{MESSAGES}/count_tokens")])
def test_token_counts_omit_hosted_tools(system: System, path: str, counted: str) -> None:
    body = {name: value for name, value in BODIES[path].items() if name != "max_tokens"}
    both = [system.post(counted, {**body, "tools": tools}) for tools in ([FUNCTIONS[path]], [*HOSTED[path][0], FUNCTIONS[path]])]
    assert both[0].json() == both[1].json() and both[1].headers[HEADER] == HOSTED[path][1]


def test_history_omits_calls_of_hosted_tools(system: System, strict: System) -> None:
    call = {"type": "web_search_call", "id": "ws_a", "status": "completed", "action": {"type": "search", "query": "a"}}
    items = [*USER, call, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
    assert ask(system, RESPONSES, [], input=items, include=["web_search_call.action.sources"]).status_code == 200
    assert [message["role"] for message in orjson.loads(system.tokenizer.calls[-1].messages_json)] == [
        "user",
        "assistant",
        "user",
    ]
    assert ask(strict, RESPONSES, [], input=items).json()["error"]["param"] == "input[1].type"
    blocks = [
        {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "a", "content": []},
        {"type": "text", "text": "Yes."},
    ]
    messages = [*USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": "And?"}]
    assert ask(system, MESSAGES, [], messages=messages).status_code == 200
    assert orjson.loads(system.tokenizer.calls[-1].messages_json)[1]["content"] == "Yes."
    assert ask(strict, MESSAGES, [], messages=messages).status_code == 400


def test_background_response_omits_hosted_tools(system: System) -> None:
    tools, named = HOSTED[RESPONSES]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [tools[0], {"type": "function", "name": "weather"}]}
    begun = ask(system, RESPONSES, [*tools, FUNCTIONS[RESPONSES]], background=True, stream=True, tool_choice=choice)
    assert (begun.status_code, begun.headers[HEADER]) == (200, named)
    last = orjson.loads(begun.text.strip().split("data: ")[-1])["response"]
    assert (last["status"], [tool["name"] for tool in last["tools"]]) == ("completed", ["weather"])


def test_header_with_omitted_tools_is_shortened_when_many_tools_are_omitted(system: System) -> None:
    tools = [{"type": "custom", "name": f"{'x' * 60}{number:03}"} for number in range(100)]
    header = ask(system, RESPONSES, tools).headers[HEADER]
    assert len(header) < 4096 and header.endswith(", and 76 more")


class CountedName(str):
    """A tool's name that counts comparisons with other names."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_omission_of_many_tools_does_not_compare_every_pair_of_names() -> None:
    names = [CountedName(f"tool{number}") for number in range(1000)]
    origin = Origin("a")
    for _ in range(2):
        origin.omit(names)
    assert origin.omitted_tools == names
    CountedName.comparisons = 0
    origin.omit([*names, CountedName("other")])
    assert len(origin.omitted_tools) == 1001 and CountedName.comparisons < 10 * len(names)
