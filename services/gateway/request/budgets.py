"""What one request may ask of the gateway's memory over all its choices. Pure; the checks raise
ApiError that names the field."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.request.errors import ApiError, bad_request
from services.gateway.request.generation import Generation, Part
from services.gateway.request.logprobs import values_per_token
from services.shared import limits


def check_logprobs(parts: Sequence[Part], context_len: int) -> None:
    """The values that a request's log probabilities can come to, if every answer is as long as it may be, or likely to be."""
    total = 0
    for part in parts:
        generation = part.generation
        if not generation.wants_logprobs:
            continue
        total += generation.n * logprob_values(generation, len(part.prompt.ids), context_len)
        limit = limits.MAX_REPEATED_LOGPROB_VALUES if generation.stream_repeats else limits.MAX_LOGPROB_VALUES
        if total > limit:
            name = generation.fields.of("logprobs")
            message = (
                f"'{name}' may come to at most {limit} values: tokens of prompts and answers, times choices, "
                "times 1 + top ones + chosen ids. Ask for fewer, or for fewer tokens."
            )
            raise bad_request(name, message)


def logprob_values(generation: Generation, prompt_tokens: int, context_len: int) -> int:
    """Of one choice."""
    wanted = generation.sampling.logprobs
    tokens = generation.likely_tokens(prompt_tokens, context_len)
    if generation.wants_prompt_logprobs:
        tokens += max(0, prompt_tokens - max(1, wanted.prompt_from))
    return tokens * values_per_token(wanted.top, len(wanted.token_ids))


def most_tokens(parts: Sequence[Part], context_len: int) -> int:
    """Of prompts, and of all their answers, if each is as long as it may be, or likely to be."""
    total = 0
    for part in parts:
        prompt_tokens, generation = len(part.prompt.ids), part.generation
        answers = 0 if generation.ends_with_prompt else generation.n * generation.likely_tokens(prompt_tokens, context_len)
        total += prompt_tokens + answers
    return total


def check_chars(chars: int, param: str) -> None:
    """Of all of a request's texts: no tokenizer takes more, so none is sent more."""
    if chars > limits.MAX_RENDERED_CHARS:
        message = f"The texts of '{param}' may have at most {limits.MAX_RENDERED_CHARS} characters."
        raise ApiError(413, message, param=param, code="request_too_large")


def check_sets(allowed: Sequence[int] | None, banned: Sequence[int] | None, choices: int, where: str = "") -> None:
    """Every choice takes its sets of token ids along. where: the path that they stand at, with a dot at its end."""
    ids = len(allowed or ()) + len(banned or ())
    if ids * choices > limits.MAX_REQUEST_SET_IDS:
        name = where + ("banned_token_ids" if len(banned or ()) > len(allowed or ()) else "allowed_token_ids")
        raise bad_request(name, f"'{name}' times prompts times 'n' may come to at most {limits.MAX_REQUEST_SET_IDS} ids.")
