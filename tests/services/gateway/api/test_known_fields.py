"""Tests that no field with an effect is silently dropped.

Each field of openai's types, SGLang and vLLM is served, is accepted without effect, or is refused with 400 and its name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import orjson
import pytest
from openai.types.shared_params import ReasoningEffort

from rootstock_llm.services.gateway.api import known_fields
from rootstock_llm.services.gateway.api.anthropic.types import MessagesRequest
from rootstock_llm.services.gateway.api.known_fields import KnownFields
from rootstock_llm.services.gateway.api.openai.types import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from rootstock_llm.services.gateway.api.responses.types import ResponsesRequest
from rootstock_llm.services.gateway.api.sglang.types import NativeGenerateRequest, NativeSampling
from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.shared.sampling_parameters import SCALARS, Api
from tests.services.gateway.api.test_sglang import Waiting
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.foreign_fields import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    SGLANG_GENERATE,
    SGLANG_SAMPLING,
    STREAM_OPTIONS,
    known_to,
)
from tests.services.gateway.system import System, wait_until
from tests.services.parameter_values import typical

TYPES = {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest, EMBEDDINGS: EmbeddingRequest}
KNOWN: dict[str, KnownFields] = {
    CHAT: known_fields.CHAT,
    COMPLETIONS: known_fields.COMPLETION,
    EMBEDDINGS: known_fields.EMBEDDING,
}
REQUIRED = {"model", "messages", "prompt", "input"}
USER = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": USER, "seed": 5, "temperature": 0.5, "max_tokens": 5},
    COMPLETIONS: {"model": MODEL, "prompt": "Hi", "seed": 5, "temperature": 0.5, "max_tokens": 5},
    EMBEDDINGS: {"model": MODEL, "input": "Hi"},
}
SCHEMA = {"type": "object"}
CONTENT = re.compile(r'"(?:content|text)":"([^"]*)"')
REASONING_FIELDS = {"separate_reasoning"}  # fields without effect on a model that does not reason; test_tools.py tests them
TOOL = {"type": "function", "function": {"name": "f"}}
# By field: the other fields of the request, and a value of the field that must change the effects of the request
SERVED: dict[str, tuple[dict[str, Any], Any]] = {
    **{row.names[Api.CHAT]: ({}, typical(row)) for row in SCALARS},
    "add_generation_prompt": ({}, False),
    "add_special_tokens": ({}, False),
    "allowed_token_ids": ({}, [72, 101]),
    "best_of": ({}, 2),
    "cache_salt": ({}, "salt"),
    "chat_template_kwargs": ({}, {"a": 1}),
    "continue_final_message": ({}, True),
    "truncate_prompt_tokens": ({}, 1),
    "dimensions": ({}, 2),
    "documents": ({}, [{"title": "a", "text": "b"}]),
    "ebnf": ({}, 'root ::= "a"'),
    "echo": ({}, True),
    "enable_thinking": ({}, True),
    "encoding_format": ({}, "base64"),
    "extra_key": ({}, "key"),
    "guided_choice": ({}, ["a"]),
    "guided_grammar": ({}, 'root ::= "a"'),
    "guided_json": ({}, SCHEMA),
    "guided_regex": ({}, "a"),
    "include_stop_str_in_output": ({"stop": "lo"}, True),
    "json_schema": ({}, SCHEMA),
    "logit_bias": ({}, {"5": 1}),
    "logprob_token_ids": ({"logprobs": True}, [72]),
    "logprobs": ({}, True),
    "max_completion_tokens": ({}, 3),
    "max_tokens": ({}, 3),
    "n": ({}, 2),
    "no_stop_trim": ({"stop": "lo"}, True),
    "normalize": ({}, True),
    "prediction": ({}, {"type": "content", "content": "Hello"}),
    "priority": ({}, 3),
    "reasoning_effort": ({}, "low"),
    "regex": ({}, "a"),
    "request_id": ({}, "mine"),
    "response_format": ({}, {"type": "json_object"}),
    "return_token_ids": ({}, True),
    "rid": ({}, "mine"),
    "seed": ({}, 6),
    "session_params": ({}, {"id": "s"}),
    "skip_special_tokens": ({"ignore_eos": True, "max_tokens": 15}, False),
    "stop": ({}, "world"),
    "stop_regex": ({}, "w.r"),
    "stop_token_ids": ({}, [108]),
    "stream": ({}, True),
    "stream_options": ({"stream": True}, {"include_usage": True}),
    "structural_tag": ({}, {"structures": []}),
    "structured_outputs": ({}, {"regex": "a"}),
    "parallel_tool_calls": ({"tools": [TOOL], "tool_choice": "required"}, False),
    "tool_choice": ({"tools": [TOOL]}, "none"),
    "tools": ({}, [TOOL]),
    "think": ({}, True),
    "thinking": ({}, True),
    "top_logprobs": ({"logprobs": True}, 2),
}
SERVED_BY_PATH = {(COMPLETIONS, "logprobs"): ({}, 1), (COMPLETIONS, "logprob_token_ids"): ({"logprobs": 0}, [72])}


def effects(system: System, path: str, body: dict[str, Any]) -> list[Any]:
    """Returns everything that depends on a request's fields: calls to tokenizer, worker and detokenizer, and the response."""
    worker, tokenizer, detokenizer = system.worker, system.tokenizer, system.detokenizer
    before = len(worker.submits), len(tokenizer.calls), len(detokenizer.batches)
    answer = system.post(path, body, headers={"x-request-id": "walk"})
    assert answer.status_code == 200, f"{body}: {answer.text}"
    submits = worker.submits[before[0] :]
    for submit in submits:
        submit.ClearField("handle")
        submit.ClearField("timeout_ms")
    opens = [o for batch in detokenizer.batches[before[2] :] for o in batch.opens]
    for opened in opens:
        opened.ClearField("handle")
    return [submits, tokenizer.calls[before[1] :], opens, *in_one_piece(re.sub(r'"created":\d+,?', "", answer.text))]


def in_one_piece(answer: str) -> tuple[str, list[str]]:
    """Returns a response's joined text, and the other parts in order. The division into chunks varies, so chunks are joined."""
    text = "".join(CONTENT.findall(answer))
    return text, list(dict.fromkeys(CONTENT.sub("", answer).split("\n\n")))


def served_at(path: str) -> list[str]:
    known = KNOWN[path]
    untested = known.unused | known.neutral.keys() | REQUIRED | REASONING_FIELDS
    return sorted(set(known_to(path)) & TYPES[path].model_fields.keys() - untested)


@pytest.mark.parametrize("path", BODIES)
def test_every_known_field_is_served_or_ignored_or_refused(path: str) -> None:
    known, fields = KNOWN[path], TYPES[path].model_fields.keys()
    dropped = [name for name in known_to(path) if not (name in fields or name in known.unused or name in known.neutral)]
    assert not dropped, f"{path} drops {dropped}"
    assert not known.unused & known.neutral.keys()
    assert not set(served_at(path)) - SERVED.keys(), "SERVED has a value for every served field"


@pytest.mark.parametrize("path", BODIES)
def test_served_field_has_an_effect(shared: System, path: str) -> None:
    seen: dict[str, list[Any]] = {}
    for name in served_at(path):
        beside, value = SERVED_BY_PATH.get((path, name), SERVED[name])
        plain, key = {**BODIES[path], **beside}, str(beside)
        if key not in seen:
            seen[key] = effects(shared, path, plain)
            assert effects(shared, path, plain) == seen[key], "the same body has the same effects"
        assert effects(shared, path, {**plain, name: value}) != seen[key], f"{path} drops {name}"


@pytest.mark.parametrize("path", BODIES)
def test_neutral_value_has_no_effect(shared: System, path: str) -> None:
    known = KNOWN[path]
    body = {**BODIES[path], "rid": "walk"}
    plain = effects(shared, path, body)
    nothing = dict.fromkeys(known.neutral) | dict.fromkeys(known.unused, "x")
    assert effects(shared, path, {**body, **nothing}) == plain
    for place in range(max(map(len, known.neutral.values()))):
        neutral = {name: values[place] for name, values in known.neutral.items() if place < len(values)}
        assert effects(shared, path, {**body, **neutral}) == plain, neutral


@pytest.mark.parametrize("path", BODIES)
def test_error_names_the_unserved_field(shared: System, path: str) -> None:
    before = len(shared.worker.submits)
    left_out = known_fields.WEB_SEARCH if path == "/v1/chat/completions" else ""
    for name in KNOWN[path].neutral.keys() - {left_out}:
        answer = shared.post(path, {**BODIES[path], name: {"x": 1}})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter"), answer.text
    assert len(shared.worker.submits) == before


@pytest.mark.parametrize("names", [("functions", "audio"), ("audio", "functions")])
def test_error_names_the_first_of_several_unserved_fields(names: tuple[str, ...]) -> None:
    body = {"messages": [], **{name: {"a": 1} for name in names}}
    with pytest.raises(ApiError) as refused:
        known_fields.refuse_unserved(body, known_fields.CHAT)
    assert refused.value.param == names[0]


def test_every_member_of_stream_options_is_served_or_refused(shared: System) -> None:
    assert {"include_usage", *known_fields.STREAM_OPTIONS} == STREAM_OPTIONS
    for name in known_fields.STREAM_OPTIONS:
        assert shared.chat(stream=True, stream_options={name: False}).status_code == 200
        answer = shared.chat(stream=True, stream_options={name: True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"stream_options.{name}")


def test_unknown_field_of_the_generate_route_is_refused_unless_null(shared: System) -> None:
    before = len(shared.worker.submits)
    others = set(SGLANG_GENERATE.split()) - NativeGenerateRequest.model_fields.keys() - known_fields.NATIVE.unused
    for name in others:
        refused = shared.post("/generate", {"text": "Hi", name: {"x": 1}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    assert len(shared.worker.submits) == before
    assert shared.post("/generate", {"text": "Hi", **dict.fromkeys(others)}).status_code == 200


def test_unknown_sampling_param_of_the_generate_route_is_refused(shared: System) -> None:
    for name in set(SGLANG_SAMPLING.split()) - NativeSampling.model_fields.keys():
        refused = shared.post("/generate", {"text": "Hi", "sampling_params": {name: {"x": 1}}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"sampling_params.{name}")


def test_chat_template_receives_the_reasoning_effort(shared: System) -> None:
    def variables(**body: Any) -> Any:
        answer = shared.chat(**body)
        assert answer.status_code == 200, answer.text
        return orjson.loads(shared.tokenizer.calls[-1].template_kwargs_json or b"{}")

    for level in get_args(get_args(ReasoningEffort)[0]):
        assert variables(reasoning_effort=level)["reasoning_effort"] == level
    off = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert variables(reasoning_effort="none") == off
    assert variables(reasoning_effort="none", chat_template_kwargs={"thinking": True}) == off | {"thinking": True}
    assert variables(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "low"}) == {"reasoning_effort": "low"}
    assert variables() == {}
    both = shared.chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    for answer in (both, shared.chat(reasoning_effort="utmost"), shared.chat(reasoning_effort=0.5)):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_effort")


@pytest.mark.parametrize("name", ["enable_thinking", "thinking", "think"])
def test_reasoning_switch_is_refused_when_the_chat_template_does_not_read_the_variable(shared: System, name: str) -> None:
    for value in (True, False):
        assert shared.chat(**{name: value}).status_code == 200
        call = shared.tokenizer.calls[-1]
        assert orjson.loads(call.template_kwargs_json) == {name: value} and list(call.read_variables) == [name]
    both = {name: True, "chat_template_kwargs": {name: True}, "reasoning_effort": "none"}
    assert shared.chat(**both).status_code == 200
    assert orjson.loads(shared.tokenizer.calls[-1].template_kwargs_json)[name] is True
    assert shared.chat(chat_template_kwargs={name: True}).status_code == 200
    assert not shared.tokenizer.calls[-1].read_variables, "chat_template_kwargs may have names that no template reads"
    for wrong in ({name: 1}, {name: True, "chat_template_kwargs": {name: False}}):
        answer = shared.chat(**wrong)
        assert (answer.status_code, answer.json()["error"]["param"].split(".")[0]) == (400, name), answer.text


def test_gateway_requires_a_chat_template_that_reads_documents_when_the_request_has_documents(shared: System) -> None:
    for given, read in (([{"title": "a", "text": "b"}], ["documents"]), ([], []), (None, [])):
        assert shared.chat(documents=given).status_code == 200
        assert list(shared.tokenizer.calls[-1].read_variables) == read


def test_thinking_object_sets_the_switch_of_the_chat_template(shared: System) -> None:
    for given, value in (("enabled", True), ("adaptive", True), ("disabled", False)):
        assert shared.chat(thinking={"type": given}).status_code == 200
        assert orjson.loads(shared.tokenizer.calls[-1].template_kwargs_json) == {"thinking": value}
        answer = shared.post("/v1/responses", {"model": MODEL, "input": "Hi", "thinking": {"type": given}, "store": False})
        assert answer.status_code == 200, answer.text
        assert orjson.loads(shared.tokenizer.calls[-1].template_kwargs_json) == {"thinking": value}


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message", "documents", "reasoning_effort"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_chat_template_fields_are_refused_by_name_on_other_apis(shared: System, path: str, name: str) -> None:
    body = {"model": MODEL, "input": "Hi"} if path == "/v1/responses" else {"model": MODEL, "messages": USER, "max_tokens": 5}
    answer = shared.post(path, {**body, name: "x"})
    assert answer.status_code == 400 and f"'{name}'" in answer.json()["error"]["message"], answer.text


CHAT_FIELDS: dict[str, Any] = {
    **{name: SERVED[name][1] for name in ("min_p", "frequency_penalty", "stop", "logit_bias", "seed") if name in SERVED},
    "regex": "a+",
    "response_format": {"type": "json_object"},
    "logprobs": True,
    "max_completion_tokens": 5,
}


@pytest.mark.parametrize("name", CHAT_FIELDS)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_chat_fields_are_refused_by_name_on_apis_that_do_not_serve_the_fields(shared: System, path: str, name: str) -> None:
    body = {"model": MODEL, "input": "Hi"} if path == "/v1/responses" else {"model": MODEL, "messages": USER, "max_tokens": 5}
    served = name in (ResponsesRequest if path == "/v1/responses" else MessagesRequest).model_fields
    answer = shared.post(path, {**body, name: CHAT_FIELDS[name], "store": False})
    if served:
        assert answer.status_code == 200, answer.text
    else:
        assert answer.status_code == 400 and f"'{name}'" in answer.json()["error"]["message"], answer.text
    assert shared.post(path, {**body, name: None, "store": False}).status_code == 200


class TestFieldsOfGenerate:
    def test_extra_key_becomes_the_cache_salt_when_cache_salt_is_absent(self, shared: System) -> None:
        for path, body in {**BODIES, "/generate": {"text": "Hi"}, "/encode": {"text": "Hi"}}.items():
            assert shared.post(path, {**body, "extra_key": "key"}).status_code == 200
            assert shared.worker.submits[-1].cache_salt == "key", path

    def test_cache_salt_and_extra_key_together_make_a_separate_namespace(self, shared: System) -> None:
        seen = set()
        for salt, key in (("a", "bc"), ("ab", "c"), ("x" * 256, "y" * 256), (None, "abc"), ("abc", None)):
            assert shared.complete(cache_salt=salt, extra_key=key).status_code == 200
            seen.add(shared.worker.submits[-1].cache_salt)
        assert len(seen) == 4 and all(len(name) <= 256 for name in seen)

    def test_field_no_stop_trim_keeps_the_stop_string(self, shared: System) -> None:
        def text(**body: Any) -> str:
            return str(shared.complete(stop="world", max_tokens=16, **body).json()["choices"][0]["text"])

        assert text() == text(no_stop_trim=False) == "Hello, "
        assert text(no_stop_trim=True) == text(no_stop_trim=True, include_stop_str_in_output=True) == "Hello, world"
        answer = shared.complete(stop="x", no_stop_trim=True, include_stop_str_in_output=False)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "no_stop_trim")

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_session_turn_reaches_the_worker(self, shared: System, path: str) -> None:
        params = {"id": "s", "rid": "before", "offset": 4, "replace": True, "drop_previous_output": True}
        answer = shared.post(path, {**BODIES[path], "session_params": params}, headers={"x-request-id": "walk"})
        assert answer.status_code == 200, answer.text
        submit, call = shared.worker.submits[-1], shared.tokenizer.calls[-1]
        turn = submit.session
        assert (turn.session_id, turn.parent_request_id, turn.offset) == ("s", "before", 4)
        assert turn.replace and turn.drop_previous_output
        assert submit.request_id == "walk", "a later turn names this turn by the request id"
        if path == COMPLETIONS:
            assert not call.add_special_tokens, "a turn continues the context of the session"

    @pytest.mark.parametrize(
        ("path", "change", "param"),
        [
            (CHAT, {"n": 2}, "session_params"),
            (COMPLETIONS, {"prompt": ["a", "b"]}, "session_params"),
            (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo"),
            (CHAT, {"session_params": {"id": "s", "surprise": 1}}, "session_params.surprise"),
            (CHAT, {"session_params": "s"}, "session_params"),
        ],
    )
    def test_session_turn_is_refused_when_sessions_do_not_support_the_request(
        self, shared: System, path: str, change: dict[str, Any], param: str
    ) -> None:
        before = len(shared.worker.submits)
        answer = shared.post(path, {**BODIES[path], "session_params": {"id": "s"}, **change})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert len(shared.worker.submits) == before

    def test_each_prompt_has_a_request_id(self, shared: System) -> None:
        assert shared.complete(prompt=["a", "b"], rid="mine").status_code == 200
        assert [submit.request_id for submit in shared.worker.submits[-2:]] == ["mine_0", "mine_1"]
        answer = shared.complete(rid="mine", request_id="yours")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")


def test_abort_finds_a_request_by_rid_or_request_id(system: System) -> None:
    """The request is found during tokenization and while it runs."""
    system.do(system.tokenizer.gate.clear)
    for path in (CHAT, EMBEDDINGS):
        waiting = Waiting(system, path, {**BODIES[path], "rid": path})
        wait_until(lambda: bool(system.tokenizer.calls), "the tokenizer's call")
        assert system.post("/abort_request", {"rid": path}).json()["aborted"] == 1
        system.do(system.tokenizer.gate.set)
        assert waiting.result().json()["error"]["code"] == "aborted"
        system.do(system.tokenizer.gate.clear)
        system.do(system.tokenizer.calls.clear)
    batch = Waiting(system, COMPLETIONS, {**BODIES[COMPLETIONS], "prompt": ["a", "b"], "rid": "batch"})
    wait_until(lambda: bool(system.tokenizer.calls), "the tokenizer's call")
    assert system.post("/abort_request", {"rid": "batch_1"}).json()["aborted"] == 1
    assert batch.result().json()["error"]["code"] == "aborted"
    assert not system.worker.submits
    system.do(system.tokenizer.gate.set)
    system.do(lambda: system.worker.allow(0))
    running = Waiting(system, COMPLETIONS, {**BODIES[COMPLETIONS], "request_id": "mine"})
    wait_until(lambda: bool(system.worker.running), "the request at the worker")
    assert system.post("/abort_request", {"rid": "mine"}).status_code == 200
    assert running.result().json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.by_day(one_in=5, seed=7)
@pytest.mark.parametrize("path", [*BODIES, "/generate", "/encode"])
def test_every_route_sends_the_priority_to_the_worker(shared: System, path: str) -> None:
    """A priority changes only the order. Without priority scheduling, the value is passed on and has no effect."""
    body = BODIES.get(path, {"text": "Hi"})
    for value in (-5, 0, 7, None):
        assert shared.post(path, {**body, "priority": value}).status_code == 200
        assert shared.worker.submits[-1].priority == (value or 0)


def test_error_names_the_unserved_part_of_a_message(shared: System) -> None:
    message = {"role": "assistant", "content": "x"}
    assert shared.chat(messages=[*USER, {**message, "audio": None}, *USER]).status_code == 200
    answer = shared.chat(messages=[*USER, {**message, "audio": {"id": "a"}}, *USER])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].audio")


def test_documentation_lists_the_unserved_fields() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs/reference/api.md").read_text()
    names = {f"stream_options.{name}" for name in known_fields.STREAM_OPTIONS}
    for known in KNOWN.values():
        names |= known.unused | known.neutral.keys()
    for path, fields in TYPES.items():
        names |= fields.model_fields.keys() & set(known_to(path)) - REQUIRED
    assert not [name for name in sorted(names) if not re.search(rf"`{name}[`:.]", page)]
