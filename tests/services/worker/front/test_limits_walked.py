"""Tests every limit of a request over gRPC, without the checks of a gateway.

A value at the limit passes. A value above it is refused with the name of its field, and the stream stays open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.shared import limits
from tests.services.worker.conftest import run, serving
from tests.services.worker.front.test_server import FakeGateway

Case = tuple[worker_pb2.Submit, str]  # a Submit and the name of the field at its limit


def sampled(field: str, make: Callable[[int], dict[str, Any]]) -> Callable[[int], Case]:
    return lambda value: (worker_pb2.Submit(sampling=pb.SamplingParams(max_new_tokens=1, **make(value))), field)


def submit_of(field: str, make: Callable[[int], dict[str, Any]]) -> Callable[[int], Case]:
    return lambda value: (worker_pb2.Submit(sampling=pb.SamplingParams(max_new_tokens=1), **make(value)), field)


def source(address: str) -> worker_pb2.KvSource:
    return worker_pb2.KvSource(address=address, room=worker_pb2.KvRoom(room=1, epoch=1, secret=bytes(16), pages=1))


WALKED: dict[str, Callable[[int], Case]] = {
    "MAX_STOP_STRINGS": sampled("stop", lambda value: {"stop": [str(at) for at in range(value)]}),
    "MAX_STOP_STRING_CHARS": sampled("stop", lambda value: {"stop": ["x" * value]}),
    "MAX_STOP_TOKEN_IDS": sampled("stop_token_ids", lambda value: {"stop_token_ids": range(value)}),
    "MAX_LOGIT_BIAS_ENTRIES": sampled(
        "logit_bias", lambda value: {"logit_bias_ids": [at % 900 for at in range(value)], "logit_bias_values": [1.0] * value}
    ),
    "MAX_STOP_REGEXES": sampled("stop_regex", lambda value: {"stop_regex": ["a"] * value}),
    "MAX_STOP_REGEX_CHARS": sampled("stop_regex", lambda value: {"stop_regex": [f"[{'a' * (value - 2)}]"]}),
    "MAX_TOP_LOGPROBS": sampled("logprobs.top", lambda value: {"logprobs": pb.Logprobs(top=value)}),
    "MAX_LOGPROB_TOKEN_IDS": sampled("logprobs.token_ids", lambda value: {"logprobs": pb.Logprobs(token_ids=[1] * value)}),
    "MAX_LABEL_TOKEN_IDS": sampled("score.label_token_ids", lambda value: {"score": pb.Score(label_token_ids=[1] * value)}),
    "MAX_TOKEN_ID_SET": sampled("allowed_token_ids", lambda value: {"allowed_token_ids": [1] * value}),
    "MAX_DRY_BREAKERS": sampled("dry_sequence_breakers", lambda value: {"dry": pb.Dry(multiplier=1, breakers=["a"] * value)}),
    "MAX_DRY_BREAKER_CHARS": sampled(
        "dry_sequence_breakers", lambda value: {"dry": pb.Dry(multiplier=1, breakers=["a" * value])}
    ),
    "MAX_DRY_ALLOWED_LENGTH": sampled("dry_allowed_length", lambda value: {"dry": pb.Dry(multiplier=1, allowed_length=value)}),
    "MAX_DRY_WINDOW": sampled("dry_penalty_last_n", lambda value: {"dry": pb.Dry(multiplier=1, window=value)}),
    "MAX_GRAMMAR_BYTES": sampled("grammar", lambda value: {"grammar": pb.Grammar(ebnf="a" * value)}),
    "MAX_SESSION_ID_CHARS": submit_of(
        "session.session_id", lambda value: {"session": worker_pb2.SessionTurn(session_id="s" * value)}
    ),
    "MAX_REQUEST_ID_CHARS": submit_of("request_id", lambda value: {"request_id": "r" * value}),
    "MAX_ROUTING_KEY_CHARS": submit_of("routing_key", lambda value: {"routing_key": "k" * value}),
    "MAX_CACHE_SALT_CHARS": submit_of("cache_salt", lambda value: {"cache_salt": "s" * value}),
    "MAX_REVISION_CHARS": submit_of("revision", lambda value: {"revision": "r" * value}),
    "MAX_ADDRESS_CHARS": submit_of("source.address", lambda value: {"source": source("a" * value)}),
    "MAX_PREDICTION_TOKENS": submit_of("prediction_ids", lambda value: {"prediction_ids": [1] * value}),
    "MAX_TENANT_BYTES": submit_of("tenant", lambda value: {"tenant": b"t" * value}),
}


# By limit: part of the error for a value at the limit. This worker has no tokenizer, no grammar compiler, no open session and
# only one model version, so it refuses such a value for a reason other than the limit.
OTHER_ERRORS = {
    **dict.fromkeys((name for name in WALKED if name.startswith("MAX_DRY")), "no tokenizer"),
    "MAX_GRAMMAR_BYTES": "grammar",
    "MAX_SESSION_ID_CHARS": "no such session",
    "MAX_REVISION_CHARS": "another model version",
}


def test_value_at_a_limit_is_accepted_and_a_larger_value_is_refused() -> None:
    wrong: dict[str, tuple[str, str]] = {}

    async def body() -> None:
        async with serving() as served:
            gateway = FakeGateway(served.stub)
            await gateway.hello()
            for number, (name, make) in enumerate(WALKED.items()):
                handles, limit, field = (2 * number + 1, 2 * number + 2), int(getattr(limits, name)), ""
                for handle, value in zip(handles, (limit, limit + 1), strict=True):
                    submit, field = make(value)
                    submit.handle = handle
                    submit.request_id = submit.request_id or f"r{handle}"
                    submit.prompt_ids.extend([1, 2, 3])
                    await gateway.send(submit)
                await gateway.ended(*handles)
                at_limit, beyond = (gateway.finishes[handle] for handle in handles)
                refused = beyond.error == pb.ERROR_CODE_INVALID_ARGUMENT and beyond.field.startswith(field)
                passed = OTHER_ERRORS[name] in at_limit.message if name in OTHER_ERRORS else not at_limit.message
                if not (refused and passed and at_limit.message != beyond.message):
                    wrong[name] = (str(at_limit), str(beyond))

    run(body)
    assert not wrong, "\n".join(f"{name}: {pair}" for name, pair in wrong.items())
