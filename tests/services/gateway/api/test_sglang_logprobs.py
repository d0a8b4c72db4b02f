"""Tests of SGLang's logprobs: parallel lists for prompt and output with entries [logprob, id, text]."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.gateway.fakes import EOS, chosen_of, ids_of, logprob_of, tops_of
from tests.services.gateway.system import System, events

PROMPT = "Hello"
ANSWER = "Hi you"
IDS = [*ids_of(ANSWER), EOS]


@pytest.fixture(autouse=True)
def answer(shared: System) -> Any:
    shared.worker.answer = lambda submit: ANSWER
    yield
    shared.worker.answer = lambda submit: "Hello, world!"


def meta_of(system: System, **body: Any) -> dict[str, Any]:
    answer = system.post("/generate", {"text": PROMPT, "return_logprob": True, **body})
    assert answer.status_code == 200, answer.text
    meta: dict[str, Any] = answer.json()["meta_info"]
    return meta


def sampled_entries(ids: list[int]) -> list[list[Any]]:
    return [[logprob_of(token), token, None] for token in ids]


def top_entries(ids: list[int], k: int) -> list[list[list[Any]]]:
    return [[[value, top, None] for top, value in tops_of(token, k)] for token in ids]


def test_logprobs_are_absent_by_default(shared: System) -> None:
    meta = meta_of(shared, return_logprob=False, top_logprobs_num=3)
    assert not [key for key in meta if "logprobs" in key]
    assert not shared.worker.submits[-1].sampling.HasField("logprobs")


def test_output_has_logprobs(shared: System) -> None:
    meta = meta_of(shared)
    assert {key: value for key, value in meta.items() if "logprobs" in key} == {
        "input_token_logprobs": [],
        "output_token_logprobs": sampled_entries(IDS),
    }


def test_output_has_top_logprobs(shared: System) -> None:
    meta = meta_of(shared, top_logprobs_num=2)
    assert meta["output_top_logprobs"] == top_entries(IDS, 2) and meta["input_top_logprobs"] == []


def test_requested_ids_have_logprobs(shared: System) -> None:
    meta = meta_of(shared, token_ids_logprob=[66, 70])
    assert meta["output_token_ids_logprobs"] == [[[chosen_of(66), 66, None], [chosen_of(70), 70, None]]] * len(IDS)
    assert meta["input_token_ids_logprobs"] == []


@pytest.mark.by_day(one_in=3, seed=2)
@pytest.mark.parametrize("start", [0, 1, 4], ids=["first", "second", "last"])
def test_prompt_has_logprobs_from_the_start_position(shared: System, start: int) -> None:
    """The first listed position has no value, even if it is not the first token of the prompt."""
    meta = meta_of(shared, logprob_start_len=start, top_logprobs_num=1, token_ids_logprob=[66])
    first, *rest = ids_of(PROMPT)[start:]
    assert meta["input_token_logprobs"] == [[None, first, None], *sampled_entries(rest)]
    assert meta["input_top_logprobs"] == [None, *top_entries(rest, 1)]
    assert meta["input_token_ids_logprobs"] == [None, *([[[chosen_of(66), 66, None]]] * len(rest))]


def test_prompt_has_logprobs_when_no_token_is_sampled(shared: System) -> None:
    meta = meta_of(shared, logprob_start_len=0, sampling_params={"max_new_tokens": 0})
    assert meta["input_token_logprobs"] == [[None, ord("H"), None], *sampled_entries(ids_of("ello"))]
    assert meta["output_token_logprobs"] == [] and meta["completion_tokens"] == 0


def test_logprobs_have_texts_when_requested(shared: System) -> None:
    meta = meta_of(shared, return_text_in_logprobs=True, logprob_start_len=3, top_logprobs_num=1, token_ids_logprob=[66])
    assert meta["input_token_logprobs"] == [[None, ord("l"), "l"], [logprob_of(ord("o")), ord("o"), "o"]]
    assert [entry[2] for entry in meta["output_token_logprobs"]] == [*ANSWER, "<eos>"]
    assert meta["output_top_logprobs"][0] == [[logprob_of(ord("H")), ord("H"), "H"]]
    assert meta["output_token_ids_logprobs"][0] == [[chosen_of(66), 66, "B"]]


@pytest.mark.parametrize("texts", [False, True], ids=["ids", "texts"])
def test_last_event_of_a_stream_has_all_logprobs(shared: System, texts: bool) -> None:
    body = {"return_text_in_logprobs": texts, "logprob_start_len": 1, "top_logprobs_num": 2, "token_ids_logprob": [66]}
    whole = meta_of(shared, **body)
    chunks = events(shared.post("/generate", {"text": PROMPT, "return_logprob": True, "stream": True, **body}).text)
    metas = [chunk["meta_info"] for chunk in chunks]
    for key in (key for key in whole if "logprobs" in key):
        assert metas[-1][key] == whole[key]
    for meta in metas:
        assert len(meta["output_token_logprobs"]) == len(meta["output_top_logprobs"]) == meta["completion_tokens"]
        assert meta["input_token_logprobs"] == whole["input_token_logprobs"]


def test_logprob_parameters_may_be_lists_with_an_element_per_prompt(shared: System) -> None:
    body = {"return_logprob": [True, False, True], "logprob_start_len": [0, -1, -1], "top_logprobs_num": [1, 0, 0]}
    answers = shared.post("/generate", {"text": ["ab", "cd", "ef"], "token_ids_logprob": [[66], None, None], **body}).json()
    first, second, third = (answer["meta_info"] for answer in answers)
    assert (
        first["input_token_logprobs"] == [[None, ord("a"), None], *sampled_entries([ord("b")])] and "output_top_logprobs" in first
    )
    assert "output_token_ids_logprobs" in first and "output_token_logprobs" not in second
    assert third["input_token_logprobs"] == [] and "output_top_logprobs" not in third


def test_every_choice_has_logprobs(shared: System) -> None:
    answers = shared.post("/generate", {"text": "ab", "return_logprob": True, "sampling_params": {"n": 2}}).json()
    assert [answer["meta_info"]["output_token_logprobs"] for answer in answers] == [sampled_entries(IDS)] * 2
