"""Requests of every kind, and the parts of their responses that do not depend on time, queueing or cached prefixes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.system import System

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
    """One or more requests. Each one is sent after the response to the previous one."""

    kind: str
    posts: tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True)
class Essence:
    """The parts of the responses to an Ask that tests compare."""

    exact: list[Any]  # values that must be equal
    numbers: list[float]  # values that must be close


def plain(rng: random.Random, index: int) -> Ask:
    content = rng.choice(
        ["Count from 3 to 9.", "What is 17 + 25?", f"Repeat: {phrase(rng, 5)}", f"Spell the word {rng.choice(WORDS)}."]
    )
    return chat("plain", content, rng, max_tokens=60)


def hot(rng: random.Random, index: int) -> Ask:
    return chat(
        "hot", phrase(rng, 6), rng, max_tokens=40, ignore_eos=True, temperature=1.3, top_p=0.95, seed=index, logprobs=True
    )


def repeated(rng: random.Random, index: int) -> Ask:
    """Returns a request with a repetitive prompt and the DRY penalty against repetitions."""
    return chat("repeated", f"Repeat: {'coral garden ' * 6}", rng, max_tokens=50, temperature=0.7, seed=index, dry_multiplier=0.8)


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


def score(rng: random.Random, index: int) -> Ask:
    body = {"query": phrase(rng, 60), "items": [phrase(rng, 2), phrase(rng, 30), "yes"], "label_token_ids": [7, 300, 9]}
    return Ask("score", (("/v1/score", {**body, "model": "demo", "priority": rng.randrange(-2, 3)}),))


def session(rng: random.Random, index: int) -> Ask:
    """Returns the requests of a session with three turns. The third turn continues the first one."""
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


KINDS = [plain, plain, long_prompt, grammar, grammar, logprobs, sampled, penalized, stopping, echo, embedding, score, session]


def asks_of(makers: Sequence[Callable[[random.Random, int], Ask]], rounds: int) -> list[Ask]:
    """Returns one Ask of each maker per round. The number of the round is the seed."""
    return [make(random.Random(seed), seed) for seed in range(rounds) for make in makers]


def essence(answers: list[Any]) -> Essence:
    exact: list[Any] = []
    numbers: list[float] = []
    for answer in answers:
        _gather(answer, "", exact, numbers)
    return Essence(exact, numbers)


VARYING = {
    "id",
    "created",
    "cached_tokens",
    "cached_tokens_details",
    "e2e_latency",
    "queue_time",
    "num_retractions",
    "prompt_tokens_details",
}
NUMBERS = {"logprob", "token_logprobs", "embedding", "top_logprobs", "scores"}


def _gather(value: Any, key: str, exact: list[Any], numbers: list[float]) -> None:
    """Adds the parts of a response to `exact` and `numbers`.

    Ignores members that are in VARYING or whose names begin with `spec_`. Floats below a member in NUMBERS go to `numbers`. Other
    values, member names and lengths of lists go to `exact`.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in VARYING and not name.startswith("spec_"):
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
    """Sends the asks `apart_s` seconds apart, with at most `at_once` in flight. Returns the responses in the order of `asks`."""
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
