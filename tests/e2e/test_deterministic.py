"""Deterministic workers in a whole system return equal token ids and bitwise equal log probabilities for equal requests.

A request runs alone, runs in a batch, and moves to another worker because its worker is killed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.system import System, wait_until
from tests.night import NIGHTLY

NEW_TOKENS = 200 if NIGHTLY else 120
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "sampling_seed": 5},
    {"temperature": 1.2, "sampling_seed": 6, "frequency_penalty": 0.2},
)
WORDS = '{"type": "array", "items": {"enum": ["from", "to"]}, "minItems": 9}'
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "regex": r"(Count from [0-9]+ to [0-9]+, and then say so\. ){9}"},
    {"temperature": 0.8, "sampling_seed": 7, "json_schema": WORDS},
)
STARTS = (3, 17, 29, 41) if NIGHTLY else (3, 29)
TEXTS = tuple(f"Count from {start} to {start + 50}, and then say so. " * 40 for start in STARTS)
MOVED = "rootstock_gateway_moves_total"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("deterministic")
    with System(folder, workers=2, worker_flags="--deterministic", log_level="info") as running:
        yield running


def answer(system: System, text: str, kind: dict[str, Any]) -> list[tuple[float, int]]:
    """Returns (log probability, id) of each output token. The floats are exact, because JSON has all their digits."""
    params = {"max_new_tokens": NEW_TOKENS, "ignore_eos": kind not in GRAMMARS, **kind}
    status, body = system.post("/generate", {"text": text, "sampling_params": params, "return_logprob": True})
    assert status == 200, body
    rows = body["meta_info"]["output_token_logprobs"]
    assert len(rows) == NEW_TOKENS or kind in GRAMMARS
    return [(row[0], row[1]) for row in rows]


def all_at_once(
    system: System, pool: ThreadPoolExecutor, kinds: Sequence[dict[str, Any]] = KINDS
) -> list[Future[list[tuple[float, int]]]]:
    return [pool.submit(answer, system, text, kind) for text in TEXTS for kind in kinds]


def test_deterministic_results_stay_equal_when_requests_are_batched_or_move_to_another_worker(system: System) -> None:
    alone = [answer(system, text, kind) for text in TEXTS for kind in KINDS]
    assert len({str(one) for one in alone}) > len(alone) // 2, "different seeds and prompts must give different outputs"
    with ThreadPoolExecutor(len(alone)) as pool:
        assert [one.result() for one in all_at_once(system, pool)] == alone
        running = all_at_once(system, pool)
        wait_until(lambda: system.metric("worker-1", "sglang:num_running_reqs") > 0, 60, "requests to run on worker-1")
        system.kill("worker-1")
        assert [one.result() for one in running] == alone
    assert system.metric("gateway", MOVED) > 0, "some requests of the killed worker must move"
    assert system.metric("gateway", "rootstock_gateway_moves_to_other_numerics_total") == 0
    system.start("worker-1")
    system.wait_ready()


def test_deterministic_results_stay_equal_with_draft_tokens(system: System, tmp_path: Path) -> None:
    """A worker drafts by n-grams, and verification accepts some draft tokens.

    The requests include grammars, a predicted output and disabled drafting.
    """
    kinds = KINDS + GRAMMARS
    alone = [answer(system, text, kind) for text in TEXTS for kind in kinds]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps(text) for text in TEXTS))
    guesses = "--speculative-algorithm ngram --no-speculative-adaptive"  # drafts in every step, regardless of cost
    flags = f"--deterministic {guesses} --speculative-ngram-external-corpus-path {corpus}"
    with System(tmp_path, worker_flags=flags, log_level="info") as guessing:
        with ThreadPoolExecutor(4) as pool:
            assert [one.result() for one in all_at_once(guessing, pool, kinds)] == alone
        accepted = guessing.metric("worker-0", "rootstock_worker_accepted_tokens_total")
        assert 0 < accepted < guessing.metric("worker-0", "rootstock_worker_drafted_tokens_total")
        verified = guessing.metric("worker-0", "sglang:spec_verify_calls_total")
        params = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0}
        _, body = guessing.post("/generate", {"text": TEXTS[0], "sampling_params": params})
        meta, shares = body["meta_info"], ("spec_verify_ct", "spec_draft_token_num", "spec_accept_token_num")
        rows, drafted, right = (meta[name] for name in shares)
        assert guessing.metric("worker-0", "sglang:spec_verify_calls_total") - verified == rows > 0
        assert meta["spec_accept_rate"] == round(right / drafted, 4) and meta["spec_accept_length"] == round(1 + right / rows, 4)
        _, plain = guessing.post("/generate", {"text": TEXTS[0], "sampling_params": params | {"speculative": False}})
        assert plain["output_ids"] == body["output_ids"] and not plain["meta_info"].keys() & set(shares)
        check_prediction(guessing)


def check_prediction(guessing: System) -> None:
    """Checks that a right prediction is accepted, is counted in the usage of all choices, and does not change the text."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Count from 3 to 20."}], "temperature": 0.0, "n": 2}
    _, plain = guessing.post("/v1/chat/completions", chat)
    content = plain["choices"][0]["message"]["content"]
    predicted = chat | {"prediction": {"type": "content", "content": content}}
    _, response = guessing.post("/v1/chat/completions", predicted)
    assert response["choices"] == plain["choices"] and "completion_tokens_details" not in plain["usage"]
    counted = response["usage"]["completion_tokens_details"]
    assert counted["accepted_prediction_tokens"] > response["usage"]["completion_tokens"] // 4
    assert counted["rejected_prediction_tokens"] < counted["accepted_prediction_tokens"]


def test_server_info_reports_deterministic_mode(system: System) -> None:
    (model,) = httpx.get(f"{system.url}/server_info", timeout=60).json()["models"]
    assert model["deterministic"] is True
