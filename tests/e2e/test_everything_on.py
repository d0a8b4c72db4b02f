"""Every feature on at once, in a pool that is far too small, against a plain system that is asked one thing after the other:
the answers are the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.system import System, wait_until

POOL_TOKENS = 512
FLAGS = (
    "--enable-mixed-chunk --retract-interval 7 --schedule-policy lpm --enable-priority-scheduling --chunked-prefill-size 64"
    " --adaptive-chunk-rows 16 --max-extend-steps 2 --max-prefill-tokens 256 --prefill-max-requests 6 --max-running-requests 10"
    " --max-prompt-logprob-tokens 256 --eviction-policy priority --no-consecutive-prefill-overlap"
    " --schedule-conservativeness 0.3"
)
TOLERANCE = 2e-4  # float32: other chunks and other neighbours change the last digits
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["person", "company"]},
        "age": {"type": "integer"},
    },
    "required": ["name", "kind", "age"],
}
WORDS = ["stone", "garden", "lantern", "naïve", "日本語", "coral", "3,", "4,", "papel", "🙂"]


@dataclass(frozen=True)
class Ask:
    """One post after the other, each when the one before is answered."""

    kind: str
    posts: tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True)
class Essence:
    """What an answer says: exact is equal or not, numbers are close or not."""

    exact: list[Any]
    numbers: list[float]


def plain(rng: random.Random, index: int) -> Ask:
    content = rng.choice(
        ["Count from 3 to 9.", "What is 17 + 25?", f"Repeat: {phrase(rng, 5)}", f"Spell the word {rng.choice(WORDS)}."]
    )
    return chat("plain", content, rng, max_tokens=60)


def long_prompt(rng: random.Random, index: int) -> Ask:
    return chat("long", f"Repeat: {'the garden of stone ' * 30}{phrase(rng, 8)}", rng, max_tokens=24, ignore_eos=True)


def grammar(rng: random.Random, index: int) -> Ask:
    constraints: list[dict[str, Any]] = [
        {"guided_json": SCHEMA},
        {"regex": f"[a-z]{{{20 + index % 3}}}( \\d{{2}}){{1,6}}"},
        {"guided_choice": ["yes", "certainly not"]},
    ]
    return chat("grammar", f"Give the JSON for name {phrase(rng, 1)}.", rng, max_tokens=90, **constraints[index % 3])


def logprobs(rng: random.Random, index: int) -> Ask:
    return chat("logprobs", phrase(rng, 6), rng, max_tokens=24, logprobs=True, top_logprobs=3)


def sampled(rng: random.Random, index: int) -> Ask:
    return chat("sampled", phrase(rng, 6), rng, max_tokens=40, ignore_eos=True, temperature=1, seed=index, n=2)


def penalized(rng: random.Random, index: int) -> Ask:
    return chat("penalized", phrase(rng, 6), rng, max_tokens=40, ignore_eos=True, frequency_penalty=0.7, repetition_penalty=1.2)


def stopping(rng: random.Random, index: int) -> Ask:
    return chat("stopping", "Count from 3 to 9.", rng, max_tokens=40, stop=["5"], stop_regex=r"\d, 7", min_tokens=2)


def echo(rng: random.Random, index: int) -> Ask:
    body = {"model": "demo", "prompt": phrase(rng, 60), "echo": True, "logprobs": 2, "max_tokens": 4, "temperature": 0}
    return Ask("echo", (("/v1/completions", {**body, "priority": rng.randrange(-2, 3)}),))


def embedding(rng: random.Random, index: int) -> Ask:
    inputs = [phrase(rng, 3), phrase(rng, 80)]
    return Ask("embedding", (("/v1/embeddings", {"model": "demo", "input": inputs, "priority": rng.randrange(-2, 3)}),))


def session(rng: random.Random, index: int) -> Ask:
    """Three turns, of which the last branches from the first."""
    name = f"talk-{index}"
    posts: list[tuple[str, dict[str, Any]]] = [("/open_session", {"capacity_of_str_len": 0, "session_id": name})]
    for turn, parent in (("a", None), ("b", "a"), ("c", "a")):
        ids = [rng.randrange(4, 1200) for _ in range(20)]
        params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        body = {"input_ids": ids, "rid": f"{name}-{turn}", "sampling_params": params, "priority": rng.randrange(-2, 3)}
        wanted = {"id": name, "rid": f"{name}-{parent}" if parent else None}
        posts.append(("/generate", {**body, "session_params": wanted}))
    return Ask("session", (*posts, ("/close_session", {"session_id": name})))


def chat(kind: str, content: str, rng: random.Random, **options: Any) -> Ask:
    body = {"model": "demo", "messages": [{"role": "user", "content": content}], "temperature": 0, "return_token_ids": True}
    return Ask(kind, (("/v1/chat/completions", {**body, "priority": rng.randrange(-2, 3), **options}),))


def phrase(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


KINDS = [plain, plain, long_prompt, grammar, grammar, logprobs, sampled, penalized, stopping, echo, embedding, session]
ASKS = [make(random.Random(seed), seed) for seed in range(5) for make in KINDS]


def essence(answers: list[Any]) -> Essence:
    exact: list[Any] = []
    numbers: list[float] = []
    for answer in answers:
        _gather(answer, "", exact, numbers)
    return Essence(exact, numbers)


VARYING = {"id", "created", "cached_tokens", "e2e_latency", "queue_time", "num_retractions", "prompt_tokens_details"}
NUMBERS = {"logprob", "token_logprobs", "embedding", "top_logprobs"}


def _gather(value: Any, key: str, exact: list[Any], numbers: list[float]) -> None:
    """Floats below a key of NUMBERS are numbers; all else is exact, except what varies by its nature."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in VARYING:
                exact.append(name)
                _gather(inner, name if name in NUMBERS else key, exact, numbers)
    elif isinstance(value, list):
        exact.append(len(value))
        for inner in value:
            _gather(inner, key, exact, numbers)
    elif isinstance(value, float) and key in NUMBERS:
        numbers.append(value)
    else:
        exact.append(value)


async def ask_all(system: System, asks: list[Ask], at_once: int, apart_s: float = 0) -> list[list[Any]]:
    """Answers in the order of the asks, which begin `apart_s` one after the other."""
    limit = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=system.url, timeout=120, limits=httpx.Limits(max_connections=100)) as http:

        async def one(index: int, ask: Ask) -> list[Any]:
            await asyncio.sleep(index * apart_s)
            async with limit:
                return [await _post(http, path, body) for path, body in ask.posts]

        return await asyncio.gather(*(one(index, ask) for index, ask in enumerate(asks)))


async def _post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
    return answer.json() if answer.content else None


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Essence]:
    """One by one, in a system without any flag."""
    with System(tmp_path_factory.mktemp("plain"), dtype="float32") as system:
        return [essence(answers) for answers in asyncio.run(ask_all(system, ASKS, 1))]


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("crowded"), dtype="float32", max_total_tokens=POOL_TOKENS, worker_flags=FLAGS) as system:
        yield system


def shuffled(seed: int) -> list[int]:
    return random.Random(seed).sample(range(len(ASKS)), len(ASKS))


def least_urgent_first() -> list[int]:
    """So that each may displace those before it."""
    return sorted(range(len(ASKS)), key=lambda index: ASKS[index].posts[-1][1].get("priority", 0))


@pytest.mark.parametrize(
    ("order", "apart_s"), [(shuffled(1), 0), (least_urgent_first(), 0.01)], ids=["at once", "one urgent after the other"]
)
def test_sixty_mixed_requests_get_the_plain_systems_answers(
    crowded: System, expected: list[Essence], order: list[int], apart_s: float
) -> None:
    answers = asyncio.run(ask_all(crowded, [ASKS[index] for index in order], len(ASKS), apart_s))
    wrong = [ASKS[index].kind for index, got in zip(order, answers, strict=True) if not same(essence(got), expected[index])]
    assert wrong == []


def same(got: Essence, wanted: Essence) -> bool:
    close = len(got.numbers) == len(wanted.numbers) and np.allclose(got.numbers, wanted.numbers, atol=TOLERANCE, rtol=0)
    return got.exact == wanted.exact and close


def test_the_crowd_was_one(crowded: System) -> None:
    """What the answers had to survive did happen: taken back, displaced, thrown out of the cache, shared."""
    for counter, least in (
        ("sglang:num_retracted_requests_total", 20),
        ("rootstock_worker_preempted_requests_total", 1),
        ("sglang:evicted_tokens_total", POOL_TOKENS),
        ("sglang:cached_tokens_total", 1000),
    ):
        assert crowded.metric("worker-0", counter) >= least, counter
    gauges = ("sglang:num_used_tokens", "sglang:num_running_reqs", "sglang:num_queue_reqs", "rootstock_worker_sessions")
    wait_until(lambda: not any(crowded.metric("worker-0", gauge) for gauge in gauges), 5, "everything to be free")
    assert crowded.metric("worker-0", "sglang:num_aborted_requests_total") == 0
    assert '"level":"error"' not in crowded.log("worker-0"), "no step failed and no invariant broke"
