"""Tests of streams: their events, merged pieces for slow clients, and batches for the detokenizer."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from tests.all_pairs import each_value
from tests.services.gateway.fakes import CONTEXT_LEN, EOS, MODEL, chat_text, ids_of
from tests.services.gateway.system import System, chat_body, events, wait_until

PROMPT = chat_text([{"role": "user", "content": "Hi"}])
ANSWER = "Hello, world!"


@pytest.fixture
def set_output(shared: System) -> Any:
    """Yields a function that sets the fake worker's output."""
    yield lambda text: setattr(shared.worker, "answer", lambda submit: text)
    shared.worker.answer = lambda submit: ANSWER


@pytest.mark.by_day(one_in=3, seed=17)
@each_value(
    text={
        "plain": "plain",
        "quotes": 'quotes " and \\ and /',
        "control": "line\nbreak\r\t\x00\x1f",
        "event-like": "data: [DONE]\n\n",
        "unicode": "é ü 漢字 🙂",
        "separators": "\u2028\u2029</script>",
        "empty": "",
    },
    path=["/v1/chat/completions", "/v1/completions"],
)
def test_stream_equals_the_whole_response(shared: System, set_output: Any, path: str, text: str) -> None:
    set_output(text.replace("\x00", ""))
    body = {"model": MODEL, "max_tokens": 100, **({"prompt": "Hi"} if path == "/v1/completions" else chat_body())}
    whole = shared.post(path, body).json()["choices"][0]
    chunks = events(shared.post(path, {**body, "stream": True}).text)
    pieces = [chunk["choices"][0] for chunk in chunks]
    if path == "/v1/completions":
        assert "".join(piece["text"] for piece in pieces) == whole["text"] == text.replace("\x00", "")
    else:
        assert "".join(piece["delta"].get("content", "") for piece in pieces) == whole["message"]["content"]
        assert whole["message"]["content"] == text.replace("\x00", "")
    assert pieces[-1]["finish_reason"] == whole["finish_reason"] == "stop"
    assert all(piece["finish_reason"] is None for piece in pieces[:-1])


@pytest.mark.by_day(one_in=3)
@pytest.mark.parametrize(("merge", "stream"), [(5, True), (100, True), (5, False)])
def test_stream_has_all_tokens_when_steps_are_merged(shared: System, merge: int, stream: bool) -> None:
    shared.worker.merge = merge
    try:
        answer = shared.chat(stream=stream, return_token_ids=True)
    finally:
        shared.worker.merge = 1
    choices = [chunk["choices"][0] for chunk in events(answer.text)] if stream else answer.json()["choices"]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == [*ids_of(ANSWER), EOS]
    assert (
        "".join(choice.get("delta", choice.get("message"))["content"] for choice in choices if stream is False or choice["delta"])
        == ANSWER
    )


def test_usage_is_null_before_the_last_chunk(shared: System) -> None:
    *chunks, last = events(shared.chat(stream=True, stream_options={"include_usage": True}).text)
    assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(ANSWER) + 1
    assert all("usage" not in chunk for chunk in events(shared.chat(stream=True).text))


class TestStops:
    def test_stop_string_is_removed_from_the_text_and_is_the_stop_reason(self, shared: System) -> None:
        choice = shared.chat(stop=["world", "zzz"]).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("Hello, ", "stop", "world")

    def test_stop_string_never_appears_in_a_stream(self, shared: System) -> None:
        chunks = events(shared.chat(stop="world", stream=True).text)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello, "
        assert chunks[-1]["choices"][0]["stop_reason"] == "world"

    def test_stop_string_is_kept_when_requested(self, shared: System) -> None:
        choice = shared.chat(stop="world", include_stop_str_in_output=True).json()["choices"][0]
        assert choice["message"]["content"] == "Hello, world"

    def test_stop_token_ends_the_output(self, shared: System) -> None:
        choice = shared.chat(stop_token_ids=[ord(",")]).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("Hello,", "stop", ord(","))

    def test_stop_reason_is_null_when_the_output_ends_with_end_of_sequence(self, shared: System) -> None:
        choice = shared.chat().json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)

    def test_max_completion_tokens_ends_the_output(self, shared: System) -> None:
        choice = shared.chat(max_completion_tokens=2, max_tokens=9).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("He", "length", None)

    def test_special_tokens_are_shown_when_requested(self, shared: System) -> None:
        assert shared.chat(skip_special_tokens=False).json()["choices"][0]["message"]["content"] == ANSWER + "<eos>"


def test_token_ids_are_returned_when_requested(shared: System) -> None:
    ids = [*ids_of(ANSWER), EOS]
    whole = shared.chat(return_token_ids=True).json()
    assert whole["prompt_token_ids"] == ids_of(PROMPT) and whole["choices"][0]["token_ids"] == ids
    chunks = events(shared.chat(return_token_ids=True, stream=True).text)
    assert chunks[0]["prompt_token_ids"] == ids_of(PROMPT)
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", [])] == ids
    assert sum("prompt_token_ids" in c for c in chunks) == 1
    plain = shared.complete(return_token_ids=True, prompt=["a", "b"]).json()
    assert [choice["prompt_token_ids"] for choice in plain["choices"]] == [ids_of("a"), ids_of("b")]
    stream = events(shared.complete(return_token_ids=True, stream=True).text)
    assert stream[0]["choices"][0]["prompt_token_ids"] == ids_of("Hi")
    assert [i for c in stream for i in c["choices"][0]["token_ids"]] == ids


def test_worker_receives_the_sampling_parameters(shared: System) -> None:
    answer = shared.chat(
        **{"n": 2, "seed": -1, "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "ignore_eos": True},
        **{"frequency_penalty": 1, "presence_penalty": -1, "repetition_penalty": 1.5, "logit_bias": {"5": 2, "9": -100}},
        **{"min_tokens": 3, "max_tokens": 10_000, "stop": ["zz"], "stop_token_ids": [77]},
        **{"cache_salt": "salt", "priority": -4, "stream": True},
    )
    assert answer.status_code == 200
    request_id = answer.headers["x-request-id"]
    submits = shared.worker.submits[-2:]
    assert [submit.request_id for submit in submits] == [f"{request_id}-0", f"{request_id}-1"]
    assert [submit.sampling.seed for submit in submits] == [(1 << 64) - 1, 0]
    for submit in submits:
        sampling = submit.sampling
        assert list(submit.prompt_ids) == ids_of(PROMPT)
        assert (submit.stream, submit.cache_salt, submit.priority) == (True, "salt", -4)
        assert 0 < submit.timeout_ms <= 600_000
        assert sampling.max_new_tokens == CONTEXT_LEN - len(PROMPT)
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 7, 0.25)
        assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
        assert dict(zip(sampling.logit_bias_ids, sampling.logit_bias_values, strict=True)) == {5: 2, 9: -100}
        assert (sampling.ignore_eos, sampling.min_new_tokens) == (True, 3)
        assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["zz"], [77])


def test_tokenizer_receives_the_messages_and_the_tools_and_the_template_arguments(shared: System) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    shared.chat(tools=tools, continue_final_message=True, chat_template_kwargs={"thinking": False})
    call = shared.tokenizer.calls[-1]
    assert orjson.loads(call.tools_json) == tools and orjson.loads(call.template_kwargs_json) == {"thinking": False}
    assert call.continue_final_message and not call.add_generation_prompt
    shared.chat(tools=tools, tool_choice="none", messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}])
    call = shared.tokenizer.calls[-1]
    assert call.tools_json == b"" and call.add_generation_prompt and not call.continue_final_message
    assert orjson.loads(call.messages_json)[0]["content"] == [{"type": "text", "text": "a"}]


def test_detokenizer_receives_one_batch_per_step(system: System) -> None:
    """64 choices advance together. The number of messages to the detokenizer grows with steps, not with tokens."""
    system.complete(n=64, max_tokens=10, stream=True)
    rows = sum(len(batch.handles) for batch in system.detokenizer.batches)
    assert rows <= 64 * 10 and len(system.detokenizer.batches) <= 10
    assert len(system.worker.messages) == 1 and len(system.worker.messages[0].submits) == 64


def test_slow_client_receives_merged_pieces_of_text(system: System) -> None:
    """Text merges into one piece while the transport accepts no data. Every character arrives once."""
    text = "0123456789" * 30
    system.do(lambda: setattr(system.worker, "answer", lambda submit: text))

    async def exchange() -> list[bytes]:
        bodies: list[bytes] = []
        reading = asyncio.Event()
        request = orjson.dumps({"model": MODEL, **chat_body(stream=True)})
        messages = [{"type": "http.request", "body": request, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else await asyncio.Future()

        async def send(message: dict[str, Any]) -> None:
            bodies.append(message.get("body", b""))
            if len(bodies) == 2:  # the status and the first piece
                await reading.wait()

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
        scope |= {"query_string": b"", "root_path": ""}
        serving = asyncio.create_task(system.gateway.app(scope, receive, send))
        while any(link.busy for link in system.gateway.detoks.links) or not bodies:
            await asyncio.sleep(0.01)
        reading.set()
        await serving
        return bodies

    bodies = system.call(exchange())
    assert len(bodies) == 3
    chunks = events(b"".join(bodies).decode())
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text


def test_gateway_returns_the_request_id_of_the_client_or_generates_one(shared: System) -> None:
    assert shared.chat().headers["x-request-id"] != shared.chat().headers["x-request-id"]
    given = shared.get("/health", headers={"x-request-id": "trace-1.a:b_c"})
    assert given.headers["x-request-id"] == "trace-1.a:b_c"
    longest = "x" * 248
    assert shared.post("/v1/completions", {"model": MODEL, "prompt": "Hi"}, headers={"x-request-id": longest}).status_code == 200
    assert shared.worker.submits[-1].request_id == f"{longest}-0"
    for bad in ("a b", "x" * 249, 'a"b', "{}"):
        assert shared.get("/health", headers={"x-request-id": bad}).headers["x-request-id"] != bad


def test_metrics_count_requests_and_tokens(system: System) -> None:
    system.chat(n=2)
    system.chat(model="nobody")
    system.get("/v1/nothing")
    wait_until(lambda: system.metric("rootstock_gateway_requests_in_flight") == 0)
    chat = {"route": "/v1/chat/completions"}
    assert system.metric("rootstock_gateway_requests_total", **chat, model=MODEL, code="200") == 1
    assert system.metric("rootstock_gateway_requests_total", **chat, model="other", code="404") == 1
    assert system.metric("rootstock_gateway_requests_total", route="other", code="404") == 1
    assert system.metric("rootstock_gateway_prompt_tokens_total") == len(PROMPT)
    assert system.metric("rootstock_gateway_output_tokens_total") == 2 * (len(ANSWER) + 1)
    assert system.metric("rootstock_gateway_cached_tokens_total") == 3
    assert system.metric("rootstock_gateway_time_to_first_token_seconds_count") == 2
    assert 0 < system.metric("rootstock_gateway_inter_token_latency_seconds_count") <= 2 * len(ANSWER)
    assert system.metric("rootstock_gateway_e2e_request_latency_seconds_count") == 1
    for service in ("worker", "tokenizer", "detokenizer"):
        assert system.metric("rootstock_gateway_connected", service=service) == 1


class TestStopPatterns:
    def test_stop_regex_keeps_the_matched_text_and_is_the_stop_reason(self, shared: System) -> None:
        choice = shared.chat(stop_regex="w[a-z]r").json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("Hello, wor", "stop", "w[a-z]r")

    def test_match_of_a_stop_pattern_ends_a_stream(self, shared: System) -> None:
        chunks = events(shared.chat(stop_regex=["zz", "l+o"], stream=True).text)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello"
        assert chunks[-1]["choices"][0]["stop_reason"] == "l+o"

    def test_error_names_stop_regex_when_the_worker_refuses_a_pattern(self, shared: System) -> None:
        shared.do(lambda: shared.worker.refuse.append((2, "cannot be used: missing )", "stop_regex", 1)))
        answer = shared.chat(stop_regex=["a", "("])
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "stop_regex"


def test_fields_beyond_the_openai_api_reach_the_worker(shared: System) -> None:
    dry = {"dry_multiplier": 0.5, "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 64}
    answer = shared.chat(
        **{"allowed_token_ids": [0, 1, 2], "banned_token_ids": [3], "stop_regex": ["a+", "b"], "routing_key": "key"},
        **{"logprobs": True, "top_logprobs": 4, "logprob_token_ids": [9, 8], **dry, "dry_sequence_breakers": ["\n", "."]},
    )
    assert answer.status_code == 200
    submit = shared.worker.submits[-1]
    sampling = submit.sampling
    assert (list(sampling.allowed_token_ids), list(sampling.banned_token_ids)) == ([0, 1, 2], [3])
    assert list(sampling.stop_regex) == ["a+", "b"]
    assert (sampling.dry.multiplier, sampling.dry.base, sampling.dry.allowed_length, sampling.dry.window) == (0.5, 2, 3, 64)
    assert list(sampling.dry.breakers) == ["\n", "."]
    assert (sampling.logprobs.top, list(sampling.logprobs.token_ids)) == (4, [9, 8])
    assert not sampling.logprobs.HasField("prompt_from")
    assert submit.routing_key == "key"


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize("off", [{}, {"dry_multiplier": 0}, {"dry_multiplier": 1, "dry_penalty_last_n": 0}])
def test_dry_penalty_is_off_by_default(shared: System, off: dict[str, Any]) -> None:
    assert shared.chat(**off).status_code == 200
    assert not shared.worker.submits[-1].sampling.HasField("dry")


def test_dry_penalty_covers_the_whole_context_by_default(shared: System) -> None:
    for window in ({}, {"dry_penalty_last_n": -1}):
        shared.chat(dry_multiplier=1, **window)
        assert not shared.worker.submits[-1].sampling.dry.HasField("window")


class TestRoutingKey:
    def test_header_sets_the_routing_key(self, shared: System) -> None:
        for path, body in (("/v1/chat/completions", chat_body()), ("/v1/embeddings", {"input": "a"})):
            answer = shared.post(path, {"model": MODEL, **body}, headers={"x-smg-routing-key": "tenant-7"})
            assert answer.status_code == 200
            assert shared.worker.submits[-1].routing_key == "tenant-7"

    def test_routing_key_in_the_body_overrides_the_header(self, shared: System) -> None:
        body = {"model": MODEL, **chat_body(routing_key="body")}
        shared.post("/v1/chat/completions", body, headers={"x-smg-routing-key": "header"})
        assert shared.worker.submits[-1].routing_key == "body"

    def test_long_routing_key_is_refused(self, shared: System) -> None:
        answer = shared.post("/v1/chat/completions", {"model": MODEL, **chat_body()}, headers={"x-smg-routing-key": "x" * 257})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "x-smg-routing-key"
