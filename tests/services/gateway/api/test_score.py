"""Tests of /v1/score: a query and items, with the fake worker's label logprobs."""

from __future__ import annotations

import math
import re
from typing import Any

import httpx
import pytest

from rootstock_llm.services.shared import limits
from tests.services.gateway import fakes
from tests.services.gateway.api.test_sglang import Waiting, abort
from tests.services.gateway.fakes import CONTEXT_LEN, MODEL, VOCAB_SIZE, FakeWorker, ids_of, label_logprob_of
from tests.services.gateway.system import RawClient, System, wait_until

SCORE = "/v1/score"
LABELS = [5, 9, 5]


def ask(system: System, path: str = SCORE, **body: Any) -> httpx.Response:
    return system.post(path, {"query": "Is it? ", "items": ["yes", "no"], "label_token_ids": LABELS, **body})


def expected(prompt: list[int], softmax: bool = False) -> Any:
    values = [math.exp(label_logprob_of(prompt, label)) for label in LABELS]
    return pytest.approx([value / sum(values) for value in values] if softmax else values)


@pytest.mark.parametrize("path", [SCORE, "/score"])
def test_score_response_has_the_fields_of_sglang(shared: System, path: str) -> None:
    answer = ask(shared, path, model=MODEL).json()
    prompts = [ids_of("Is it? yes"), ids_of("Is it? no")]
    assert answer.pop("scores") == [expected(prompt) for prompt in prompts]
    tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    assert answer == {
        "object": "scoring",
        "model": MODEL,
        "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 2}},
    }


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"items": "yes"}, ["Is it? yes"]),
        ({"items": ["yes", "no"], "item_first": True}, ["yesIs it? ", "noIs it? "]),
        ({"query": ids_of("ab"), "items": [ids_of("c"), ids_of("de")]}, ["abc", "abde"]),
        ({"query": ids_of("ab"), "items": [ids_of("c"), ids_of("de")], "item_first": True}, ["cab", "deab"]),
        ({"query": "", "items": ["yes"], "apply_softmax": True}, ["yes"]),
        ({"items": [""], "apply_softmax": True}, ["Is it? "]),
    ],
    ids=["one text", "item first", "ids", "ids with the item first", "no query", "no item"],
)
def test_score_request_joins_the_query_and_each_item_into_a_prompt(
    shared: System, body: dict[str, Any], prompts: list[str]
) -> None:
    answer = ask(shared, **body)
    assert answer.json()["scores"] == [expected(ids_of(prompt), "apply_softmax" in body) for prompt in prompts]
    submits = shared.worker.submits[-len(prompts) :]
    assert sorted(list(submit.prompt_ids) for submit in submits) == sorted(ids_of(prompt) for prompt in prompts)


def test_worker_receives_the_label_ids_and_request_ids_of_a_score_request(shared: System) -> None:
    assert ask(shared, priority=3, rid="s", extra_key="e", routing_key="k").status_code == 200
    submits = shared.worker.submits[-2:]
    for index, submit in enumerate(submits):
        assert list(submit.sampling.score.label_token_ids) == LABELS
        assert submit.sampling.HasField("max_new_tokens") and submit.sampling.max_new_tokens == 0
        assert (submit.request_id, submit.priority, submit.cache_salt, submit.routing_key) == (f"s_{index}", 3, "e", "k")
        assert not submit.stream and not submit.hand_over
    assert submits[0].batch == submits[1].batch != 0


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no query": ({"query": None}, "query"),
    "query of no ids": ({"query": []}, "query"),
    "query of numbers and texts": ({"query": [1, "a"], "items": [[1]]}, "query"),
    "query outside the vocabulary": ({"query": [VOCAB_SIZE], "items": [[1]]}, "query"),
    "query that is a number": ({"query": 5}, "query"),
    "no items": ({"items": None}, "items"),
    "empty items": ({"items": []}, "items"),
    "items that are one list of ids": ({"query": [1], "items": [1, 2]}, "items[0]"),
    "text items of a query of ids": ({"query": [1], "items": "a"}, "items"),
    "list of texts of a query of ids": ({"query": [1], "items": ["a"]}, "items[0]"),
    "ids of a text query": ({"items": [[1]]}, "items[0]"),
    "texts and ids": ({"items": ["a", [1]]}, "items[1]"),
    "an item of no ids": ({"query": [1], "items": [[1], []]}, "items[1]"),
    "an item outside the vocabulary": ({"query": [1], "items": [[1], [VOCAB_SIZE]]}, "items[1]"),
    "a negative id": ({"query": [1], "items": [[-1]]}, "items[0]"),
    "no labels": ({"label_token_ids": None}, "label_token_ids"),
    "an empty list of labels": ({"label_token_ids": []}, "label_token_ids"),
    "a label outside the vocabulary": ({"label_token_ids": [VOCAB_SIZE]}, "label_token_ids"),
    "a negative label": ({"label_token_ids": [-1]}, "label_token_ids"),
    "a label that is a text": ({"label_token_ids": ["yes"]}, "label_token_ids.0"),
    "field of another API": ({"documents": ["a"]}, "documents"),
    "apply_softmax of another type": ({"apply_softmax": "yes"}, "apply_softmax"),
    "a prompt of no tokens": ({"query": "", "items": ["a", ""]}, "items[1]"),
}


@pytest.mark.parametrize(("body", "param"), BAD.values(), ids=BAD)
def test_error_names_the_bad_field_of_a_score_request(shared: System, body: dict[str, Any], param: str) -> None:
    answer = ask(shared, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_prompt_of_a_score_may_fill_the_context(shared: System) -> None:
    query = [7] * (CONTEXT_LEN - 2)
    assert ask(shared, query=query, items=[[1, 2]]).status_code == 200
    error = ask(shared, query=query, items=[[1], [1, 2, 3]]).json()["error"]
    assert (error["param"], error["code"]) == ("items[1]", "context_length_exceeded")
    error = ask(shared, query="a" * (CONTEXT_LEN - 2), items=["b", "abc"]).json()["error"]
    assert (error["param"], error["code"]) == ("items[1]", "context_length_exceeded")


def test_token_limit_of_a_score_request_counts_all_items(shared: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SCORE_TOKENS", 20)
    assert ask(shared, query=[7] * 8, items=[[1, 2], [3, 4]]).status_code == 200
    for body in ({"query": [7] * 8, "items": [[1, 2], [3, 4, 5]]}, {"query": "abcdefgh", "items": ["ab", "abc"]}):
        answer = ask(shared, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (413, "items")


def test_scores_of_all_labels_are_equal_when_the_model_excludes_all_labels(
    shared: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fakes, "label_logprob_of", lambda ids, label: -math.inf)
    assert ask(shared).json()["scores"] == [[0.0] * 3] * 2
    assert ask(shared, apply_softmax=True).json()["scores"] == [pytest.approx([1 / 3] * 3)] * 2


def test_embedding_model_refuses_score_requests() -> None:
    with System(down=("worker",)) as system:
        system.worker.info.generates = False
        system.call(system.workers[0].start())
        error = ask(system).json()["error"]
        assert (error["param"], error["code"]) == ("model", "unsupported_model")


def test_abort_ends_all_items_of_a_score(system: System) -> None:
    system.do(lambda: system.worker.allow(0))
    waiting = Waiting(system, SCORE, {"query": "a", "items": ["b", "c"], "label_token_ids": [1], "rid": "s1"})
    wait_until(lambda: len(system.worker.running) == 2, "the submits")
    abort(system, rid="s1")
    answer = waiting.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "aborted")
    wait_until(lambda: not system.worker.running, "the aborts at the worker")


def test_disconnect_ends_all_items_of_a_score(system: System) -> None:
    system.do(lambda: system.worker.allow(0))
    client = RawClient(system, SCORE, {"query": "a", "items": ["b", "c"], "label_token_ids": [1]})
    wait_until(lambda: len(system.worker.running) == 2, "the submits")
    client.vanish()
    wait_until(lambda: len(system.worker.aborted) == 2, "the aborts at the worker")
    assert not system.worker.running


def test_score_fails_when_one_item_fails(system: System) -> None:
    def refuse() -> None:
        system.worker.refuse.append((2, "the prompt has too many tokens"))

    system.do(refuse)
    answer = ask(system)
    assert answer.status_code == 400 and "scores" not in answer.json()
    assert ask(system).status_code == 200


def test_score_fails_when_the_worker_returns_too_few_values(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FakeWorker._advance

    def cut(*args: Any) -> Any:
        finish = real(*args)
        if finish is not None:
            del finish.label_logprobs[-1]
        return finish

    monkeypatch.setattr(system.worker, "_advance", cut)
    answer = ask(system)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


class TestMaxTokens0:
    """A request with max_tokens 0 ends with its prompt, like a score."""

    ASKS = (
        (
            "/generate",
            {"input_ids": [72, 105], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0},
        ),
        ("/v1/completions", {"model": MODEL, "prompt": "Hi", "echo": True, "max_tokens": 0, "logprobs": 1}),
    )

    @pytest.mark.parametrize(("path", "body"), ASKS, ids=["generate", "completions"])
    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    def test_response_has_no_output_when_max_tokens_is_0(self, path: str, body: dict[str, Any], stream: bool) -> None:
        """A worker without `ends_with_prompt` samples a token, and the gateway omits this token.

        The response is the same as from a worker with `ends_with_prompt`.
        """
        answers = []
        for ends_with_prompt in (True, False):

            def version(workers: list[FakeWorker], ends: bool = ends_with_prompt) -> None:
                workers[0].info.ends_with_prompt = ends

            with System(configure=version) as system:
                answers.append(system.post(path, {**body, "stream": stream, "rid": "r"}))
                (submit,) = system.worker.submits
                assert submit.sampling.HasField("max_new_tokens")
                assert submit.sampling.max_new_tokens == (0 if ends_with_prompt else 1)
                assert system.worker.steps == 1
        texts = [re.sub(r'("(created|id|e2e_latency)": ?[^,}]*)', "", answer.text) for answer in answers]
        assert answers[0].status_code == 200 and texts[0] == texts[1]
        assert '"length"' in texts[0]


class TestRouting:
    @pytest.mark.parametrize("policy", ["prefix_aware", "round_robin", "least_requests"])
    def test_items_of_a_score_request_go_to_one_worker(self, policy: str) -> None:
        with System(workers=3, routing_policy=policy) as system:
            for number in range(4):
                assert ask(system, items=[f"{number} {item}" for item in range(8)]).status_code == 200
            placed = [{submit.batch for submit in host.servicer.submits} for host in system.workers]
            assert sum(map(len, placed)) == 4, "each batch is on one worker"
            assert system.metric("rootstock_gateway_routing_decisions_total", reason="home") == 4 * 7

    def test_items_of_a_score_request_go_to_other_workers_when_a_worker_is_full(self) -> None:
        def two_slots(workers: list[FakeWorker]) -> None:
            for worker in workers:
                worker.info.max_running_requests = 2
                worker.allow(0)

        with System(workers=2, configure=two_slots) as system:
            waiting = Waiting(system, SCORE, {"query": "a", "items": ["b"] * 12, "label_token_ids": [1]})
            wait_until(lambda: all(count >= 2 for count in system.running()), "two full workers")
            system.allow(None)
            assert len(waiting.result().json()["scores"]) == 12

    def test_score_requests_avoid_workers_that_always_sample_a_token(self) -> None:
        """An older worker does not have ends_with_prompt and would generate tokens."""

        def samples_always(workers: list[FakeWorker]) -> None:
            workers[0].info.ends_with_prompt = False

        with System(workers=2, configure=samples_always, routing_policy="round_robin") as system:
            for _ in range(3):
                assert ask(system).status_code == 200
            assert system.submits() == [0, 6]

    def test_score_is_refused_at_once_when_no_worker_supports_requests_without_output(self) -> None:
        def samples_always(workers: list[FakeWorker]) -> None:
            workers[0].info.ends_with_prompt = False

        with System(configure=samples_always, queue_timeout_s=600) as system:
            answer = ask(system)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
            assert "serves no scores" in answer.text and "retry-after" in answer.headers
            assert system.post("/generate", {"text": "Hi"}).status_code == 200

    def test_items_of_a_score_request_move_to_another_worker_when_their_worker_is_lost(self) -> None:
        with System(workers=2, configure=lambda workers: [worker.allow(0) for worker in workers] and None) as system:
            body = {"query": "a", "items": ["b", "c", "d"], "label_token_ids": LABELS}
            waiting = Waiting(system, SCORE, body)
            wait_until(lambda: sum(system.running()) == 3, "the submits")
            lost = max(system.workers, key=lambda host: len(host.servicer.running))
            system.call(lost.stop())
            system.allow(None)
            assert waiting.result().json()["scores"] == [expected(ids_of("a" + item)) for item in "bcd"]
