"""Tests of prompts beyond the context on workers that truncate: every endpoint keeps the first tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rootstock_llm.services.gateway.api.prompts import for_a_vector, for_an_answer
from rootstock_llm.services.gateway.generation.request import ModelInfo, PromptInput
from rootstock_llm.services.shared.index.prefix_index import BLOCK_TOKENS, HASH_BYTES, block_hashes
from tests.services.gateway.fakes import CONTEXT_LEN, MODEL, FakeWorker, ids_of, logprob_of
from tests.services.gateway.system import RawClient, System, wait_until

LONG = "".join(chr(97 + i % 26) for i in range(CONTEXT_LEN + 100))
MOST = CONTEXT_LEN - 1
BODIES: dict[str, tuple[dict[str, Any], int]] = {
    "/v1/chat/completions": ({"model": MODEL, "messages": [{"role": "user", "content": LONG}]}, MOST),
    "/v1/completions": ({"model": MODEL, "prompt": LONG}, MOST),
    "/v1/completions of ids": ({"model": MODEL, "prompt": [ids_of(LONG)]}, MOST),
    "/v1/embeddings": ({"model": MODEL, "input": LONG}, CONTEXT_LEN),
    "/generate": ({"text": LONG}, MOST),
    "/generate of ids": ({"input_ids": ids_of(LONG)}, MOST),
    "/encode": ({"text": LONG}, CONTEXT_LEN),
}


def cut_all(workers: list[FakeWorker]) -> None:
    for worker in workers:
        worker.info.auto_truncates = True


@pytest.fixture(scope="module")
def cutting() -> Iterator[System]:
    with System(workers=2, configure=cut_all) as system:
        yield system


def last_submit(system: System) -> Any:
    return max((submit for host in system.workers for submit in host.servicer.submits), key=lambda submit: submit.handle)


def test_every_endpoint_keeps_the_first_tokens(cutting: System) -> None:
    before = cutting.metric("rootstock_gateway_truncated_prompts_total")
    for name, (body, most) in BODIES.items():
        answer = cutting.post(name.split()[0], body)
        assert answer.status_code == 200, f"{name}: {answer.text}"
        submit = last_submit(cutting)
        sent = list(submit.prompt_ids)
        whole = ids_of(f"<user>{LONG}") if "chat" in name else ids_of(LONG)
        assert sent == whole[:most], name
        assert submit.sampling.max_new_tokens == 1
        content = answer.json()
        usage = content["meta_info"] if "meta_info" in content else content["usage"]
        assert usage["prompt_tokens"] == most
    assert cutting.metric("rootstock_gateway_truncated_prompts_total") == before + len(BODIES)


def test_fitting_prompt_is_unchanged(cutting: System) -> None:
    assert cutting.complete(prompt="x" * MOST).status_code == 200
    assert len(last_submit(cutting).prompt_ids) == MOST
    assert cutting.complete(prompt="").json()["error"]["param"] == "prompt"


def test_echo_and_logprobs_cover_the_truncated_prompt(cutting: System) -> None:
    answer = cutting.complete(prompt=[LONG, "short"], echo=True, logprobs=1, max_tokens=5).json()
    cut, short = answer["choices"]
    assert cut["text"] == LONG[:MOST] + "H" and short["text"] == "shortHello"
    values = cut["logprobs"]["token_logprobs"]
    assert len(values) == MOST + 1 and values[1:MOST] == [logprob_of(ord(char)) for char in LONG[1:MOST]]
    assert cutting.complete(prompt=LONG, return_token_ids=True).json()["prompt_token_ids"] == ids_of(LONG)[:MOST]


def test_logprob_start_counts_in_the_truncated_prompt(cutting: System) -> None:
    body = {"text": LONG, "return_logprob": True}
    answer = cutting.post("/generate", {**body, "logprob_start_len": MOST - 1})
    assert [entry[1] for entry in answer.json()["meta_info"]["input_token_logprobs"]] == [ord(LONG[MOST - 1])]
    refused = cutting.post("/generate", {**body, "logprob_start_len": MOST})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprob_start_len")


def test_ids_beyond_the_cut_are_checked(cutting: System) -> None:
    refused = cutting.complete(prompt=[*ids_of(LONG), -1])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_session_turn_is_not_truncated(cutting: System) -> None:
    for path, body in (("/generate", {"text": LONG}), ("/v1/completions", {"model": MODEL, "prompt": LONG})):
        refused = cutting.post(path, {**body, "session_params": {"id": "s"}})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_second_worker_gets_the_same_truncated_prompt() -> None:
    with System(workers=2, configure=cut_all) as system:
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
        assert sent[0] == sent[1] == ids_of(LONG)[:MOST]


def test_prompt_is_refused_unless_all_workers_truncate() -> None:
    def cut_one(workers: list[FakeWorker]) -> None:
        workers[0].info.auto_truncates = True

    with System(workers=2, configure=cut_one) as system:
        for name, (body, _) in BODIES.items():
            refused = system.post(name.split()[0], body)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (400, "context_length_exceeded"), name
            assert "maximum context length is " in error["message"]


class TestRoom:
    MODEL = ModelInfo("m", 3 * BLOCK_TOKENS, 1000, auto_truncates=True)

    def test_truncated_prompt_keeps_the_block_hashes_of_the_beginning(self) -> None:
        ids = list(range(300))
        prompt = PromptInput(ids, "text", block_hashes(b"\0" * HASH_BYTES, ids))
        for budget, left in ((for_an_answer(self.MODEL), 3 * BLOCK_TOKENS - 1), (for_a_vector(self.MODEL), 3 * BLOCK_TOKENS)):
            cut = budget.fit(prompt, "prompt")
            assert (list(cut.ids), cut.text, cut.num_cut) == (ids[:left], None, 300 - left)
            assert cut.block_hashes == block_hashes(b"\0" * HASH_BYTES, ids[:left])

    def test_fitting_prompt_is_returned_unchanged(self) -> None:
        prompt = PromptInput([1] * (3 * BLOCK_TOKENS - 1), "text")
        assert for_an_answer(self.MODEL).fit(prompt, "prompt") is prompt
