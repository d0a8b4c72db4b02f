"""SGLang's own endpoints through the whole system: batches, streams, aborts, and sessions whose clients disconnect."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.e2e.system import DEMO, System, wait_until

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("native"), dtype="float32", gateways=2) as running:
        yield running


@pytest.fixture(scope="module")
def http(system: System) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=system.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


def generate(http: httpx.Client, **body: Any) -> Any:
    answer = http.post("/generate", json={"sampling_params": GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """Returns the events of a stream, which must have no error."""
    found = []
    with http.stream("POST", "/generate", json={"sampling_params": GREEDY, "stream": True, **body}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    found += [json.loads(line) for line in lines]
    assert not any("error" in event for event in found)
    return found


def used(system: System) -> float:
    return system.metric("worker-0", "sglang:num_used_tokens") + system.metric("worker-0", "sglang:num_running_reqs")


class TestGenerate:
    PROMPTS = ("Count from 3", "Repeat: naïve 日本語", "x")

    def test_batch_of_prompts_gets_the_same_outputs_as_single_prompts(
        self, http: httpx.Client, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        batch = generate(http, text=list(self.PROMPTS))
        single = [generate(http, text=text) for text in self.PROMPTS]
        ids = generate(http, input_ids=[tokenizer(text).input_ids for text in self.PROMPTS])
        assert [a["output_ids"] for a in batch] == [a["output_ids"] for a in single] == [a["output_ids"] for a in ids]
        assert [a["text"] for a in batch] == [tokenizer.decode(a["output_ids"]) for a in batch]
        assert [a["meta_info"]["prompt_tokens"] for a in batch] == [len(tokenizer(text).input_ids) for text in self.PROMPTS]

    def test_stream_ends_with_the_same_values_as_the_whole_response(self, http: httpx.Client) -> None:
        sampling = {"temperature": 1, "sampling_seed": 7, "n": 2, "max_new_tokens": 12}
        whole = generate(http, text=list(self.PROMPTS), sampling_params=sampling, return_logprob=True, top_logprobs_num=2)
        last: dict[int, dict[str, Any]] = {}
        for event in events(http, text=list(self.PROMPTS), sampling_params=sampling, return_logprob=True, top_logprobs_num=2):
            before = last.get(event["index"], {"output_ids": []})["output_ids"]
            assert event["output_ids"][: len(before)] == before, "an event must have all ids so far, not only the new ones"
            last[event["index"]] = event
        assert [last[index]["text"] for index in range(6)] == [answer["text"] for answer in whole]
        assert [last[index]["output_ids"] for index in range(6)] == [answer["output_ids"] for answer in whole]
        for index, answer in enumerate(whole):
            got, meta = last[index]["meta_info"], answer["meta_info"]
            assert got["finish_reason"] == meta["finish_reason"]
            assert [e[1] for e in got["output_token_logprobs"]] == [e[1] for e in meta["output_token_logprobs"]]
            values = [e[0] for e in meta["output_token_logprobs"]]
            assert [e[0] for e in got["output_token_logprobs"]] == pytest.approx(values, abs=2e-4)

    def test_prompts_of_a_batch_may_have_different_parameters(self, http: httpx.Client) -> None:
        params = [{**GREEDY, "max_new_tokens": 3}, {"regex": "[0-9]{4}"}, {"temperature": 0, "allowed_token_ids": [80]}]
        first, second, third = generate(http, text=list(self.PROMPTS), sampling_params=params)
        assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
        assert second["text"].isdigit() and len(second["text"]) == 4
        assert set(third["output_ids"]) == {80}

    def test_abort_at_another_gateway_returns_the_output_so_far(self, http: httpx.Client, system: System) -> None:
        answers: list[httpx.Response] = []

        def ask() -> None:
            body = {"text": "Count", "rid": "endless", "sampling_params": {**GREEDY, "max_new_tokens": 3500}}
            with httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=60) as client:  # gateway-1 may not listen yet
                answers.append(client.post(f"{system.parts['gateway-1'].url}/generate", json=body))

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: system.metric("worker-0", "sglang:num_running_reqs") == 1, 60, "the request to run")
        before = system.metric("worker-0", "sglang:generation_tokens_total")
        wait_until(
            lambda: system.metric("worker-0", "sglang:generation_tokens_total") > before, 60, "the request to output a token"
        )
        assert http.post("/abort_request", json={"rid": "other"}).json() == {"aborted": 0, "gateways": 2, "unreached": 0}
        assert http.post("/abort_request", json={"rid": "endless"}).json() == {"aborted": 1, "gateways": 2, "unreached": 0}
        thread.join(60)
        (answer,) = answers
        assert answer.status_code == 200
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer.json()["output_ids"]) < 3500
        wait_until(lambda: used(system) == 0, 60, "the request's pages to be free")


class Talk:
    """A client's session. `contexts` has the whole context after each turn, by the turn's rid."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self.http = http
        self.session = session
        self.contexts: dict[str, list[int]] = {}
        opened = http.post("/open_session", json={"capacity_of_str_len": 0, "session_id": session})
        assert opened.status_code == 200 and opened.json() == session

    def ask(self, name: str, ids: list[int], **params: Any) -> httpx.Response:
        session = {"id": self.session, **params}
        body = {"input_ids": ids, "rid": name, "sampling_params": GREEDY, "session_params": session}
        return self.http.post("/generate", json=body)

    def turn(self, name: str, ids: list[int], context: list[int], **params: Any) -> dict[str, Any]:
        """Sends a turn. Checks that a request without a session, with the prompt `context` + `ids`, gets the same output."""
        answer = self.ask(name, ids, **params)
        assert answer.status_code == 200, answer.text
        turn: dict[str, Any] = answer.json()
        plain = generate(self.http, input_ids=[*context, *ids], extra_key=f"{self.session}-{name}")
        assert turn["output_ids"] == plain["output_ids"]
        assert turn["meta_info"]["prompt_tokens"] == len(context) + len(ids)
        self.contexts[name] = [*context, *ids, *turn["output_ids"]]
        return turn


FIRST, SECOND, THIRD = [70 + i % 40 for i in range(40)], [200, 201, 202], [300, 301]


class TestSessions:
    def test_session_turns_can_append_and_branch_and_use_an_offset_and_drop_output(self, http: httpx.Client) -> None:
        talk = Talk(http, "growing")
        talk.turn("t1", FIRST, [])
        second = talk.turn("t2", SECOND, talk.contexts["t1"], rid="t1")
        assert second["meta_info"]["cached_tokens"] >= 48, "the KV of the first turn must be cached"
        talk.turn("t3", THIRD, talk.contexts["t2"])
        talk.turn("branch", THIRD, talk.contexts["t1"], rid="t1")
        talk.turn("offset", THIRD, talk.contexts["t2"][:20], rid="t2", offset=20)
        talk.turn("dropped", THIRD, [*talk.contexts["t1"], *SECOND], rid="t2", drop_previous_output=True)
        talk.turn("again", SECOND, talk.contexts["t3"], rid="t3")

    def test_replacement_of_a_session_turn_removes_later_turns(self, http: httpx.Client) -> None:
        talk = Talk(http, "replaced")
        talk.turn("t1", FIRST, [])
        talk.turn("t2", SECOND, talk.contexts["t1"], rid="t1")
        talk.turn("t3", SECOND, talk.contexts["t2"], rid="t2")
        talk.turn("new", THIRD, talk.contexts["t1"], rid="t1", replace=True)
        for gone in ("t2", "t3"):
            answer = talk.ask("lost", THIRD, rid=gone)
            assert answer.status_code == 400 and gone in answer.json()["error"]["message"]
        talk.turn("t4", SECOND, talk.contexts["new"])

    def test_closed_session_is_unknown(self, http: httpx.Client) -> None:
        talk = Talk(http, "closing")
        talk.turn("t1", FIRST, [])
        assert http.post("/open_session", json={"capacity_of_str_len": 0, "session_id": "closing"}).status_code == 400
        assert http.post("/close_session", json={"session_id": "closing"}).status_code == 200
        assert http.post("/close_session", json={"session_id": "closing"}).status_code == 404
        assert talk.ask("t2", SECOND).status_code == 404

    def test_session_accepts_a_turn_with_a_grammar(self, http: httpx.Client, tokenizer: PreTrainedTokenizerBase) -> None:
        talk = Talk(http, "structured")
        talk.turn("t1", FIRST, [])
        body = {"input_ids": SECOND, "rid": "t2", "session_params": {"id": "structured", "rid": "t1"}}
        turn = generate(http, **body, sampling_params={"temperature": 0, "regex": "[a-f]{20}"})
        assert len(turn["text"]) == 20 and set(turn["text"]) <= set("abcdef")
        talk.turn("t3", THIRD, [*talk.contexts["t1"], *SECOND, *turn["output_ids"]], rid="t2")

    def test_session_is_unchanged_when_the_client_disconnects(self, http: httpx.Client, system: System) -> None:
        talk = Talk(http, "deserted")
        talk.turn("t1", FIRST, [])
        held = system.metric("worker-0", "rootstock_worker_session_tokens")
        for _ in range(3):
            leave_in_mid_turn(system, {"id": "deserted", "rid": "t1"})
            wait_until(lambda: used(system) == 0, 60, "the turn's pages to be free")
        assert system.metric("worker-0", "rootstock_worker_session_tokens") == held
        answer = talk.ask("t2", SECOND, rid="half")
        assert answer.status_code == 400, "the session must not store an interrupted turn"
        talk.turn("t2", SECOND, talk.contexts["t1"])

    def test_closed_sessions_free_all_kv_pages(self, http: httpx.Client, system: System) -> None:
        for name in ("growing", "replaced", "structured", "deserted"):
            assert http.post("/close_session", json={"session_id": name}).status_code in (200, 400)
        gauges = ("rootstock_worker_sessions", "rootstock_worker_session_tokens", "sglang:num_used_tokens")
        wait_until(lambda: not any(system.metric("worker-0", gauge) for gauge in gauges), 60, "all sessions to be freed")


def leave_in_mid_turn(system: System, session: dict[str, str]) -> None:
    """Starts a long turn and disconnects after its first events."""
    params = {**GREEDY, "max_new_tokens": 3000}
    body = {"input_ids": SECOND, "rid": "half", "stream": True, "sampling_params": params, "session_params": session}
    data = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", system.port), 20) as client:
        client.sendall(head.encode() + data)
        seen = b""
        while seen.count(b"data: ") < 3:
            piece = client.recv(65536)
            assert piece, seen
            seen += piece
