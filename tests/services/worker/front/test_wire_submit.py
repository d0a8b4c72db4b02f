"""Tests of submit_from_pb: every field is converted, and every default is resolved.

The worker checks every limit itself, and does not rely on the gateway's checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.sampling_parameters import (
    SCALARS,
    SMALLEST_POSITIVE,
    Api,
    Kind,
    SamplingDefaults,
    SamplingParameter,
)
from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarSpec
from rootstock_llm.services.worker.core.contracts.messages import SessionTurn, Submit
from rootstock_llm.services.worker.core.contracts.plan import DryParams, EmbeddingParams, SamplingParams, ScoreParams
from rootstock_llm.services.worker.core.contracts.reservations import RESERVATION_SECRET_BYTES, KvReservation, KvSource
from rootstock_llm.services.worker.front.wire import InvalidRequest, ModelLimits, prefetch_from_pb, submit_from_pb
from tests.services.parameter_values import NUMERIC, outside, typical

VOCAB = 1000
CONTEXT = 100
MODEL = ModelLimits(CONTEXT, VOCAB, False, embedding_size=8, encode_breaker=lambda text: [ord(char) for char in text])
PROMPT = [1, 2, 3, 4]


def sampling(model: ModelLimits = MODEL, prompt: list[int] = PROMPT, **fields: Any) -> SamplingParams:
    message = worker_pb2.Submit(handle=1, prompt_ids=prompt, sampling=pb.SamplingParams(**fields))
    return submit_from_pb(message, 1, model, 77).params


def test_missing_sampling_fields_get_their_defaults() -> None:
    assert sampling() == SamplingParams(max_new_tokens=CONTEXT - len(PROMPT), seed=77)


def test_numbers_and_flags_of_the_message_reach_the_sampling_parameters() -> None:
    plain = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "frequency_penalty": 1.5, "presence_penalty": -1}
    more = {"repetition_penalty": 1.25, "min_new_tokens": 3, "ignore_eos": True, "seed": 5, "stream_interval": 4}
    params = sampling(max_new_tokens=9, skip_special_tokens=False, **plain, **more)
    for field, value in {**plain, **more, "max_new_tokens": 9, "skip_special_tokens": False}.items():
        assert getattr(params, field) == value, field


def test_token_ids_and_strings_of_the_message_reach_the_sampling_parameters() -> None:
    params = sampling(
        **{"stop_token_ids": [5, 6], "stop": ["a", "b"], "stop_regex": ["a+", "[0-9]{3}"]},
        **{"allowed_token_ids": [1, 999], "banned_token_ids": [2], "logit_bias_ids": [4], "logit_bias_values": [2.5]},
    )
    assert (params.stop_token_ids, params.stop, params.stop_regex) == ((5, 6), ("a", "b"), ("a+", "[0-9]{3}"))
    assert (params.allowed_token_ids, params.banned_token_ids, params.logit_bias) == ((1, 999), (2,), ((4, 2.5),))


class TestMaxNewTokens:
    def test_max_new_tokens_is_clipped_to_the_context(self) -> None:
        assert sampling(max_new_tokens=10_000).max_new_tokens == CONTEXT - len(PROMPT)

    def test_max_new_tokens_of_a_session_turn_ignores_the_prompt_length(self) -> None:
        def turn(**fields: Any) -> int:
            message = worker_pb2.Submit(prompt_ids=PROMPT, sampling=pb.SamplingParams(**fields))
            message.session.session_id = "s"
            return submit_from_pb(message, 1, MODEL, 0).params.max_new_tokens

        assert (turn(), turn(max_new_tokens=7), turn(max_new_tokens=500)) == (CONTEXT, 7, CONTEXT)

    def test_min_new_tokens_is_clipped_to_max_new_tokens(self) -> None:
        assert sampling(max_new_tokens=3, min_new_tokens=9).min_new_tokens == 3


class TestLogprobs:
    def test_logprobs_are_off_by_default(self) -> None:
        params = sampling()
        assert (params.top_logprobs, params.logprob_token_ids, params.prompt_logprobs_from) == (-1, (), -1)

    def test_empty_logprobs_message_requests_only_the_sampled_token(self) -> None:
        params = sampling(logprobs=pb.Logprobs())
        assert (params.top_logprobs, params.logprob_token_ids, params.prompt_logprobs_from) == (0, (), -1)

    def test_every_logprobs_field_reaches_the_sampling_parameters(self) -> None:
        params = sampling(logprobs=pb.Logprobs(top=20, token_ids=[9, 8], prompt_from=0))
        assert (params.top_logprobs, params.logprob_token_ids, params.prompt_logprobs_from) == (20, (9, 8), 0)

    def test_prompt_logprobs_may_start_at_the_last_prompt_token(self) -> None:
        assert sampling(logprobs=pb.Logprobs(prompt_from=3)).prompt_logprobs_from == 3


class TestGrammar:
    @pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
    def test_grammar_may_be_a_json_schema_or_a_structural_tag(self, kind: str) -> None:
        assert sampling(grammar=pb.Grammar(**{kind: "{}"})).grammar == GrammarSpec(GrammarKind(kind), "{}")

    def test_json_object_grammar_permits_any_object(self) -> None:
        assert sampling(grammar=pb.Grammar(json_object=True)).grammar == GrammarSpec(GrammarKind.JSON_OBJECT, "")

    def test_min_new_tokens_is_0_when_the_request_has_a_grammar(self) -> None:
        assert sampling(min_new_tokens=5, grammar=pb.Grammar(regex="a")).min_new_tokens == 0


class TestDry:
    def test_dry_is_off_unless_a_multiplier_is_set(self) -> None:
        assert sampling().dry is None
        assert sampling(dry=pb.Dry(base=2)).dry is None

    def test_missing_dry_fields_get_their_defaults(self) -> None:
        breakers = tuple(sorted(map(ord, '\n:"*')))
        assert sampling(dry=pb.Dry(multiplier=0.5)).dry == DryParams(0.5, 1.75, 2, 0, breakers)

    def test_dry_window_of_0_equals_no_window(self) -> None:
        assert sampling(dry=pb.Dry(multiplier=1, window=0)).dry == sampling(dry=pb.Dry(multiplier=1)).dry is not None

    def test_every_dry_field_arrives_and_a_breaker_is_reduced_to_the_last_token(self) -> None:
        dry = pb.Dry(multiplier=0.5, base=2, allowed_length=4, window=9, breakers=["ab", "b", "c"])
        assert sampling(dry=dry).dry == DryParams(0.5, 2.0, 4, 9, (ord("b"), ord("c")))

    def test_dry_is_refused_when_the_worker_has_no_tokenizer(self) -> None:
        assert "tokenizer" in refused("dry_multiplier", model=ModelLimits(CONTEXT, VOCAB, False), dry=pb.Dry(multiplier=1))


class TestEmbedding:
    def test_embedding_request_samples_no_token(self) -> None:
        params = sampling(max_new_tokens=50, embedding=pb.Embedding(dimensions=4, normalize=False))
        assert (params.embedding, params.max_new_tokens) == (EmbeddingParams(4, False), 0)

    def test_missing_embedding_fields_follow_the_model(self) -> None:
        assert sampling(embedding=pb.Embedding()).embedding == EmbeddingParams(0, None)

    def test_prompt_of_an_embedding_may_fill_the_context(self) -> None:
        assert sampling(prompt=[1] * CONTEXT, embedding=pb.Embedding()).max_new_tokens == 0


class TestScore:
    def test_score_request_samples_no_token(self) -> None:
        params = sampling(max_new_tokens=50, score=pb.Score(label_token_ids=[7, 2, 7]))
        assert (params.score, params.max_new_tokens, params.samples) == (ScoreParams((7, 2, 7)), 0, False)

    def test_prompt_of_a_score_may_fill_the_context(self) -> None:
        assert sampling(prompt=[1] * CONTEXT, score=pb.Score(label_token_ids=[1])).score == ScoreParams((1,))


def test_no_token_is_sampled_when_max_new_tokens_is_0() -> None:
    params = sampling(max_new_tokens=0, min_new_tokens=3)
    assert (params.max_new_tokens, params.min_new_tokens, params.samples) == (0, 0, False)


def refused(field: str, model: ModelLimits = MODEL, **fields: Any) -> str:
    with pytest.raises(InvalidRequest) as error:
        sampling(model, **fields)
    assert str(error.value).startswith(field), str(error.value)
    return str(error.value)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "stop empty": ({"stop": [""]}, "stop: "),
    "allowed outside": ({"allowed_token_ids": [1, VOCAB]}, "allowed_token_ids: "),
    "logit_bias outside": ({"logit_bias_ids": [VOCAB], "logit_bias_values": [1]}, "logit_bias: "),
    "logit_bias lengths": ({"logit_bias_ids": [1]}, "logit_bias: "),
    "pattern not RE2": ({"stop_regex": ["a", "("]}, "stop_regex[1]: cannot be used: missing )"),
    "pattern with a large program": ({"stop_regex": ["((a{100}){100}){100}"]}, "stop_regex[0]: cannot be used"),
    "pattern that matches the empty string": ({"stop_regex": ["a*"]}, "stop_regex[0]: matches the empty string"),
    "prompt_from after the prompt": ({"logprobs": pb.Logprobs(prompt_from=len(PROMPT))}, "logprobs.prompt_from: "),
    "grammar without a kind": ({"grammar": pb.Grammar()}, "grammar: "),
    "grammar empty": ({"grammar": pb.Grammar(regex="")}, "grammar: "),
    "grammar false": ({"grammar": pb.Grammar(json_object=False)}, "grammar: "),
    "grammar too large": ({"grammar": pb.Grammar(ebnf="é" * (limits.MAX_GRAMMAR_BYTES // 2 + 1))}, "grammar: "),
    "dry breaker empty": ({"dry": pb.Dry(multiplier=1, breakers=[""])}, "dry_sequence_breakers: "),
    "too many dimensions": ({"embedding": pb.Embedding(dimensions=9)}, "embedding.dimensions: "),
    "embedding with a grammar": ({"embedding": pb.Embedding(), "grammar": pb.Grammar(regex="a")}, "embedding: "),
    "embedding with logprobs": ({"embedding": pb.Embedding(), "logprobs": pb.Logprobs()}, "embedding: "),
    "score without labels": ({"score": pb.Score()}, "score.label_token_ids: "),
    "label outside the vocabulary": ({"score": pb.Score(label_token_ids=[VOCAB])}, "score.label_token_ids: "),
    "score with a grammar": ({"score": pb.Score(label_token_ids=[1]), "grammar": pb.Grammar(regex="a")}, "score: "),
    "score with logprobs": ({"score": pb.Score(label_token_ids=[1]), "logprobs": pb.Logprobs()}, "score: "),
    "score with an embedding": ({"score": pb.Score(label_token_ids=[1]), "embedding": pb.Embedding()}, "score: "),
}


@pytest.mark.by_day(one_in=2, seed=30)
@pytest.mark.parametrize(("fields", "message"), BAD.values(), ids=BAD.keys())
def test_error_names_an_invalid_sampling_field(fields: dict[str, Any], message: str) -> None:
    assert refused(message, **fields).startswith(message)


def message_of(row: SamplingParameter, value: Any) -> dict[str, Any]:
    """Returns the fields of a message with this value, or {} if the field cannot carry the value."""
    parent, _, member = row.wire.rpartition(".")
    try:
        pb.Dry(**{member: value}) if parent else pb.SamplingParams(**{member: value})
    except ValueError:
        return {}
    others = {"multiplier": 1} if parent else {}
    return {parent: pb.Dry(**(others | {member: value}))} if parent else {member: value}


def value_in(params: SamplingParams, row: SamplingParameter) -> Any:
    parent, _, member = row.wire.rpartition(".")
    return getattr(params.dry if parent else params, member)


ROWS = [pytest.param(row, id=row.wire) for row in NUMERIC if row in SCALARS or row.wire.startswith("dry.")]


# One line of code checks all scalars, so one row of each combination of kind and limits is enough. Each DRY field is checked by
# separate code.
TESTED_ROWS = {(row.kind, row.low is None, row.high is None, row.excludes_low): row for row in NUMERIC if row in SCALARS}
OUTSIDE = [case for case in ROWS if case.values[0] in TESTED_ROWS.values() or case.id.startswith("dry.")]


@pytest.mark.by_day(one_in=2, seed=18)
@pytest.mark.parametrize("row", OUTSIDE)
def test_number_outside_the_range_is_refused_with_the_name_of_the_parameter(row: SamplingParameter) -> None:
    named = row.names[Api.CHAT] if row.wire.startswith("dry.") else row.wire
    not_numbers = [float("nan"), float("inf"), float("-inf")] if row.kind is Kind.NUMBER else []
    for fields in (message_of(row, value) for value in (*outside(row), *not_numbers)):
        assert not fields or refused(f"{named}: ", **fields)


@pytest.mark.by_day(one_in=2, seed=8)
@pytest.mark.parametrize("row", [case for case in ROWS if case in OUTSIDE or case.id == "top_k"])  # top_k has two neutral values
def test_number_within_the_range_reaches_the_sampling_parameters(row: SamplingParameter) -> None:
    limits = ModelLimits((1 << 32) + 9, VOCAB, False, encode_breaker=MODEL.encode_breaker)
    for value in (typical(row), row.high) if row.excludes_low else (typical(row), row.low, row.high):
        fields = message_of(row, value)
        if fields and value not in row.neutral:
            assert value_in(sampling(limits, **fields), row) == value
    for value in row.neutral:
        if row in SCALARS:
            assert value_in(sampling(limits, **message_of(row, value)), row) == row.default


@pytest.mark.parametrize("share", [0.0, 1e-45, 1e-39])
def test_top_p_of_0_means_greedy_sampling(share: float) -> None:
    params = sampling(temperature=2.0, top_p=share, top_k=5)
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 1.0, 5)


def test_default_top_p_of_0_of_a_model_means_greedy_sampling() -> None:
    model = replace(MODEL, defaults=SamplingDefaults(temperature=2.0, top_p=0.0))
    assert (sampling(model).temperature, sampling(model, top_p=0.5).temperature) == (0.0, 2.0)


def test_tiny_repetition_penalty_stays_above_0() -> None:
    assert sampling(repetition_penalty=1e-45).repetition_penalty == SMALLEST_POSITIVE


def test_request_for_an_output_that_the_model_cannot_compute_is_refused() -> None:
    no_vectors, no_tokens = ModelLimits(CONTEXT, VOCAB, False), ModelLimits(CONTEXT, VOCAB, False, False, 8)
    assert "computes no embeddings" in refused("embedding: ", model=no_vectors, embedding=pb.Embedding())
    assert "only embeddings" in refused("embedding: ", model=no_tokens)


class TestSubmit:
    @staticmethod
    def submit_of(change: Callable[[worker_pb2.Submit], Any], model: ModelLimits = MODEL) -> Any:
        message = worker_pb2.Submit(handle=3, request_id="r", prompt_ids=PROMPT)
        change(message)
        return submit_from_pb(message, 2, model, 0)

    def test_every_field_of_a_submit_message_arrives(self) -> None:
        def fill(message: worker_pb2.Submit) -> None:
            message.stream, message.cache_salt, message.priority = True, "salt", -3
            message.timeout_ms, message.routing_key = 1500, "key"

        submit = self.submit_of(fill)
        assert (submit.peer, submit.handle, submit.request_id, submit.prompt_ids.tolist()) == (2, 3, "r", PROMPT)
        assert (submit.stream, submit.salt, submit.priority, submit.timeout_s) == (True, "salt", -3, 1.5)
        assert (submit.routing_key, submit.session, submit.lora) == ("key", None, "")

    def test_predicted_tokens_arrive_only_when_the_worker_reads_predictions(self) -> None:
        reading = replace(MODEL, reads_predictions=True)
        change = lambda message: message.prediction_ids.extend([5, VOCAB - 1])  # noqa: E731
        assert self.submit_of(change, reading).prediction.tolist() == [5, VOCAB - 1]
        assert not len(self.submit_of(change).prediction)
        with pytest.raises(InvalidRequest, match=r"^prediction_ids: "):
            self.submit_of(lambda message: message.prediction_ids.append(VOCAB))

    def test_routed_experts_from_of_a_submit_message_arrives(self) -> None:
        routing = replace(MODEL, routed_per_token=8)
        assert self.submit_of(lambda message: None, routing).routed_from == -1
        for first in (0, len(PROMPT)):
            message = worker_pb2.Submit(handle=3, prompt_ids=PROMPT, routed_experts_from=first)
            assert submit_from_pb(message, 2, routing, 0).routed_from == first

        def resumed(message: worker_pb2.Submit) -> None:
            message.output_ids.extend([5, 6])
            message.routed_experts_from = len(PROMPT) + 2

        assert self.submit_of(resumed, routing).routed_from == len(PROMPT) + 2

    @pytest.mark.parametrize(
        ("fields", "per_token"),
        [
            ({}, 0),
            ({"routed_experts_from": len(PROMPT) + 1}, 8),
            ({"session": worker_pb2.SessionTurn(session_id="s")}, 8),
            ({"hand_over": True}, 8),
            ({"sampling": pb.SamplingParams(embedding=pb.Embedding())}, 8),
            ({"sampling": pb.SamplingParams(score=pb.Score(label_token_ids=[1]))}, 8),
            ({"sampling": pb.SamplingParams(max_new_tokens=3)}, limits.MAX_ROUTED_EXPERT_IDS // 6),
        ],
        ids=["setting is off", "position", "session", "handover", "embedding", "score", "too many ids"],
    )
    def test_routed_experts_are_refused_when_they_cannot_be_returned(self, fields: dict[str, Any], per_token: int) -> None:
        message = worker_pb2.Submit(handle=3, prompt_ids=PROMPT, **{"routed_experts_from": 0, **fields})
        reservation = KvReservation(1, 1, bytes(RESERVATION_SECRET_BYTES))
        with pytest.raises(InvalidRequest, match=r"^routed_experts_from: "):
            submit_from_pb(message, 2, replace(MODEL, routed_per_token=per_token), 0, reservation)

    def test_session_turn_of_a_submit_message_arrives(self) -> None:
        def turn(message: worker_pb2.Submit) -> None:
            message.session.CopyFrom(
                worker_pb2.SessionTurn(session_id="s", parent_request_id="p", offset=5, replace=True, drop_previous_output=True)
            )

        assert self.submit_of(turn).session == SessionTurn("s", "p", 5, True, True)
        assert self.submit_of(lambda message: setattr(message.session, "session_id", "s")).session == SessionTurn("s")

    def test_prompt_is_truncated_except_for_session_turns_and_embeddings(self) -> None:
        truncating = ModelLimits(CONTEXT, VOCAB, True)

        def long(message: worker_pb2.Submit) -> None:
            message.prompt_ids.extend([1] * CONTEXT)

        def long_turn(message: worker_pb2.Submit) -> None:
            long(message)
            message.session.session_id = "s"

        assert len(self.submit_of(long, truncating).prompt_ids) == CONTEXT - 1
        vectors = ModelLimits(CONTEXT, VOCAB, True, embedding_size=8)
        whole = self.submit_of(lambda message: (long(message), message.sampling.embedding.SetInParent()), vectors)
        assert len(whole.prompt_ids) == CONTEXT, "the prompt of an embedding may fill the context"
        assert len(self.submit_of(long_turn, truncating).prompt_ids) == CONTEXT + len(PROMPT)

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            (lambda m: m.ClearField("prompt_ids"), "prompt_ids: "),
            (lambda m: m.prompt_ids.append(VOCAB), "prompt_ids: "),
            (lambda m: m.session.SetInParent(), "session: "),
        ],
        ids=["no prompt", "outside", "session without id"],
    )
    def test_error_names_an_invalid_field_of_a_submit_message(
        self, change: Callable[[worker_pb2.Submit], Any], field: str
    ) -> None:
        with pytest.raises(InvalidRequest, match=f"^{field}"):
            self.submit_of(change)


class TestResumedOutput:
    @staticmethod
    def submit(output: list[int], prompt: list[int] = PROMPT, model: ModelLimits = MODEL, **more: Any) -> Submit:
        message = worker_pb2.Submit(handle=1, prompt_ids=prompt, output_ids=output, **more)
        return submit_from_pb(message, 1, model, 77)

    def test_output_ids_of_a_resumed_request_arrive(self) -> None:
        assert self.submit([7, 8, 999]).output_ids == (7, 8, 999)
        assert self.submit([]).output_ids == ()

    def test_output_ids_beyond_the_context_are_refused(self) -> None:
        whole = self.submit([5] * (CONTEXT - len(PROMPT)))
        assert len(whole.output_ids) == whole.params.max_new_tokens
        with pytest.raises(InvalidRequest, match=r"^output_ids: .* context is 100"):
            self.submit([5] * (CONTEXT - len(PROMPT) + 1))

    def test_output_ids_that_do_not_fit_after_a_truncated_prompt_are_refused(self) -> None:
        truncating = ModelLimits(CONTEXT, VOCAB, True)
        assert len(self.submit([5], [1] * 300, truncating).prompt_ids) == CONTEXT - 1
        with pytest.raises(InvalidRequest, match=r"^output_ids: "):
            self.submit([5, 6], [1] * 300, truncating)

    @pytest.mark.parametrize(
        ("output", "more"),
        [
            ([VOCAB], {}),
            ([1 << 31], {}),
            ([1], {"session": worker_pb2.SessionTurn(session_id="s")}),
            ([1], {"sampling": pb.SamplingParams(embedding=pb.Embedding())}),
            ([1], {"sampling": pb.SamplingParams(score=pb.Score(label_token_ids=[1]))}),
        ],
        ids=["vocabulary", "beyond int32", "session", "embedding", "score"],
    )
    def test_invalid_output_ids_are_refused_with_the_field_name(self, output: list[int], more: dict[str, Any]) -> None:
        with pytest.raises(InvalidRequest, match=r"^output_ids: "):
            self.submit(output, **more)


class TestDisaggregation:
    """Prefill and decode on different workers: KV reservations and KV sources."""

    @staticmethod
    def source(**room: Any) -> worker_pb2.KvSource:
        values = {"room": 9, "epoch": 5, "secret": b"s" * RESERVATION_SECRET_BYTES, "pages": 3}
        return worker_pb2.KvSource(address="10.0.0.1:7103", room=worker_pb2.KvRoom(**{**values, **room}))

    @staticmethod
    def submit(reservation: KvReservation | None = None, **fields: Any) -> Submit:
        return submit_from_pb(worker_pb2.Submit(handle=1, prompt_ids=PROMPT, **fields), 1, MODEL, 77, reservation)

    def test_kv_source_of_a_submit_message_arrives(self) -> None:
        found = self.submit(source=self.source()).source
        assert found == KvSource(KvReservation(9, 5, b"s" * RESERVATION_SECRET_BYTES), "10.0.0.1:7103", 3)
        assert self.submit().source is None

    def test_every_field_of_a_prefetch_message_arrives(self) -> None:
        message = worker_pb2.Prefetch(
            handle=4, prompt_ids=PROMPT, cache_salt="s", revision="r", source=self.source(), priority=-3
        )
        found = prefetch_from_pb(message, 2, MODEL)
        assert (found.peer, found.handle, found.salt, found.revision, found.priority) == (2, 4, "s", "r", -3)
        assert found.prompt_ids.tolist() == PROMPT and found.source == self.submit(source=self.source()).source

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"source": None}, "source"),
            ({"source": source(secret=b"short")}, "source.room.secret"),
            ({"source": source(pages=0)}, "source.room.pages"),
            ({"source": worker_pb2.KvSource(address="a" * 257, room=source().room)}, "source.address"),
            ({"prompt_ids": []}, "prompt_ids"),
            ({"prompt_ids": [VOCAB]}, "prompt_ids"),
            ({"cache_salt": "s" * (limits.MAX_CACHE_SALT_CHARS + 1)}, "cache_salt"),
            ({"revision": "r" * (limits.MAX_REVISION_CHARS + 1)}, "revision"),
        ],
        ids=["no source", "secret", "pages", "address", "no prompt", "vocabulary", "salt", "revision"],
    )
    def test_invalid_prefetch_message_is_refused(self, fields: dict[str, Any], field: str) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            prefetch_from_pb(worker_pb2.Prefetch(**{"prompt_ids": PROMPT, "source": self.source(), **fields}), 1, MODEL)
        assert refusal.value.field == field

    def test_submit_has_the_kv_reservation_when_it_requests_a_handover(self) -> None:
        reservation = KvReservation(1, 2, b"r" * RESERVATION_SECRET_BYTES)
        assert self.submit(reservation, hand_over=True).hand_over == reservation
        assert self.submit(reservation).hand_over is None

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"hand_over": True}, "hand_over"),
            ({"source": source(secret=b"short")}, "source.room.secret"),
            ({"source": source(pages=0)}, "source.room.pages"),
            ({"source": worker_pb2.KvSource(address="a" * 257, room=source().room)}, "source.address"),
            ({"source": source(), "session": worker_pb2.SessionTurn(session_id="s")}, "source"),
            ({"source": source(), "sampling": pb.SamplingParams(embedding=pb.Embedding())}, "source"),
            ({"source": source(), "sampling": pb.SamplingParams(score=pb.Score(label_token_ids=[1]))}, "source"),
        ],
        ids=["worker without KV reservations", "secret", "pages", "address", "session", "embedding", "score"],
    )
    def test_invalid_handover_or_kv_source_is_refused(self, fields: dict[str, Any], field: str) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            self.submit(**fields)
        assert refusal.value.field == field

    @pytest.mark.parametrize("kind", ["session", "embedding"])
    def test_handover_is_refused_for_session_turns_and_embeddings(self, kind: str) -> None:
        fields: dict[str, Any] = {"session": worker_pb2.SessionTurn(session_id="s")}
        if kind == "embedding":
            fields = {"sampling": pb.SamplingParams(embedding=pb.Embedding())}
        with pytest.raises(InvalidRequest) as refusal:
            self.submit(KvReservation(1, 2, b"r" * RESERVATION_SECRET_BYTES), hand_over=True, **fields)
        assert refusal.value.field == "hand_over"
