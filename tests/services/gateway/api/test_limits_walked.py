"""Tests every limit of a request over HTTP: a value at the limit passes, and a larger value is refused with its field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rootstock_llm.services.shared import limits
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.system import System, chat_body

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
Made = tuple[str, dict[str, Any], str]  # path, body with the value, and the param of the error for a larger value


def completion(field: str, make: Callable[[int], Any], named: str = "", **more: Any) -> Callable[[int], Made]:
    return lambda value: (
        COMPLETIONS,
        {"model": MODEL, "prompt": "Hi", "max_tokens": 1, **more, field: make(value)},
        named or field,
    )


def chat(make: Callable[[int], dict[str, Any]], named: str) -> Callable[[int], Made]:
    return lambda value: (CHAT, {"model": MODEL, "max_tokens": 1, **chat_body(), **make(value)}, named)


def messages_of(parts: list[int]) -> dict[str, Any]:
    part = {"type": "text", "text": ""}
    return {"messages": [{"role": "user", "content": [part] * count} for count in parts]}


WALKED: dict[str, Callable[[int], Made]] = {
    "MAX_N": completion("n", int),
    "MAX_BATCH_PROMPTS": completion("prompt", lambda value: ["a"] * value),
    "MAX_SCORE_ITEMS": lambda value: ("/v1/score", {"query": "Hi", "items": ["a"] * value, "label_token_ids": [5]}, "items"),
    "MAX_LABEL_TOKEN_IDS": lambda value: (
        "/v1/score",
        {"query": "Hi", "items": "a", "label_token_ids": [5] * value},
        "label_token_ids",
    ),
    "MAX_STOP_STRINGS": completion("stop", lambda value: [str(at) for at in range(value)]),
    "MAX_STOP_STRING_CHARS": completion("stop", lambda value: "x" * value),
    "MAX_STOP_TOKEN_IDS": completion("stop_token_ids", lambda value: list(range(1, value + 1))),
    "MAX_LOGIT_BIAS_ENTRIES": completion("logit_bias", lambda value: {str(at): 1 for at in range(value)}),
    "MAX_STOP_REGEXES": completion("stop_regex", lambda value: ["a"] * value),
    "MAX_STOP_REGEX_CHARS": completion("stop_regex", lambda value: "a" * value),
    "MAX_TOP_LOGPROBS": chat(lambda value: {"logprobs": True, "top_logprobs": value}, "top_logprobs"),
    "MAX_LOGPROB_TOKEN_IDS": completion("logprob_token_ids", lambda value: list(range(value)), logprobs=0),
    "MAX_TOKEN_ID_SET": completion("allowed_token_ids", lambda value: list(range(value))),
    "MAX_DRY_BREAKERS": completion("dry_sequence_breakers", lambda value: ["a"] * value, dry_multiplier=1.0),
    "MAX_DRY_BREAKER_CHARS": completion("dry_sequence_breakers", lambda value: ["a" * value], dry_multiplier=1.0),
    "MAX_DRY_ALLOWED_LENGTH": completion("dry_allowed_length", int, dry_multiplier=1.0),
    "MAX_DRY_WINDOW": completion("dry_penalty_last_n", int, dry_multiplier=1.0),
    "MAX_GUIDED_CHOICES": completion("guided_choice", lambda value: [str(at) for at in range(value)]),
    "MAX_GRAMMAR_BYTES": completion("ebnf", lambda value: "a" * value),
    "MAX_SESSION_ID_CHARS": completion("session_params", lambda value: {"id": "s" * value}, "session_params.id"),
    "MAX_REQUEST_ID_CHARS": completion("session_params", lambda value: {"id": "s", "rid": "r" * value}, "session_params.rid"),
    "MAX_ROUTING_KEY_CHARS": completion("routing_key", lambda value: "k" * value),
    "MAX_CACHE_SALT_CHARS": completion("cache_salt", lambda value: "s" * value),
    "MAX_CHAT_MESSAGES": chat(lambda value: {"messages": [{"role": "user", "content": ""}] * value}, "messages"),
    "MAX_CONTENT_PARTS": chat(lambda value: messages_of([value]), "messages[0].content"),
    "MAX_REQUEST_CONTENT_PARTS": chat(
        lambda value: messages_of(
            [limits.MAX_CONTENT_PARTS] * (value // limits.MAX_CONTENT_PARTS) + [value % limits.MAX_CONTENT_PARTS]
        ),
        "messages",
    ),
    "PRIORITY_RANGE": completion("priority", int),
}


def value_of(name: str) -> int:
    value = getattr(limits, name)
    return int(value[1] if isinstance(value, tuple) else value)


def test_value_at_a_limit_is_accepted_and_error_names_the_field_of_a_larger_value(shared: System) -> None:
    """A value at the limit counts as accepted if the request is refused only because its prompt exceeds the context."""
    wrong: dict[str, Any] = {}
    for name, make in WALKED.items():
        limit = value_of(name)
        path, body, field = make(limit)
        at_limit = shared.post(path, body)
        beyond = shared.post(path, make(limit + 1)[1])
        error = beyond.json().get("error", {})
        refused = (
            beyond.status_code == 400 and str(error.get("param")).startswith(field) and error["code"] != "context_length_exceeded"
        )
        passed = at_limit.status_code == 200 or at_limit.json()["error"]["code"] == "context_length_exceeded"
        if not (passed and refused):
            wrong[name] = (at_limit.status_code, at_limit.text[:300], beyond.status_code, beyond.text[:300])
    assert not wrong
