"""Requests of every kind with a repeatable result, and the parts of their responses that tests compare."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from tests.e2e.fleet import MODEL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = ["stone", "garden", "lantern", "naïve", "日本語", "coral", "papel", "🙂", "winter", "Ça va"]
NAMES = ["Ada", "Boris", "Clara", "Diego", "Emma", "Felix"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "city": {"enum": ["Oslo", "Lima"]}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    path: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of a response that must be equal with and without faults of the fleet."""

    choices: tuple[tuple[str, str, int], ...]  # by choice index: text, finish reason, number of tokens with log probabilities
    prompt_tokens: int
    completion_tokens: int  # output tokens of all choices, including tokens from a worker that a choice has left


class BadAnswer(Exception):
    """Raised if a response is an error or incomplete. The message names the fault."""


def answer_of(status: int, content: bytes, streamed: bool) -> Answer:
    """Returns the comparable parts of a response.

    Raises:
        BadAnswer: the status is not 200, an event is an error, a choice has two ends, or a choice or the stream has none.
    """
    if status != 200:
        raise BadAnswer(f"HTTP {status}: {content[:300].decode(errors='replace')}")
    events = _events(content) if streamed else [orjson.loads(content)]
    texts: dict[int, list[str]] = {}
    reasons: dict[int, str] = {}
    logprobs: dict[int, int] = {}
    usage: dict[str, int] = {}
    for event in events:
        if "error" in event:
            raise BadAnswer(f"the stream has an error event: {event['error']}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            index, message = choice["index"], choice.get("delta") or choice.get("message") or choice
            texts.setdefault(index, []).append(message.get("text") or message.get("content") or "")
            if choice.get("finish_reason"):
                if index in reasons:
                    raise BadAnswer(f"choice {index} has two finish reasons")
                reasons[index] = choice["finish_reason"]
            logprobs[index] = logprobs.get(index, 0) + len((choice.get("logprobs") or {}).get("content") or ())
    if texts.keys() != reasons.keys():
        raise BadAnswer(f"choices {sorted(texts.keys() - reasons.keys())} have no finish reason")
    choices = tuple(("".join(texts[index]), reasons[index], logprobs[index]) for index in sorted(texts))
    return Answer(choices, usage["prompt_tokens"], usage["completion_tokens"])


def _events(content: bytes) -> list[dict[str, Any]]:
    events = [piece[6:] for piece in content.split(b"\n\n") if piece.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        last = events[-1][:300].decode(errors="replace") if events else "nothing"
        raise BadAnswer(f"the stream has no [DONE]; its last event: {last}")
    return [orjson.loads(event) for event in events[:-1]]


def make_cases(count: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    return [_KINDS[index % len(_KINDS)](rng) for index in range(count)]


def _case(kind: str, path: str, body: dict[str, Any], stream: bool = True) -> Case:
    body = {"model": MODEL, "temperature": 0, **body}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Case(kind, path, orjson.dumps(body))


def _chat(kind: str, content: str, max_tokens: int, stream: bool = True, **fields: Any) -> Case:
    messages = [{"role": "user", "content": content}]
    return _case(kind, CHAT, {"messages": messages, "max_tokens": max_tokens, **fields}, stream)


def _phrase(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def _count(rng: random.Random) -> Case:
    first = rng.randint(3, 90)
    return _chat("count", f"Count from {first} to {first + rng.randint(20, 40)}.", 128)


def _long_output(rng: random.Random) -> Case:
    body = {"prompt": f"{_phrase(rng, 3)} {rng.random()}", "max_tokens": rng.randint(64, 128), "ignore_eos": True}
    return _case("long output", COMPLETIONS, body)


def _long_prompt(rng: random.Random) -> Case:
    shared = "the garden of stone " * 12
    return _chat("long prompt", f"Repeat: {shared}{_phrase(rng, 8)}", rng.randint(64, 96), ignore_eos=True)


def _copy(rng: random.Random) -> Case:
    return _chat("copy", f"Repeat: {_phrase(rng, 12)}", 96)


def _stop(rng: random.Random) -> Case:
    first = rng.randint(3, 60)
    return _chat("stop string", f"Count from {first} to {first + 40}.", 128, stop=[f"{first + 20}, {first + 21}"])


def _schema(rng: random.Random) -> Case:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    content = f"Give the JSON for name {rng.choice(NAMES)}, age {rng.randint(1, 99)}."
    return _chat("json schema", content, 96, response_format=schema)


def _sampled(rng: random.Random) -> Case:
    sampling = {"temperature": 0.8, "top_p": 0.95, "seed": rng.randrange(2**31)}
    return _chat("sampled twice", _phrase(rng, 5), rng.randint(48, 80), ignore_eos=True, n=2, **sampling)


def _penalized(rng: random.Random) -> Case:
    penalties = {"frequency_penalty": 0.6, "presence_penalty": 0.3}
    return _chat("penalized", _phrase(rng, 6), rng.randint(64, 96), ignore_eos=True, **penalties)


def _logprobs(rng: random.Random) -> Case:
    return _chat("log probabilities", _phrase(rng, 6), rng.randint(48, 80), ignore_eos=True, logprobs=True, top_logprobs=2)


def _document(rng: random.Random) -> Case:
    return _chat("document", _phrase(rng, 6), rng.randint(64, 112), stream=False, ignore_eos=True)


_KINDS: list[Callable[[random.Random], Case]] = [
    _count,
    _long_output,
    _long_prompt,
    _copy,
    _stop,
    _schema,
    _long_output,
    _sampled,
    _penalized,
    _logprobs,
    _document,
]
