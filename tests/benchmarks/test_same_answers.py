"""Tests of the comparison of two checkouts: reported differences, ignored fields, and the generated requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.benchmarks.same_answers.answers import (
    Answer,
    assembled,
    differences,
    read_answer,
    refusal_differences,
)
from tests.benchmarks.same_answers.apis import CHATS, GENERATE, PATHS
from tests.benchmarks.same_answers.corpus import SEVERAL, corpus, features_of
from tests.benchmarks.same_answers.refusals import PER_PATH, all_refused_cases


def answer(text: str = "42.", request_id: str = "chatcmpl-1", **usage: Any) -> Answer:
    choice = {"index": 0, "message": {"content": text}, "finish_reason": "stop", "token_ids": [22, 20]}
    body = {"id": request_id, "created": len(request_id), "choices": [choice], "usage": {"completion_tokens": 2, **usage}}
    return Answer(200, "application/json", body)


def stream(*events: Any) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events) + b": waiting\n\ndata: [DONE]\n\n"


def chunk(index: int = 0, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    """Returns an event of a chat stream with one choice."""
    token_ids = [ord(character) for character in delta.get("content", "")]
    choice = {"index": index, "delta": delta, "finish_reason": finish, "token_ids": token_ids}
    return {"id": "x", "choices": [choice], "usage": None}


def paths_of(old: Answer, new: Answer, compare_cached: bool = True) -> list[str]:
    return [each.path for each in differences(old, new, compare_cached)]


def test_comparison_finds_a_changed_text() -> None:
    (found,) = differences(answer("42."), answer("43."))
    assert (found.path, found.old, found.new) == ("choices.0.message.content", "42.", "43.")


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        pytest.param({"finish_reason": "length"}, "choices.0.finish_reason", id="finish reason"),
        pytest.param({"token_ids": [22, 21]}, "choices.0.token_ids.1", id="token id"),
        pytest.param({"token_ids": [22]}, "choices.0.token_ids.1", id="fewer token ids"),
        pytest.param({"logprobs": None}, "choices.0.logprobs", id="new field"),
        pytest.param({"index": False}, "choices.0.index", id="other type"),
    ],
)
def test_comparison_names_the_path_of_the_changed_value(changed: dict[str, Any], path: str) -> None:
    new = answer()
    new.body["choices"][0] |= changed
    assert paths_of(answer(), new) == [path]


def test_comparison_ignores_random_ids_and_times() -> None:
    assert paths_of(answer(), answer(request_id="chatcmpl-another")) == []


def test_comparison_includes_cached_tokens_unless_requests_are_concurrent() -> None:
    old, new = answer(cached_tokens=16), answer(cached_tokens=0)
    assert paths_of(old, new) == ["usage.cached_tokens"] and paths_of(old, new, compare_cached=False) == []


def test_comparison_adds_cached_tokens_to_the_input_tokens_of_the_messages_api() -> None:
    whole, part = ({"input_tokens": fresh, "cache_read_input_tokens": 17 - fresh} for fresh in (17, 1))
    old, new = (Answer(200, "application/json", {"usage": usage}) for usage in (whole, part))
    assert paths_of(old, new, compare_cached=False) == []
    more = Answer(200, "application/json", {"usage": {"input_tokens": 2, "cache_read_input_tokens": 16}})
    assert paths_of(old, more, compare_cached=False) == ["usage.input_tokens"]


def test_comparison_finds_a_changed_status_and_a_changed_media_type() -> None:
    body = answer().body
    assert paths_of(answer(), Answer(500, "text/plain", body)) == ["status", "media_type"]


def test_answer_is_joined_from_chunks_of_any_size() -> None:
    call = {"index": 0, "id": "call_1", "function": {"name": "get_age", "arguments": ""}}
    calls = [chunk(tool_calls=[call]), chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"a": 1}'}}])]
    fine = [chunk(role="assistant", content=""), chunk(content="4"), chunk(1, content="x"), chunk(content="2"), *calls]
    coarse = [chunk(1, content="x"), chunk(role="assistant", content="42"), *calls]
    ends = [chunk(finish="stop"), {"id": "y", "choices": [], "usage": {"completion_tokens": 3}}]
    old, new = (read_answer(200, "text/event-stream; charset=utf-8", stream(*events, *ends)) for events in (fine, coarse))
    first, second, rest, done = old.body
    assert first["delta"]["content"] == "42" and first["finish_reason"] == "stop" and second["delta"] == {"content": "x"}
    assert first["delta"]["tool_calls"][0]["function"] == {"name": "get_age", "arguments": '{"a": 1}'}
    assert rest["usage"] == {"completion_tokens": 3} and done == "[DONE]"
    assert first["token_ids"] == [ord("4"), ord("2")] and paths_of(old, new) == []


def test_consecutive_delta_events_of_one_part_are_joined() -> None:
    def delta(text: str, index: int = 0) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}}

    stop = {"type": "content_block_stop", "index": 0}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}
    assert assembled([delta("4"), delta("2"), stop, delta("x", 1), end, end]) == [delta("42"), stop, delta("x", 1), end, end]
    part = {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "logprobs": [1]}
    joined = {**part, "delta": "42", "logprobs": [1, 1], "sequence_number": 5}
    assert assembled([{**part, "delta": "4", "sequence_number": 4}, {**part, "delta": "2", "sequence_number": 5}]) == [joined]


def test_only_the_last_cumulative_event_of_each_output_is_kept() -> None:
    events = [
        {"text": text, "index": index, "meta_info": {"n": n}} for n, (text, index) in enumerate([("a", 1), ("b", 0), ("ac", 1)])
    ]
    assert assembled([*events, "[DONE]"]) == [events[1], events[2], "[DONE]"]


def refusal(message: str, status: int = 400, param: str = "seed") -> Answer:
    return Answer(status, "application/json", {"error": {"message": message, "type": "bad", "param": param, "code": "invalid"}})


def test_comparison_of_refusals_ignores_the_message() -> None:
    assert refusal_differences(refusal("no"), refusal("not so")) == []


@pytest.mark.parametrize(
    ("new", "path"),
    [
        pytest.param(refusal("no", status=422), "status", id="status"),
        pytest.param(refusal("no", param="seeds"), "param", id="param"),
        pytest.param(answer(), "status", id="served"),
    ],
)
def test_comparison_of_refusals_finds_a_changed_status_or_param(new: Answer, path: str) -> None:
    assert [each.path for each in refusal_differences(refusal("no"), new)] == [path]


def test_comparison_of_refusals_reports_a_body_that_both_servers_accept() -> None:
    assert [each.path for each in refusal_differences(answer(), answer())] == ["status"]


def test_corpus_has_every_feature_on_every_route_with_and_without_streaming() -> None:
    cases = corpus(0, 400)
    assert len(cases) == 400 and {case.path for case in cases} == set(PATHS)
    there = {(case.path, case.feature, case.streams) for case in cases}
    assert there == {(path, feature, streams) for path in PATHS for feature in features_of(path) for streams in (False, True)}
    assert all("tools" in features_of(path) for path in CHATS) and all("schema" in features_of(path) for path in PATHS)


def test_corpus_depends_only_on_the_seed() -> None:
    assert corpus(0, 60) == corpus(0, 60) != corpus(1, 60)
    assert {case.feature for case in corpus(0, 100, without=(SEVERAL,))} == {
        feature for path in PATHS for feature in features_of(path) if feature != SEVERAL
    }


def test_corpus_has_a_seed_in_each_sampled_request() -> None:
    for case in corpus(0, 400):
        sampling = case.body["sampling_params"] if case.path == GENERATE else case.body
        seeded = {"seed", "sampling_seed"} & sampling.keys() or sampling.get("top_k") == 1
        assert seeded or sampling["temperature"] == 0, case


def test_refused_cases_have_equal_numbers_on_each_route() -> None:
    cases = all_refused_cases()
    assert [sum(case.path == path for case in cases) for path in PATHS] == [PER_PATH] * len(PATHS)
    assert len({json.dumps([case.path, case.body], sort_keys=True) for case in cases}) == len(cases)
    assert {case.path for case in cases if case.streams} == set(PATHS)
