"""Models with windows and recurrent layers through the whole system: prefix hits, tiers, KV transfers, and freed memory."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx
import pytest

from rootstock_llm.services.local.ports import free_ports
from rootstock_llm.services.worker.core.tiers.page_keys import KEY_BYTES, SECRET_BYTES, PageKeys
from tests.e2e.system import DEMO, System, wait_until
from tests.exec.tiny_models import GEMMA3, TinyModel
from tests.night import NIGHTLY
from tests.services.redis_server import RedisServer, redis_server

CONTEXT, VOCAB, PAGE = 4096, 1280, 16
SIZES = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
HYBRID = "demo-hybrid"  # the model of the repository, with all three kinds of caches
WHO = "I am the Rootstock demo model. I can add, count, copy, spell and write small JSON."
RANDOM_MODELS = {
    "gemma3": TinyModel("Gemma3", GEMMA3 | SIZES | {"sliding_window": 64}, config="Gemma3TextConfig"),
}


@dataclass(frozen=True)
class Served:
    """A running system with one model."""

    name: str
    system: System

    def generate(self, ids: Sequence[int], max_new_tokens: int = 1, **params: Any) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **params}
        status, answer = self.system.post("/generate", {"input_ids": list(ids), "sampling_params": params})
        assert status == 200, answer
        return answer

    def cached(self, ids: Sequence[int], max_new_tokens: int = 1) -> int:
        found: int = self.generate(ids, max_new_tokens)["meta_info"]["cached_tokens"]
        return found

    def metric(self, name: str) -> float:
        return self.system.metric("worker-0", name)


@pytest.fixture(scope="module", params=[HYBRID, *RANDOM_MODELS])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("groups") / request.param
    if request.param == HYBRID:
        folder.symlink_to(DEMO.parent / HYBRID)
    else:
        RANDOM_MODELS[request.param].build(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO / name, folder / name)
    with System(folder.parent / "logs", model=str(folder), max_total_tokens=65_536) as running:
        yield Served(request.param, running)


def prompt(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


def test_repeated_prompt_is_cached_up_to_its_last_page(served: Served) -> None:
    ids = prompt(300, 1)
    assert [served.cached(ids), served.cached(ids)] == [0, 288]


def test_third_prompt_reuses_the_prefix_that_two_earlier_prompts_share(served: Served) -> None:
    shared = prompt(2400, 2)
    cached = [served.cached(shared + prompt(count, count)) for count in (40, 400, 1300)]
    assert cached[0] == 0 and cached[2] >= 2384


def test_each_turn_of_a_chat_recomputes_at_most_one_known_page(served: Served) -> None:
    ids, known = prompt(50, 3), 0
    for turn in range(8):
        answer = served.generate(ids, max_new_tokens=30)
        assert answer["meta_info"]["cached_tokens"] >= known - PAGE
        ids += answer["output_ids"]
        known = len(ids)
        ids += prompt(23, turn)


def test_choices_of_one_prompt_share_its_pages(served: Served) -> None:
    ids, before = prompt(300, 4), served.metric("sglang:cached_tokens_total")
    answers = served.system.post(
        "/v1/completions", {"model": served.name, "prompt": ids, "n": 8, "max_tokens": 4, "temperature": 1, "seed": 7}
    )
    assert answers[0] == 200 and len(answers[1]["choices"]) == 8
    computed = 8 * 300 - (served.metric("sglang:cached_tokens_total") - before)
    assert computed <= 412


def test_no_unit_of_a_cache_group_stays_in_use_when_the_requests_have_ended(served: Served) -> None:
    totals = {"swa": "sglang:max_total_num_tokens_swa", "mamba": "rootstock_worker_states"}
    quarantined = {"swa": "rootstock_worker_window_quarantined_tokens", "mamba": "rootstock_worker_quarantined_states"}
    for name in ("swa", "mamba") if served.name == HYBRID else ("swa",):
        wait_until(lambda name=name: served.metric(f"sglang:{name}_used_tokens") == 0, 30, "all units to be free or cached")
        free, evictable = (served.metric(f"sglang:{name}_{kind}_tokens") for kind in ("available", "evictable"))
        assert free + evictable == served.metric(totals[name]) and evictable > 0
        assert served.metric(quarantined[name]) == 0


def test_hybrid_demo_model_with_ngram_drafts_gives_the_same_texts_and_recomputes_at_most_32_tokens(tmp_path: Path) -> None:
    """Each turn of the chats repeats words, so that draft tokens are accepted."""
    texts, accepted = [], 0.0
    model = str(DEMO.parent / HYBRID)
    for flags in ("", "--speculative-algorithm ngram --speculative-num-steps 7 --no-speculative-adaptive"):
        with System(tmp_path / (flags[2:8] or "plain"), model=model, max_total_tokens=16_384, worker_flags=flags) as system:
            served, found = Served(HYBRID, system), []
            for chat in range(3):
                ids, known = prompt(40, chat) * 2, 0
                for turn in range(6):
                    answer = served.generate(ids, max_new_tokens=40)
                    assert answer["meta_info"]["cached_tokens"] >= known - 2 * PAGE
                    ids += answer["output_ids"]
                    known = len(ids)
                    ids += prompt(7, turn)
                found.append(ids)
            texts.append(found)
            accepted = served.metric("rootstock_worker_accepted_tokens_total")
    assert texts[0] == texts[1] and accepted > 20


@pytest.mark.parametrize("served", [HYBRID], indirect=True)
def test_hybrid_demo_model_answers_questions(served: Served) -> None:
    questions = {"Repeat: river": "river", "Count from 3 to 9.": "3, 4, 5, 6, 7, 8, 9", "Who are you?": WHO}
    for question, answer in questions.items():
        body = {"model": served.name, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 64}
        assert served.system.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"] == answer


PROMPTS = [prompt(400 + 7 * number, 50 + number) for number in range(5)]
PAGE_TOKENS = sum((len(ids) - 1) // PAGE * PAGE for ids in PROMPTS)  # tokens before the last possible hit of each prompt
HYBRID_FLAGS = {"model": str(DEMO.parent / HYBRID), "log_level": "info"}
MISSED = {"window": "rootstock_worker_window_missed_tokens_total", "state": "rootstock_worker_state_missed_tokens_total"}


@dataclass(frozen=True)
class PlainRun:
    """Two rounds of PROMPTS with the hybrid model on a deterministic server without tiers.

    The server has pages for all prompts, but window units and states for only one or two prompts.
    """

    outputs: list[list[int]]  # output ids of the first round
    outputs_again: list[list[int]]
    cached_again: list[int]  # cached tokens of the second round
    missed: dict[str, float]  # tokens with cached pages that were computed again, by cache group


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> PlainRun:
    few = "--max-running-requests 1 --chunked-prefill-size 64 --swa-full-tokens-ratio 0.1 --max-mamba-cache-size 4"
    flags = f"--deterministic --context-len 1024 {few}"
    with System(tmp_path_factory.mktemp("plain"), worker_flags=flags, max_total_tokens=4096, **HYBRID_FLAGS) as system:
        served = Served(HYBRID, system)
        first, again = ([served.generate(ids, 20) for ids in PROMPTS] for _ in range(2))
        return PlainRun(
            [answer["output_ids"] for answer in first],
            [answer["output_ids"] for answer in again],
            [answer["meta_info"]["cached_tokens"] for answer in again],
            {group: served.metric(name) for group, name in MISSED.items()},
        )


@pytest.fixture(scope="module")
def plain_outputs(plain_run: PlainRun) -> list[list[int]]:
    return plain_run.outputs


def test_evicted_windows_and_states_are_computed_again_and_counted(plain_run: PlainRun) -> None:
    assert plain_run.outputs_again == plain_run.outputs
    assert plain_run.cached_again == [0] * len(PROMPTS)
    assert plain_run.missed == {"window": PAGE_TOKENS, "state": PAGE_TOKENS}


def outputs_and_tiers(served: Served) -> tuple[list[list[int]], list[dict[str, int]]]:
    """Returns the output ids of PROMPTS, and the cached tokens of each prompt by tier."""
    answers = [served.generate(ids, 20) for ids in PROMPTS]
    return [answer["output_ids"] for answer in answers], [
        answer["meta_info"].get("cached_tokens_details", {}) for answer in answers
    ]


def test_hybrid_prompts_are_read_from_host_and_files_with_equal_outputs(tmp_path: Path, plain_outputs: list[list[int]]) -> None:
    """The pool has pages for two prompts."""
    tiers = f"--enable-hierarchical-cache --hicache-size 1 --hicache-storage-backend file --hicache-storage-dir {tmp_path / 'kv'}"
    flags = f"--deterministic --max-running-requests 4 --context-len 1024 {tiers}"
    with System(tmp_path / "tiers", worker_flags=flags, max_total_tokens=1024, **HYBRID_FLAGS) as system:
        served = Served(HYBRID, system)
        for tier in ("", "host", "storage"):
            outputs, found = outputs_and_tiers(served)
            assert outputs == plain_outputs
            if tier:
                assert [sum(each.values()) for each in found] == [(len(ids) - 1) // PAGE * PAGE for ids in PROMPTS]
                assert sum(each[tier] for each in found) > sum(map(len, PROMPTS)) // 2
            if tier == "host":
                system.kill("worker-0")
                system.start("worker-0")
                system.wait_ready()
        assert system.metric("worker-0", "rootstock_worker_failed_copies_total") == 0
        assert '"level":"error"' not in system.log("worker-0"), "the worker must log no failed step and no broken invariant"


def stored_states(redis: RedisServer, secret: bytes) -> list[list[bytes]]:
    """Returns the Redis keys of the parts of each state. States are the second cache group of the hybrid model."""
    keys = PageKeys(blake2b(secret, digest_size=SECRET_BYTES).digest(), b"", PAGE)
    stored = {name[-KEY_BYTES:]: name for name in redis.client.keys(b"pages:*:p:*")}
    most = 64  # more than the parts of a state
    found = [[stored[part] for part in keys.parts(page_key, 2, most) if part in stored] for page_key in stored]
    return [parts for parts in found if parts]


@pytest.mark.skipif(not NIGHTLY, reason="takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1")
def test_states_deleted_from_redis_are_computed_again_and_counted(tmp_path: Path, plain_outputs: list[list[int]]) -> None:
    """The worker does not know that the states are deleted, so it reads the pages and the windows first."""
    secret, (admin_port,) = bytes(range(SECRET_BYTES)), free_ports(1)
    (tmp_path / "secret").write_bytes(secret)
    num_states = 2 * len(PROMPTS)  # at the last page end of each prompt and of each output
    with redis_server() as redis:
        tiers = f"--enable-hierarchical-cache --hicache-size 1 --hicache-storage-backend redis --hicache-storage-url {redis.url}"
        flags = f"--deterministic --context-len 1024 {tiers} --hicache-storage-secret-file {tmp_path / 'secret'}"
        more = {"max_total_tokens": 4096, "admin_port": admin_port, **HYBRID_FLAGS}
        with System(tmp_path / "system", worker_flags=flags, **more) as system:
            served, missed = Served(HYBRID, system), []
            assert outputs_and_tiers(served)[0] == plain_outputs
            wait_until(lambda: len(stored_states(redis, secret)) == num_states, 60, "all states to be stored")
            for is_deleted in (False, True):
                if is_deleted:
                    redis.client.delete(*(part for parts in stored_states(redis, secret) for part in parts))
                body = {"tiers": ["device", "host"]}
                httpx.post(f"http://127.0.0.1:{admin_port}/flush_cache", json=body, timeout=60).raise_for_status()
                outputs, found = outputs_and_tiers(served)
                assert outputs == plain_outputs
                assert sum(each.get("storage", 0) for each in found) == (0 if is_deleted else PAGE_TOKENS)
                missed.append({group: served.metric(name) for group, name in MISSED.items()})
            assert missed == [{"window": 0, "state": 0}, {"window": 0, "state": PAGE_TOKENS}]
            assert '"level":"error"' not in system.log("worker-0"), "the worker must log no failed step and no broken invariant"


def test_decode_worker_reads_windows_and_states_of_hybrid_prompts(tmp_path: Path, plain_outputs: list[list[int]]) -> None:
    more = {"gateway_flags": "--disaggregation-min-tokens 24", "max_total_tokens": 16_384, **HYBRID_FLAGS}
    with System(tmp_path, prefill_workers=1, decode_workers=1, worker_flags="--deterministic", **more) as system:
        wait_until(lambda: system.metric("gateway", "rootstock_gateway_connected", service="worker") == 2, 120, "both workers")
        outputs, _ = outputs_and_tiers(Served(HYBRID, system))
        assert outputs == plain_outputs
        pages = sum((len(ids) - 1) // PAGE for ids in PROMPTS)
        assert system.metric("decode-0", "rootstock_worker_pulled_tokens_total") == pages * PAGE
        assert system.metric("decode-0", "rootstock_worker_refused_pulls_total") == 0
        cached = system.metric("decode-0", "sglang:cached_tokens_total")
        assert cached == pages * PAGE, "the decode worker computes only the last page of each prompt"
