"""Tests of prompts longer than the context on workers with auto_truncates: the gateway sends the first tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rootstock_llm.services.gateway.api.prompts import budget_with_output, budget_without_output
from rootstock_llm.services.gateway.generation.request import ModelInfo, PromptInput
from rootstock_llm.services.shared.index.prefix_index import BLOCK_TOKENS, HASH_BYTES, block_hashes
from tests.services.gateway.fakes import CONTEXT_LEN, MODEL, FakeWorker, ids_of, logprob_of
from tests.services.gateway.system import RawClient, System, wait_until

LONG = "".join(chr(97 + i % 26) for i in range(CONTEXT_LEN + 100))
MAX_PROMPT = CONTEXT_LEN - 1  # longest prompt of a request that generates, because one token is reserved for the output
# By path, and by form of the prompt if the path has two forms: the request's body, and the number of prompt tokens that are sent
BODIES: dict[str, tuple[dict[str, Any], int]] = {
    "/v1/chat/completions": ({"model": MODEL, "messages": [{"role": "user", "content": LONG}]}, MAX_PROMPT),
    "/v1/completions": ({"model": MODEL, "prompt": LONG}, MAX_PROMPT),
    "/v1/completions of ids": ({"model": MODEL, "prompt": [ids_of(LONG)]}, MAX_PROMPT),
    "/v1/embeddings": ({"model": MODEL, "input": LONG}, CONTEXT_LEN),
    "/generate": ({"text": LONG}, MAX_PROMPT),
    "/generate of ids": ({"input_ids": ids_of(LONG)}, MAX_PROMPT),
    "/encode": ({"text": LONG}, CONTEXT_LEN),
}


def set_auto_truncates(workers: list[FakeWorker]) -> None:
    for worker in workers:
        worker.info.auto_truncates = True


@pytest.fixture(scope="module")
def truncating() -> Iterator[System]:
    with System(workers=2, configure=set_auto_truncates) as system:
        yield system


def last_submit(system: System) -> Any:
    return max((submit for host in system.workers for submit in host.servicer.submits), key=lambda submit: submit.handle)


def test_every_endpoint_sends_the_worker_only_the_first_tokens_of_a_long_prompt(truncating: System) -> None:
    before = truncating.metric("rootstock_gateway_truncated_prompts_total")
    for name, (body, max_prompt) in BODIES.items():
        answer = truncating.post(name.split()[0], body)
        assert answer.status_code == 200, f"{name}: {answer.text}"
        submit = last_submit(truncating)
        sent = list(submit.prompt_ids)
        all_ids = ids_of(f"<user>{LONG}") if "chat" in name else ids_of(LONG)
        assert sent == all_ids[:max_prompt], name
        assert submit.sampling.max_new_tokens == 1
        content = answer.json()
        usage = content["meta_info"] if "meta_info" in content else content["usage"]
        assert usage["prompt_tokens"] == max_prompt
    assert truncating.metric("rootstock_gateway_truncated_prompts_total") == before + len(BODIES)


def test_prompt_within_the_context_is_not_truncated(truncating: System) -> None:
    assert truncating.complete(prompt="x" * MAX_PROMPT).status_code == 200
    assert len(last_submit(truncating).prompt_ids) == MAX_PROMPT
    assert truncating.complete(prompt="").json()["error"]["param"] == "prompt"


def test_echo_and_logprobs_cover_the_truncated_prompt(truncating: System) -> None:
    answer = truncating.complete(prompt=[LONG, "short"], echo=True, logprobs=1, max_tokens=5).json()
    truncated, short = answer["choices"]
    assert truncated["text"] == LONG[:MAX_PROMPT] + "H" and short["text"] == "shortHello"
    values = truncated["logprobs"]["token_logprobs"]
    assert len(values) == MAX_PROMPT + 1 and values[1:MAX_PROMPT] == [logprob_of(ord(char)) for char in LONG[1:MAX_PROMPT]]
    assert truncating.complete(prompt=LONG, return_token_ids=True).json()["prompt_token_ids"] == ids_of(LONG)[:MAX_PROMPT]


def test_logprob_start_len_is_refused_when_beyond_the_truncated_prompt(truncating: System) -> None:
    body = {"text": LONG, "return_logprob": True}
    answer = truncating.post("/generate", {**body, "logprob_start_len": MAX_PROMPT - 1})
    assert [entry[1] for entry in answer.json()["meta_info"]["input_token_logprobs"]] == [ord(LONG[MAX_PROMPT - 1])]
    refused = truncating.post("/generate", {**body, "logprob_start_len": MAX_PROMPT})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprob_start_len")


def test_invalid_token_id_in_the_part_that_truncation_removes_is_refused(truncating: System) -> None:
    refused = truncating.complete(prompt=[*ids_of(LONG), -1])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_session_turn_is_not_truncated(truncating: System) -> None:
    for path, body in (("/generate", {"text": LONG}), ("/v1/completions", {"model": MODEL, "prompt": LONG})):
        refused = truncating.post(path, {**body, "session_params": {"id": "s"}})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_second_worker_receives_the_same_truncated_prompt() -> None:
    with System(workers=2, configure=set_auto_truncates) as system:
        system.allow(0)
        with_ids = {"input_ids": ids_of(LONG), "stream": True}
        client = RawClient(system, "/generate", {"model": MODEL, **with_ids})
        wait_until(lambda: sum(system.submits()) == 1, "the first worker")
        first = system.submits().index(1)
        system.call(system.workers[first].stop())
        wait_until(lambda: system.submits()[1 - first] == 1, "the other worker")
        system.allow(None)
        client.read_to_end_of_stream()
        sent = [list(host.servicer.submits[0].prompt_ids) for host in system.workers]
        assert sent[0] == sent[1] == ids_of(LONG)[:MAX_PROMPT]


def test_long_prompt_is_refused_unless_all_workers_truncate() -> None:
    def first_truncates(workers: list[FakeWorker]) -> None:
        workers[0].info.auto_truncates = True

    with System(workers=2, configure=first_truncates) as system:
        for name, (body, _) in BODIES.items():
            refused = system.post(name.split()[0], body)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (400, "context_length_exceeded"), name
            assert "maximum context length is " in error["message"]


class TestContextBudget:
    MODEL = ModelInfo("m", 3 * BLOCK_TOKENS, 1000, auto_truncates=True)

    def test_truncated_prompt_has_the_block_hashes_of_the_remaining_tokens(self) -> None:
        ids = list(range(300))
        prompt = PromptInput(ids, "text", block_hashes(b"\0" * HASH_BYTES, ids))
        for budget, length in (
            (budget_with_output(self.MODEL), 3 * BLOCK_TOKENS - 1),
            (budget_without_output(self.MODEL), 3 * BLOCK_TOKENS),
        ):
            truncated = budget.fit(prompt, "prompt")
            assert (list(truncated.ids), truncated.text, truncated.num_cut) == (ids[:length], None, 300 - length)
            assert truncated.block_hashes == block_hashes(b"\0" * HASH_BYTES, ids[:length])

    def test_context_budget_returns_a_prompt_within_the_budget_unchanged(self) -> None:
        prompt = PromptInput([1] * (3 * BLOCK_TOKENS - 1), "text")
        assert budget_with_output(self.MODEL).fit(prompt, "prompt") is prompt
