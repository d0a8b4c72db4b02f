"""A model folder whose config.json and generation_config.json name another end-of-sequence token than its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rootstock_llm.services.shared.hf_tokenizer import load_tokenizer
from tests.e2e.reciting_model import END, selector, write_reciting_model
from tests.e2e.system import System

TEXTS = ["Hello there.", f"One.<|return|>{END}"]  # the second text ends with the end-of-sequence token of the two configs
MOST = 40  # tokens
PROMPTS = [f"Say {selector(index)}" for index in range(len(TEXTS))]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("ends")
    write_reciting_model(folder / "model", TEXTS)
    other = load_tokenizer(folder / "model").token_id("<|return|>")
    for name in ("config.json", "generation_config.json"):
        path = folder / "model" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": other}))
    with System(folder / "logs", model=str(folder / "model"), max_total_tokens=8192) as running:
        yield running


def bodies(prompt: str) -> dict[str, dict[str, Any]]:
    messages = [{"role": "user", "content": prompt}]
    return {
        "/v1/chat/completions": {"model": "model", "messages": messages, "max_tokens": MOST},
        "/v1/completions": {"model": "model", "prompt": prompt, "max_tokens": MOST},
        "/generate": {"text": prompt, "sampling_params": {"max_new_tokens": MOST}},
        "/v1/messages": {"model": "model", "messages": messages, "max_tokens": MOST},
        "/v1/responses": {"model": "model", "input": prompt, "max_output_tokens": MOST, "store": False},
    }


ENDED = {
    "/v1/chat/completions": ('"finish_reason":"stop"', '"stop_reason":null'),
    "/v1/completions": ('"finish_reason":"stop"', '"stop_reason":null'),
    "/generate": ('"finish_reason":{"type":"stop"',),
    "/v1/messages": ('"stop_reason":"end_turn"', '"stop_sequence":null'),
    "/v1/responses": ('"status":"completed"',),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ENDED)
@pytest.mark.parametrize("text", range(len(TEXTS)), ids=["the tokenizer's", "the configs'"])
def test_output_ends_at_the_end_of_sequence_token_of_each_model_file(system: System, path: str, text: int, stream: bool) -> None:
    answer = httpx.post(system.url + path, json={**bodies(PROMPTS[text])[path], "stream": stream}, timeout=60)
    assert answer.status_code == 200, answer.text
    compact = answer.text.replace('": ', '":')
    assert all(each in compact for each in ENDED[path]), compact


@pytest.mark.parametrize("text", range(len(TEXTS)), ids=["the tokenizer's", "the configs'"])
@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": MOST}], ids=["ignore_eos", "min_tokens"])
def test_output_continues_when_every_end_of_sequence_token_is_suppressed(system: System, text: int, more: dict[str, Any]) -> None:
    _, answer = system.post("/v1/completions", {**bodies(PROMPTS[text])["/v1/completions"], **more})
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == MOST
