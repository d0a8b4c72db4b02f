"""Requests to which two checkouts must respond equally: each feature on each route that has it, streamed and whole."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.same_answers.apis import (
    CHAT,
    CHATS,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    PATHS,
    RESPONSES,
    Json,
    body_of,
    streamed,
    tool_of,
)

WORDS = ("stone", "garden", "lantern", "naïve", "日本語", "coral", "papel", "🌱", "Ça va", "yellow", "7,", "river")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["person", "company"]},
        "age": {"type": "integer"},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
PATTERNS = ("[a-z]{6,12}( \\d{2}){1,3}", "(yes|no|certainly not)[.!]", "\\d{3}-[A-F]{2,5}")
SEVERAL = "several outputs"
CITIES = ("Lima", "Oslo", "Kyoto", "Quito")


@dataclass(frozen=True, slots=True)
class Case:
    feature: str  # name in MAKERS
    path: str  # route, one of PATHS
    body: Json

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


def corpus(seed: int, num_requests: int, without: Collection[str] = ()) -> list[Case]:
    """Returns the cases in a fixed order that mixes routes and features.

    Each route gets the same number of cases. The cases of a route cycle through its features. The cases of a feature alternate
    between whole and streamed.

    Args:
        without: Names of features to leave out.
    """
    per_path = -(-num_requests // len(PATHS))
    by_path = [_cases_of(path, seed, per_path, without) for path in PATHS]
    return [case for row in zip(*by_path, strict=True) for case in row][:num_requests]


def features_of(path: str) -> list[str]:
    return [feature for feature, (paths, _) in MAKERS.items() if path in paths]


def _cases_of(path: str, seed: int, count: int, without: Collection[str]) -> list[Case]:
    features = [feature for feature in features_of(path) if feature not in without]
    turns = ((feature, turn) for turn in itertools.count() for feature in features)
    cases = []
    for number, (feature, turn) in enumerate(itertools.islice(turns, count)):
        rng = random.Random(f"{seed} {path} {number}")
        body = MAKERS[feature][1](path, rng)
        cases.append(Case(feature, path, streamed(path, body) if turn % 2 else body))
    return cases


def _phrase(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def _question(rng: random.Random) -> str:
    first, second = rng.randrange(10, 60), rng.randrange(10, 40)
    return rng.choice(
        [
            f"What is {first} + {second}?",
            f"Count from {second} to {second + 9}.",
            f"Repeat: {_phrase(rng, 5)}",
            f"Spell the word {rng.choice(WORDS[:3])}.",
            f"Give the JSON for name Ada, age {first}.",
        ]
    )


def _greedy(path: str, rng: random.Random) -> Json:
    return body_of(path, _question(rng), rng.randrange(1, 40))


def _seeded(path: str, rng: random.Random) -> Json:
    """Returns a request with a seed. /v1/messages has no seed, so top_k 1 makes its output repeatable."""
    if path == MESSAGES:
        return body_of(path, _question(rng), 24, temperature=1.0, top_k=1, top_p=0.9)
    cut: Json = rng.choice([{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_n_sigma": 1.5}, {}])
    name = "sampling_seed" if path == GENERATE else "seed"
    given: Json = {name: rng.randrange(1 << 31), "temperature": rng.choice([0.7, 1.0, 1.4]), "ignore_eos": True, **cut}
    return body_of(path, _phrase(rng, 6), 32, **given)


def _stop(path: str, rng: random.Random) -> Json:
    if path == MESSAGES:
        return body_of(path, "Count from 3 to 19.", 40, stop_sequences=rng.choice([["7"], [", 1", "9"], ["never"]]))
    given: Json = rng.choice(
        [
            {"stop": ["7"]},
            {"stop": ["never", "8, 9"], "no_stop_trim": True},
            {"stop_token_ids": [25, 26]},
            {"stop_regex": "\\d, 1\\d"},
            {"stop": "5", "min_tokens": 2} if path != GENERATE else {"stop": "5", "min_new_tokens": 2},
            {"stop": "9"} if path in (GENERATE, RESPONSES) else {"stop": "9", "include_stop_str_in_output": True},
        ]
    )
    if path == RESPONSES:
        given.pop("min_tokens", None)
    return body_of(path, "Count from 3 to 19.", 40, **given)


def _penalties(path: str, rng: random.Random) -> Json:
    given: Json = rng.choice(
        [
            {"frequency_penalty": 0.7, "presence_penalty": -0.3},
            {"repetition_penalty": 1.3},
            {"logit_bias": {"25": 3.0, "19": -100}},
            {"dry_multiplier": 0.8, "dry_allowed_length": 1},
            {"banned_token_ids": [19, 20, 21]},
            {"allowed_token_ids": list(range(19, 29))},
        ]
    )
    return body_of(path, f"Repeat: {_phrase(rng, 2)} {_phrase(rng, 2)}", 24, ignore_eos=True, **given)


def _schema(path: str, rng: random.Random) -> Json:
    prompt, pattern = f"Give the JSON for name {rng.choice(WORDS[:3])}.", rng.choice(PATTERNS)
    named = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
    ebnf = 'root ::= "a" [0-9]+ ("," [0-9]+){1,3}'
    match path:
        case _ if path == MESSAGES:
            return body_of(path, prompt, 80, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
        case _ if path == RESPONSES:
            return body_of(path, prompt, 80, text={"format": rng.choice([named, {"type": "json_object"}])})
        case _ if path == GENERATE:
            choices: list[Json] = [{"json_schema": '{"type": "array", "items": {"type": "integer"}, "maxItems": 5}'}]
            return body_of(path, prompt, 60, **rng.choice([*choices, {"regex": pattern}, {"ebnf": ebnf}]))
        case _:
            given: Json = rng.choice(
                [
                    {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
                    {"response_format": {"type": "json_object"}},
                    {"guided_regex": pattern},
                    {"guided_choice": ["yes", "certainly not"]},
                    {"guided_grammar": ebnf},
                ]
            )
            return body_of(path, prompt, 80, **given)


def _logprobs(path: str, rng: random.Random) -> Json:
    most, prompt = rng.randrange(4), _question(rng)
    match path:
        case _ if path == CHAT:
            return body_of(path, prompt, 16, logprobs=True, top_logprobs=most)
        case _ if path == COMPLETIONS:
            return body_of(path, prompt, 16, logprobs=most, echo=rng.random() < 0.5)
        case _ if path == RESPONSES:
            return body_of(path, prompt, 16, top_logprobs=most, include=["message.output_text.logprobs"])
        case _:
            wanted = {"return_logprob": True, "top_logprobs_num": most, "logprob_start_len": rng.choice([-1, 0, 2])}
            return {**body_of(path, prompt, 16), **wanted, "return_text_in_logprobs": True, "token_ids_logprob": [19, 25]}


def _tools(path: str, rng: random.Random) -> Json:
    city = rng.choice(CITIES)
    tools = [
        tool_of(path, "get_mayor", "Get the mayor of a city.", "city"),
        tool_of(path, "get_age", "Get the age of a person.", "person"),
    ]
    by_path: dict[str, list[Any]] = {
        CHAT: ["auto", "required", "none", {"type": "function", "function": {"name": "get_age"}}],
        MESSAGES: [{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "get_age"}],
        RESPONSES: ["auto", "required", "none", {"type": "function", "name": "get_age"}],
    }
    question = rng.choice([f"What is the mayor of {city}?", f"What is the age of the mayor of {city}?", "What is 17 + 25?"])
    return {**body_of(path, question, 90), "tools": tools, "tool_choice": rng.choice(by_path[path])}


def _tool_results(path: str, rng: random.Random) -> Json:
    """Returns a conversation that contains a tool call and its result."""
    city, mayor = rng.choice(CITIES), rng.choice(["Ada", "Boris", "Yuki"])
    question, arguments = f"What is the mayor of {city}?", f'{{"city": "{city}"}}'
    body = {**body_of(path, question, 60), "tools": [tool_of(path, "get_mayor", "Get the mayor of a city.", "city")]}
    if path == CHAT:
        call = {"id": "call_1", "type": "function", "function": {"name": "get_mayor", "arguments": arguments}}
        turns: list[Json] = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        return {**body, "messages": [*body["messages"], *turns, {"role": "tool", "tool_call_id": "call_1", "content": mayor}]}
    if path == MESSAGES:
        call = {"type": "tool_use", "id": "toolu_1", "name": "get_mayor", "input": {"city": city}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": mayor}
        turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        return {**body, "messages": [*body["messages"], *turns]}
    items = [
        {"role": "user", "content": question},
        {"type": "function_call", "call_id": "call_1", "name": "get_mayor", "arguments": arguments},
        {"type": "function_call_output", "call_id": "call_1", "output": mayor},
    ]
    return {**body, "input": items}


def _turns(path: str, rng: random.Random) -> Json:
    """Returns a conversation with a system message and several turns."""
    body, system = body_of(path, "", 24), "You are the Rootstock demo model."
    turns: list[Json] = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada."},
        {"role": "user", "content": rng.choice(["What is my name?", _question(rng)])},
    ]
    if path == MESSAGES:
        return {**body, "messages": turns, "system": system}
    if path == RESPONSES:
        return {**body, "input": turns, "instructions": system}
    return {**body, "messages": [{"role": "system", "content": system}, *turns]}


def _several(path: str, rng: random.Random) -> Json:
    """Returns a request for several outputs: choices of one prompt, or several prompts."""
    seed, temperature = rng.randrange(1 << 20), rng.choice([0, 1.0])
    name = "sampling_seed" if path == GENERATE else "seed"
    body = body_of(path, _phrase(rng, 8), 16, n=rng.choice([2, 3]), ignore_eos=True, **{name: seed, "temperature": temperature})
    if path == CHAT or rng.random() < 0.5:
        return body
    return {**body, {COMPLETIONS: "prompt", GENERATE: "text"}[path]: [_phrase(rng, 4), _question(rng)]}


def _token_ids(path: str, rng: random.Random) -> Json:
    ids = [rng.randrange(4, 1200) for _ in range(rng.choice([3, 40, 200]))]
    body = body_of(path, "", 16, ignore_eos=True)
    if path == COMPLETIONS:
        return {**body, "prompt": ids}
    return {**{name: value for name, value in body.items() if name != "text"}, "input_ids": ids}


def _long_prompt(path: str, rng: random.Random) -> Json:
    """Returns a prompt of more than one prefill chunk. All long prompts share a prefix."""
    return body_of(path, f"Repeat: {'the garden of stone ' * 120}{_phrase(rng, 8)}", 12)


SAMPLED = (CHAT, COMPLETIONS, RESPONSES, GENERATE)
MAKERS: dict[str, tuple[tuple[str, ...], Callable[[str, random.Random], Json]]] = {
    "greedy": (PATHS, _greedy),
    "seeded": (PATHS, _seeded),
    "stop": (PATHS, _stop),
    "penalties": (SAMPLED, _penalties),
    "schema": (PATHS, _schema),
    "logprobs": (SAMPLED, _logprobs),
    "tools": (CHATS, _tools),
    "tool results": (CHATS, _tool_results),
    "turns": (CHATS, _turns),
    SEVERAL: ((CHAT, COMPLETIONS, GENERATE), _several),
    "token ids": ((COMPLETIONS, GENERATE), _token_ids),
    "long prompt": (PATHS, _long_prompt),
}
