"""Tests of completions that score a prompt and generate no tokens: max_tokens 0 with echo and logprobs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.gateway.fakes import logprob_of
from tests.services.gateway.system import System, events

BODY: dict[str, Any] = {"prompt": "Once", "echo": True, "max_tokens": 0}


def test_completion_with_max_tokens_0_returns_the_prompt(shared: System) -> None:
    answer = shared.complete(**BODY, return_token_ids=True).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Once", "length", None)
    assert choice["token_ids"] == [] and choice["logprobs"] is None
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (4, 0)
    assert shared.worker.submits[-1].sampling.max_new_tokens == 0


def test_completion_with_max_tokens_0_has_prompt_logprobs(shared: System) -> None:
    logprobs = shared.complete(**BODY, logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("Once")
    assert logprobs["token_logprobs"] == [None, *(logprob_of(ord(char)) for char in "nce")]


def test_completion_with_max_tokens_0_accepts_several_prompts(shared: System) -> None:
    choices = shared.complete(**{**BODY, "prompt": ["ab", "c"]}, logprobs=0).json()["choices"]
    assert [(choice["text"], choice["logprobs"]["tokens"]) for choice in choices] == [("ab", ["a", "b"]), ("c", ["c"])]


def test_stream_with_max_tokens_0_returns_the_prompt(shared: System) -> None:
    chunks = [chunk["choices"][0] for chunk in events(shared.complete(**BODY, logprobs=0, stream=True).text)]
    assert "".join(chunk["text"] for chunk in chunks) == "Once"
    assert [token for chunk in chunks for token in chunk["logprobs"]["tokens"]] == list("Once")
    assert chunks[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("echo", [False, None])
def test_completion_with_max_tokens_0_is_refused_without_echo(shared: System, echo: bool | None) -> None:
    answer = shared.complete(**{**BODY, "echo": echo})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
