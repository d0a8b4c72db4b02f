"""Tests of SGLang's /generate: forms of responses, streams, batches, fields that reach the worker, and aborts by rid."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.services.shared.limits import MAX_REQUEST_ID_CHARS
from tests.services.gateway.fakes import CONTEXT_LEN, EOS, MODEL, ids_of
from tests.services.gateway.system import RawClient, System, chat_body, events, wait_until

GENERATE = "/generate"
ANSWER = "Hello, world!"
IDS = [*ids_of(ANSWER), EOS]


def generate(system: System, **body: Any) -> httpx.Response:
    return system.post(GENERATE, body if "input_ids" in body else {"text": "Hi", **body})


@pytest.fixture
def echoing(shared: System) -> Iterator[System]:
    """Yields a system whose worker returns its prompt."""
    shared.worker.answer = lambda submit: "".join(map(chr, submit.prompt_ids))
    yield shared
    shared.worker.answer = lambda submit: ANSWER


class TestTiers:
    """Tests of cached tokens by tier, which some workers report."""

    @pytest.fixture(autouse=True)
    def tiers(self, shared: System) -> Iterator[None]:
        shared.worker.by_tier = {"cached_device_tokens": 1, "cached_host_tokens": 2}
        yield
        shared.worker.by_tier = {}

    def test_meta_info_has_cached_tokens_by_tier(self, shared: System) -> None:
        meta = generate(shared).json()["meta_info"]
        assert meta["cached_tokens_details"] == {"device": 1, "host": 2, "storage": 0}

    def test_usage_adds_up_the_cached_tokens_of_the_first_choice_of_each_prompt(self, shared: System) -> None:
        answer = shared.openai().completions.create(model=MODEL, prompt=["a", "bb"], n=2)
        details = answer.usage.prompt_tokens_details
        assert details.cached_tokens == 3
        assert details.model_extra == {"cached_tokens_details": {"device": 2, "host": 4, "storage": 0}}

    def test_responses_api_omits_cached_tokens_by_tier(self, shared: System) -> None:
        answer = shared.post("/v1/responses", {"model": MODEL, "input": "a"}).json()
        assert set(answer["usage"]["input_tokens_details"]) == {"cached_tokens", "cache_write_tokens"}


class TestOnePrompt:
    def test_response_has_text_and_ids_and_meta_info(self, shared: System) -> None:
        answer = generate(shared, rid="my-1").json()
        assert set(answer) == {"text", "output_ids", "meta_info"}
        assert answer["text"] == ANSWER and answer["output_ids"] == IDS
        meta = answer["meta_info"]
        assert 0 < meta.pop("e2e_latency") < 60
        assert meta == {
            "id": "my-1",
            "finish_reason": {"type": "stop", "matched": EOS},
            "prompt_tokens": 2,
            "completion_tokens": len(IDS),
            "cached_tokens": 2,
            "weight_version": "default",
            "queue_time": 0.0,
            "num_retractions": 0,
        }

    def test_input_ids_reach_the_worker(self, shared: System) -> None:
        assert generate(shared, input_ids=[7, 8, 9]).json()["meta_info"]["prompt_tokens"] == 3
        assert list(shared.worker.submits[-1].prompt_ids) == [7, 8, 9]

    def test_request_id_header_is_the_default_of_rid(self, shared: System) -> None:
        answer = shared.post(GENERATE, {"text": "Hi"}, headers={"x-request-id": "trace-9"})
        assert answer.json()["meta_info"]["id"] == "trace-9" == shared.worker.submits[-1].request_id
        longest = {"x-request-id": "x" * 248}
        body = {"text": ["a"] * 512, "sampling_params": {"n": 2, "max_new_tokens": 1}}
        assert shared.post(GENERATE, body, headers=longest).status_code == 200
        assert max(len(submit.request_id) for submit in shared.worker.submits) <= MAX_REQUEST_ID_CHARS

    @pytest.mark.parametrize(
        ("params", "reason", "text"),
        [
            ({"max_new_tokens": 5}, {"type": "length", "length": 5}, "Hello"),
            ({"stop": "world"}, {"type": "stop", "matched": "world"}, "Hello, "),
            ({"stop": ["world"], "no_stop_trim": True}, {"type": "stop", "matched": "world"}, "Hello, world"),
            ({"stop_token_ids": [ord(",")]}, {"type": "stop", "matched": ord(",")}, "Hello,"),
            ({"skip_special_tokens": False}, {"type": "stop", "matched": EOS}, ANSWER + "<eos>"),
            ({"max_new_tokens": 0}, {"type": "length", "length": 0}, ""),
        ],
        ids=["length", "stop string", "stop string kept", "stop token", "special tokens shown", "max_new_tokens 0"],
    )
    def test_finish_reason_and_text_match_the_stop_condition(
        self, shared: System, params: dict[str, Any], reason: dict[str, Any], text: str
    ) -> None:
        answer = generate(shared, sampling_params=params).json()
        assert answer["text"] == text and answer["meta_info"]["finish_reason"] == reason
        assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])

    def test_embedding_model_refuses_generate(self) -> None:
        with System(down=("worker",)) as system:
            system.worker.info.generates, system.worker.info.embedding_size = False, 4
            system.call(system.workers[0].start())
            answer = generate(system)
            assert answer.status_code == 400 and "/encode" in answer.json()["error"]["message"]


class TestStream:
    def test_stream_is_cumulative(self, shared: System) -> None:
        chunks = events(generate(shared, stream=True, rid="s").text)
        texts = [chunk["text"] for chunk in chunks]
        assert texts[-1] == ANSWER and all(ANSWER.startswith(text) for text in texts)
        assert len(texts) > 1 and texts == sorted(texts, key=len)
        for chunk in chunks:
            assert chunk["output_ids"] == IDS[: len(chunk["output_ids"])] and "index" not in chunk
            assert chunk["meta_info"]["id"] == "s" and chunk["meta_info"]["prompt_tokens"] == 2
            assert chunk["meta_info"]["completion_tokens"] == len(chunk["output_ids"])
        assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}

    @pytest.mark.parametrize(
        "text", ['"\\\n\t', "é 漢字 🙂", "data: [DONE]\n\n", ""], ids=["escapes", "unicode", "event", "empty"]
    )
    def test_stream_equals_the_whole_response(self, echoing: System, text: str) -> None:
        echoing.worker.answer = lambda submit: text
        whole = generate(echoing).json()
        last = events(generate(echoing, stream=True).text)[-1]
        for answer in (whole, last):
            answer["meta_info"] = {"reason": answer["meta_info"]["finish_reason"]}
        assert last == whole and whole["text"] == text

    def test_stream_with_max_new_tokens_0_has_one_event(self, shared: System) -> None:
        (chunk,) = events(generate(shared, stream=True, sampling_params={"max_new_tokens": 0}).text)
        assert (chunk["text"], chunk["output_ids"]) == ("", [])

    def test_error_before_a_stream_is_a_plain_response(self, shared: System) -> None:
        answer = generate(shared, stream=True, sampling_params={"top_p": 2})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "sampling_params.top_p"

    def test_error_in_a_stream_is_the_last_event(self) -> None:
        with System(queue_timeout_s=0.2) as system:
            system.do(lambda: system.worker.allow(3))
            client = RawClient(system, GENERATE, {"text": "Hi", "stream": True})
            client.read_until(b'"text":"Hel"')
            system.call(system.workers[0].stop())
            received = client.read_to_end_of_stream()
            assert b'data: {"error":{"message":"No worker is connected' in received and b"[DONE]" not in received


class TestBatch:
    def test_each_text_of_a_batch_has_one_response(self, echoing: System) -> None:
        answers = generate(echoing, text=["one", "three"], rid="b").json()
        assert [answer["text"] for answer in answers] == ["one", "three"]
        assert [answer["meta_info"]["id"] for answer in answers] == ["b_0", "b_1"]

    def test_rid_may_be_a_list_with_an_element_per_prompt(self, echoing: System) -> None:
        answers = generate(echoing, input_ids=[[65], [66, 67]], rid=["x", "y"]).json()
        assert [(answer["text"], answer["meta_info"]["id"]) for answer in answers] == [("A", "x"), ("BC", "y")]

    def test_response_is_a_list_when_the_request_has_a_list_of_one_prompt(self, echoing: System) -> None:
        assert [answer["text"] for answer in generate(echoing, text=["one"]).json()] == ["one"]

    def test_sampling_params_may_be_a_list_with_an_element_per_prompt(self, echoing: System) -> None:
        params = [{"max_new_tokens": 1, "stop": "x"}, {"max_new_tokens": 2, "temperature": 0.5}]
        answers = generate(echoing, text=["one", "two"], sampling_params=params).json()
        assert [answer["text"] for answer in answers] == ["o", "tw"]
        first, second = (submit.sampling for submit in echoing.worker.submits[-2:])
        assert (list(first.stop), first.temperature) == (["x"], 1.0) and (list(second.stop), second.temperature) == ([], 0.5)

    def test_each_event_of_a_batch_stream_has_the_index_of_the_prompt(self, echoing: System) -> None:
        chunks = events(generate(echoing, text=["one", "three"], stream=True).text)
        last = {chunk["index"]: chunk for chunk in chunks}
        assert [last[index]["text"] for index in (0, 1)] == ["one", "three"]
        assert sum(chunk["meta_info"]["finish_reason"] is not None for chunk in chunks) == 2

    def test_choices_of_several_prompts_are_ordered_by_prompt(self, echoing: System) -> None:
        answers = generate(echoing, text=["a", "b"], rid=["p", "q"], sampling_params={"n": 2, "sampling_seed": 5}).json()
        assert [answer["text"] for answer in answers] == ["a", "a", "b", "b"]
        ids = [answer["meta_info"]["id"] for answer in answers]
        assert ids == ["p-0", "p-1", "q-0", "q-1"] == [submit.request_id for submit in echoing.worker.submits[-4:]]
        assert [submit.sampling.seed for submit in echoing.worker.submits[-4:]] == [5, 6, 5, 6]

    def test_choices_of_one_prompt_are_a_list(self, shared: System) -> None:
        assert [answer["text"] for answer in generate(shared, sampling_params={"n": 2}).json()] == [ANSWER] * 2

    def test_failed_prompt_ends_the_batch(self, system: System) -> None:
        system.do(lambda: system.worker.refuse.append((pb.ERROR_CODE_INVALID_ARGUMENT, "cannot be")))
        system.do(lambda: setattr(system.worker, "answer", lambda submit: "x" * 400))
        answer = generate(system, text=["a", "b"])
        assert answer.status_code == 400 and answer.json()["error"]["message"] == "cannot be"
        wait_until(lambda: not system.worker.running, "the aborts")


class TestSubmit:
    def test_sampling_params_reach_the_worker(self, shared: System) -> None:
        params = {
            **{"max_new_tokens": 10_000, "min_new_tokens": 3, "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.25},
            **{"frequency_penalty": 1, "presence_penalty": -1, "repetition_penalty": 1.5, "logit_bias": {"5": 2, "9": -100}},
            **{"sampling_seed": -1, "ignore_eos": True, "stop": ["zz"], "stop_token_ids": [77], "stop_regex": "a+b"},
            **{"stream_interval": 4, "spaces_between_special_tokens": True, "allowed_token_ids": [1, 2], "dry_multiplier": 0.5},
        }
        body = {"priority": -4, "extra_key": "salt", "routing_key": "key", "stream": True}
        assert generate(shared, sampling_params=params, **body).status_code == 200
        submit = shared.worker.submits[-1]
        sampling = submit.sampling
        assert (submit.stream, submit.cache_salt, submit.priority, submit.routing_key) == (True, "salt", -4, "key")
        assert sampling.max_new_tokens == CONTEXT_LEN - 2 and sampling.min_new_tokens == 3
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 7, 0.25)
        assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
        assert dict(zip(sampling.logit_bias_ids, sampling.logit_bias_values, strict=True)) == {5: 2, 9: -100}
        assert sampling.seed == (1 << 64) - 1 and sampling.ignore_eos and sampling.stream_interval == 4
        assert (list(sampling.stop), list(sampling.stop_token_ids), list(sampling.stop_regex)) == (["zz"], [77], ["a+b"])
        assert list(sampling.allowed_token_ids) == [1, 2] and sampling.dry.multiplier == 0.5

    @pytest.mark.by_day(one_in=2)
    @pytest.mark.parametrize(
        ("params", "max_new_tokens"), [({}, 128), ({"max_new_tokens": None}, CONTEXT_LEN - 2)], ids=["absent", "null"]
    )
    def test_max_new_tokens_is_128_when_absent_and_fills_the_context_when_null(
        self, shared: System, params: dict[str, Any], max_new_tokens: int
    ) -> None:
        generate(shared, sampling_params=params)
        assert shared.worker.submits[-1].sampling.max_new_tokens == max_new_tokens

    @pytest.mark.parametrize(
        ("params", "grammar"),
        [
            ({"json_schema": '{"type": "object"}'}, pb.Grammar(json_schema='{"type":"object"}')),
            ({"json_schema": {"type": "object"}}, pb.Grammar(json_schema='{"type":"object"}')),
            ({"json_schema": "$$ANY$$"}, pb.Grammar(json_object=True)),
            ({"regex": "a+"}, pb.Grammar(regex="a+")),
            ({"ebnf": "root ::= [a]"}, pb.Grammar(ebnf="root ::= [a]")),
            ({"structural_tag": {"structures": []}}, pb.Grammar(structural_tag='{"structures":[]}')),
        ],
        ids=["schema as text", "schema", "any JSON", "regex", "ebnf", "structural tag"],
    )
    def test_grammars_reach_the_worker(self, shared: System, params: dict[str, Any], grammar: pb.Grammar) -> None:
        assert generate(shared, sampling_params=params).status_code == 200
        assert shared.worker.submits[-1].sampling.grammar == grammar

    def test_error_names_the_field_of_a_refused_grammar(self, system: System) -> None:
        system.do(lambda: system.worker.refuse.append((pb.ERROR_CODE_INVALID_ARGUMENT, "no such rule", "grammar")))
        answer = generate(system, sampling_params={"ebnf": "root ::= x"})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["message"]) == ("sampling_params.ebnf", "no such rule")


def abort(system: System, **body: Any) -> httpx.Response:
    return system.post("/abort_request", body)


class Waiting:
    """A request that a separate thread sends, so that the test can abort it."""

    def __init__(self, system: System, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._answers: list[httpx.Response] = []
        self._thread = threading.Thread(
            target=lambda: self._answers.append(system.post(path, body, headers=headers)), daemon=True
        )
        self._thread.start()

    def result(self) -> httpx.Response:
        self._thread.join(60)
        return self._answers[0]


class TestAbort:
    def begin(self, system: System, tokens: int, path: str = GENERATE, **body: Any) -> Waiting:
        """Starts a request. Returns when the gateway has exactly `tokens` output tokens of each text. The worker then waits."""
        system.do(lambda: system.worker.allow(0))
        texts = len(body["text"]) if isinstance(body.get("text"), list) else 1
        waiting = Waiting(system, path, {"text": "Hi", **body} if path == GENERATE else body)
        wait_until(lambda: len(system.worker.running) == texts, "the worker's requests")
        system.do(lambda: system.worker.allow(tokens))
        placements = system.gateway.dispatcher._placements
        wait_until(
            lambda: [len(choice.output_ids) for choice in list(placements)] == [tokens] * texts, "the tokens at the gateway"
        )
        return waiting

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    def test_aborted_request_returns_the_output_so_far(self, system: System, stream: bool) -> None:
        waiting = self.begin(system, 3, rid="r1", stream=stream)
        assert abort(system, rid="r1").status_code == 200
        answer = waiting.result()
        assert answer.status_code == 200
        last = events(answer.text)[-1] if stream else answer.json()
        assert (last["text"], last["output_ids"]) == ("Hel", IDS[:3])
        assert last["meta_info"]["finish_reason"]["type"] == "abort" and last["meta_info"]["completion_tokens"] == 3
        wait_until(lambda: not system.worker.running, "the abort at the worker")

    def test_abort_does_not_wait_for_the_detokenizer(self, system: System) -> None:
        waiting = self.begin(system, 3, rid="r1")
        system.do(system.detokenizer.gate.clear)
        abort(system, rid="r1")
        wait_until(lambda: not system.worker.running, "the abort at the worker")
        system.do(lambda: system.worker.allow(None))
        system.do(system.detokenizer.gate.set)
        assert waiting.result().json()["output_ids"] == IDS[:3]

    def test_abort_ends_only_the_named_prompt(self, system: System) -> None:
        waiting = self.begin(system, 2, text=["a", "b"], rid=["r1", "r2"])
        abort(system, rid="r1")
        wait_until(lambda: len(system.worker.running) == 1, "the abort at the worker")
        system.do(lambda: system.worker.allow(None))
        first, second = waiting.result().json()
        assert (first["text"], first["meta_info"]["finish_reason"]["type"]) == ("He", "abort")
        assert (second["text"], second["meta_info"]["finish_reason"]["type"]) == (ANSWER, "stop")

    def test_abort_by_the_rid_of_a_batch_ends_all_prompts(self, system: System) -> None:
        waiting = self.begin(system, 2, text=["a", "b"], rid="r")
        assert abort(system, rid="r").json() == {"aborted": 2, "gateways": 1, "unreached": 0}
        assert [answer["meta_info"]["finish_reason"]["type"] for answer in waiting.result().json()] == ["abort"] * 2

    def test_abort_all_is_forbidden_for_clients(self, system: System) -> None:
        waiting = self.begin(system, 1, "/v1/chat/completions", model=MODEL, **chat_body())
        answer = abort(system, abort_all=True, rid="r")
        assert (answer.status_code, answer.json()["error"]["param"]) == (403, "abort_all")
        assert abort(system, rid="r").json()["aborted"] == 0 and len(system.worker.running) == 1
        system.allow(None)
        assert waiting.result().json()["choices"][0]["finish_reason"] == "stop"

    def test_abort_ends_a_request_during_tokenization(self, system: System) -> None:
        system.do(system.tokenizer.gate.clear)
        waiting = Waiting(system, GENERATE, {"text": "Hi", "rid": "r1"})
        wait_until(lambda: bool(system.tokenizer.calls), "the tokenizer's call")
        abort(system, rid="r1")
        answer = waiting.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "aborted")
        assert system.worker.submits == []
        wait_until(lambda: system.tokenizer.cancelled == 1, "the end of the tokenizer's call")

    def test_abort_ends_a_queued_request(self, system: System) -> None:
        system.call(system.workers[0].stop())
        wait_until(lambda: system.gateway.dispatcher.connected() == 0, "the disconnection")
        waiting = Waiting(system, GENERATE, {"text": "Hi", "rid": "r1"})
        wait_until(lambda: system.total("rootstock_gateway_queue_length") == 1, "the queued request")
        abort(system, rid="r1")
        answer = waiting.result().json()
        assert (answer["text"], answer["meta_info"]["finish_reason"]["type"]) == ("", "abort")
        assert system.total("rootstock_gateway_queue_length") == 0

    def test_abort_of_an_unknown_rid_succeeds(self, shared: System) -> None:
        assert abort(shared, rid="no such").status_code == 200

    @pytest.mark.by_day(one_in=2, seed=4)
    @pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": None, "abort_all": False}])
    def test_abort_without_a_rid_is_refused(self, shared: System, body: dict[str, Any]) -> None:
        answer = abort(shared, **body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "rid"


class TestHealthGenerate:
    def test_health_check_requests_one_token_with_the_highest_priority(self, system: System) -> None:
        assert system.get("/health_generate").status_code == 200
        (submit,) = system.worker.submits
        assert submit.sampling.max_new_tokens == 1 and submit.priority == (1 << 31) - 1

    def test_health_check_of_an_embedding_model_requests_an_embedding(self) -> None:
        with System(down=("worker",)) as system:
            system.worker.info.generates, system.worker.info.embedding_size = False, 4
            system.call(system.workers[0].start())
            wait_until(lambda: system.get("/readiness").status_code == 200, "readiness")
            assert system.get("/health_generate").status_code == 200
            assert system.worker.submits[-1].sampling.HasField("embedding")

    def test_health_check_sends_no_request_to_a_busy_worker(self, system: System) -> None:
        system.do(lambda: setattr(system.worker, "answer", lambda submit: "x" * 400))
        client = RawClient(system, GENERATE, {"text": "Hi", "stream": True, "sampling_params": {"max_new_tokens": 400}})
        client.read_until(b'"text":"x')
        assert system.get("/health_generate").status_code == 200
        assert len(system.worker.submits) == 1
        client.vanish()

    def test_health_check_returns_503_without_a_worker(self) -> None:
        with System(down=("worker",)) as system:
            answer = system.get("/health_generate")
            assert answer.status_code == 503 and "retry-after" in answer.headers

    def test_health_check_returns_503_when_the_worker_refuses(self, system: System) -> None:
        system.do(lambda: system.worker.refuse.append((pb.ERROR_CODE_INTERNAL, "broken")))
        answer = system.get("/health_generate")
        assert answer.status_code == 503 and answer.json()["error"]["message"] == "broken"


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
def test_model_info_has_the_path_and_the_kind_and_the_context_length(shared: System, path: str) -> None:
    info = shared.get(path).json()
    assert (info["model_path"], info["is_generation"], info["max_model_len"]) == (MODEL, True, CONTEXT_LEN)


def test_sglang_routes_except_health_generate_require_an_api_key() -> None:
    with System(keys=["secret"]) as system:
        assert generate(system).status_code == 401
        assert system.post("/abort_request", {"abort_all": True}).status_code == 401
        assert system.get("/health_generate").status_code == 200
        assert system.post(GENERATE, {"text": "Hi"}, headers={"authorization": "Bearer secret"}).status_code == 200
