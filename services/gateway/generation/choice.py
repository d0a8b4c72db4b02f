"""A choice: one completion of a prompt, with its token ids, its text, and the part that the client has not received.

The dispatcher passes the worker's output to the choice, and a Decoding passes the detokenizer's text. New output is merged in the
choice until the request's task takes it as one Delta. A choice may move to another worker with the same parameters, and has all
data that the other worker needs to continue it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.generation.decoding import Decoding
from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.gateway.generation.logprobs import EMPTY_TABLE, NO_LOGPROBS, LogprobSpan, LogprobTable
from rootstock_llm.services.gateway.generation.origin import Caller, Origin
from rootstock_llm.services.gateway.generation.request import GenerationParams, ModelVersion, PromptInput
from rootstock_llm.services.gateway.generation.routed_experts import RoutedExpertsTable
from rootstock_llm.services.gateway.generation.trace import RequestTrace
from rootstock_llm.services.gateway.output.output_parser import CallDropped, CallStart, Event, OutputParser, Parsing, PlainText
from rootstock_llm.services.gateway.routing import session_home

TIERS = ("device", "host", "storage")  # SGLang's names for tiers of cached KV
_FINISH_REASONS = {pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_ABORT: "abort"}


class Series(Protocol):
    """The metrics of the requests of one model and API key. Times are in seconds."""

    def first_token(self, since_arrival: float) -> None: ...

    def further_tokens(self, between_two: float, count: int) -> None: ...

    def answered(self, prompt: int, cached: int, output: int, since_arrival: float) -> None:
        """Counts a complete response.

        Args:
            prompt: Tokens of the prompts.
            cached: Cached tokens among them.
            output: Output tokens.
            since_arrival: Seconds from the arrival of the request to its end.
        """


class ChoiceOwner(Protocol):
    """The RunningRequest of a choice. A Protocol avoids a circular import, because running.py imports this module."""

    request_id: str
    caller: Caller
    origin: Origin
    trace: RequestTrace | None
    model_source: str
    series: Series
    clock: Callable[[], float]  # the event loop's time in seconds
    arrived: float  # time of the request's arrival, by `clock`
    error: ApiError | None

    def streaming(self) -> None:
        """Records that a choice has output."""

    def has_output(self, choice: Choice) -> None:
        """Records that the choice has new output for take()."""

    def choice_ended(self, choice: Choice) -> None:
        """Frees the choice. Called once, after `ending` of the choice is set."""

    def fail(self, error: ApiError) -> None:
        """Ends every choice of the request with an error."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a complete choice, with the worker's counts."""

    finish_reason: str  # "stop", "length" or "abort"
    stop_reason: str | int | None  # matched stop string, pattern or token id, or None at the end of sequence or of a grammar
    matched: str | int | None  # as stop_reason, but with the token id of the end of sequence
    prompt_tokens: int  # tokens of the prompt; in a session, tokens of the whole context
    cached_tokens: int  # prompt tokens whose KV was cached
    completion_tokens: int  # output tokens
    queue_ms: int  # milliseconds in the queue of the worker that computed the prompt
    retractions: int  # times that the choice lost its KV to other requests
    verified_rows: int = 0  # see Finish in worker.proto
    drafted_tokens: int = 0  # see Finish in worker.proto
    accepted_tokens: int = 0  # see Finish in worker.proto
    accepted_prediction_tokens: int = 0  # accepted tokens of the client's prediction, over all workers of the choice
    rejected_prediction_tokens: int = 0  # rejected tokens of the client's prediction, over all workers of the choice
    cached_by_tier: Mapping[str, int] | None = None  # cached tokens by tier, or None if no tier has any


@dataclass(frozen=True, slots=True)
class EarlierOutput:
    """Stored output of a choice that this gateway continues. Another gateway, or an earlier attempt, has stored the output."""

    ids: Sequence[int] = ()  # output ids so far
    decoded: int = 0  # number of ids whose text a detokenizer has returned
    chars: int = 0  # number of characters of that text
    shown: int = 0  # number of ids whose text the client has received
    logprobs: Sequence[worker_pb2.LogprobRows] = ()  # log probabilities of all ids, if requested
    version: ModelVersion | None = None  # model version that computed the ids, or None if it is unknown
    numerics: str = ""  # WorkerInfo.numerics of the workers that computed the ids; "" if it is unknown


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice, for its client."""

    choice: Choice
    first: bool  # whether this is the first delta of the choice
    text: str
    # Ids of `text` and their log probabilities; empty if not requested. If the detokenizer has not returned the text of an id,
    # the id is in a later delta. Its text may belong to a stop string, or be a part of a character.
    token_ids: Sequence[int]
    logprobs: LogprobSpan
    ending: Ending | None  # set in the last delta


class Choice:
    """A completion of a prompt. Lives as long as its request. All methods run on the event loop."""

    __slots__ = (
        "_delivered",
        "_delivered_ids",
        "_embedding",
        "_label_logprobs",
        "_last_at",
        "_pieces",
        "_predicted",
        "_predicted_before",
        "_prefilled",
        "_shown_ids",
        "decoding",
        "ending",
        "index",
        "logprobs",
        "number",
        "output_ids",
        "params",
        "prompt",
        "prompt_logprobs",
        "request",
        "resumed",
        "routed_experts",
        "seed",
        "trace",
        "worker_ending",
    )

    def __init__(
        self,
        request: ChoiceOwner,
        index: int,
        number: int,
        prompt: PromptInput,
        params: GenerationParams,
        seed: int | None,
    ) -> None:
        self.request = request
        self.index = index  # index among all choices of the request
        self.number = number  # index among the choices of its prompt
        self.prompt = prompt
        self.params = params
        self.seed = seed  # seed of sampling on every worker, or None if no token is drawn
        self.trace = None if request.trace is None else request.trace.choice(self.request_id)
        self.resumed: EarlierOutput | None = None  # output that resume() continues, without its log probabilities
        # Output of the worker.
        self.output_ids: list[int] = []  # `decoding` reads the same list
        self.logprobs = LogprobTable() if params.wants_logprobs else EMPTY_TABLE  # rows of output_ids, if requested
        self.prompt_logprobs = EMPTY_TABLE  # rows of prompt tokens from position max(1, prompt_from) on
        wanted = params.routed_experts
        self.routed_experts = None if wanted is None else RoutedExpertsTable(wanted.per_token)  # None: not requested
        self.worker_ending: Ending | None = None  # set when the worker has ended the choice
        self._embedding: Sequence[float] | None = None
        self._label_logprobs: Sequence[float] | None = None
        self._predicted = 0, 0  # accepted and rejected prediction tokens at the current worker
        self._predicted_before = 0, 0  # accepted and rejected prediction tokens at earlier workers
        self._prefilled: worker_pb2.Finish | None = None  # last message of the first prefill worker, or None without one
        # Text of the detokenizer.
        self.ending: Ending | None = None  # set when the last text has arrived
        self._pieces = [prompt.prefix] if prompt.prefix else []  # text that take() has not returned
        self._shown_ids = 0  # number of ids that were decoded when the last text that is not empty arrived
        self._delivered_ids = 0  # number of ids whose text take() has returned
        self._delivered = False  # whether take() has returned a delta
        self._last_at = 0.0  # loop time of the last token; 0.0 before the first
        self.decoding = Decoding(
            self,
            request.request_id,
            self.output_ids,
            prompt.ids,
            params.sampling.stop,
            params.skip_special_tokens,
            params.include_stop,
            model=request.model_source,
            traceparent=request.origin.traceparent,
            patient=not params.stream,
            kept_tokens=params.parsing.kept_tokens if params.parsing is not None else (),
        )

    def resume(self, earlier: EarlierOutput) -> None:
        """Continues earlier output. Called before the choice is dispatched.

        Raises:
            ValueError: The log probabilities have unequal shapes.
        """
        self.resumed = replace(earlier, logprobs=())
        self.output_ids += earlier.ids
        for rows in earlier.logprobs:
            self.add_logprobs(rows)
        self.decoding.resume(earlier.decoded, earlier.chars)
        self._shown_ids = self._delivered_ids = earlier.shown
        self._delivered = earlier.chars > 0
        if earlier.decoded:
            self._last_at = self.request.clock()  # so that the next token does not count as the first one

    @property
    def request_id(self) -> str:
        """Request id on the worker."""
        own = self.prompt.request_id
        if not own:
            return f"{self.request.request_id}-{self.index}"
        return f"{own}-{self.number}" if self.params.n > 1 else own

    @property
    def cache_salt(self) -> str:
        """Cache salt on the worker; see Caller.cache_salt_of()."""
        return self.request.caller.cache_salt_of(self.params.cache_salt)

    @property
    def session_id(self) -> str:
        """Session id on the worker; "" outside of sessions."""
        session = self.params.session
        return "" if session is None else session_home.owned_id(session.session_id, self.request.caller.key)

    @property
    def priority(self) -> int:
        """Priority of the request, within the limit of its API key."""
        return self.request.caller.priority_of(self.params.priority)

    @property
    def can_move(self) -> bool:
        """Whether another worker can continue the choice. A session's turn cannot move: only its worker has the session's KV."""
        return self.worker_ending is None and self.params.session is None and self.request.error is None

    @property
    def generates(self) -> bool:
        """Whether the output is tokens, not a vector or a score."""
        return not self.params.ends_with_prompt

    @property
    def lacks_logprobs(self) -> bool:
        """Whether requested log probabilities of output ids are missing."""
        return self.params.wants_logprobs and len(self.logprobs) != len(self.output_ids)

    @property
    def _predictions(self) -> tuple[int, int]:
        """Numbers of accepted and rejected tokens of the client's prediction, summed over all workers of the choice."""
        before, here = self._predicted_before, self._predicted
        return before[0] + here[0], before[1] + here[1]

    @property
    def routed_experts_from(self) -> int | None:
        """Position of the first token with routed experts that a worker still has to return; None if there is no such token."""
        wanted, table = self.params.routed_experts, self.routed_experts
        return None if wanted is None or table is None else wanted.start + len(table)

    def lacks_routed_experts(self, finish: worker_pb2.Finish) -> bool:
        """Returns whether requested routed experts are missing after the worker's last message.

        The last output token has none, because no step has computed it.
        """
        num_computed = finish.prompt_tokens + max(finish.completion_tokens - 1, 0)
        return self.routed_experts_from is not None and self.routed_experts_from != num_computed

    def vector(self) -> NDArray[np.float32]:
        """Returns float32[dimensions], little-endian, of a complete embedding."""
        assert self._embedding is not None, "the worker's last message of an embedding request has the vector"
        return np.array(self._embedding, dtype="<f4")

    def label_logprobs(self) -> NDArray[np.float64]:
        """Returns float64[labels] of a complete score."""
        assert self._label_logprobs is not None, "the worker's last message of a score request has the log probabilities"
        return np.array(self._label_logprobs, dtype=np.float64)

    # Output of the worker

    def extend(self, ids: Sequence[int]) -> None:
        """Adds output ids. Metrics record the time of the ids: in a stream, when their text arrives; otherwise now."""
        self.output_ids += ids
        if ids and self.decoding.patient:
            self._time(len(ids))
            self.request.streaming()

    def add_logprobs(self, rows: worker_pb2.LogprobRows) -> None:
        """Adds the log probabilities of the next output tokens. Raises ValueError if the shape differs from earlier rows."""
        if self.logprobs is EMPTY_TABLE:
            self.logprobs = LogprobTable()
        self.logprobs.extend(rows)

    def add_prompt_logprobs(self, rows: worker_pb2.LogprobRows) -> None:
        """Adds the log probabilities of the next prompt tokens. Raises ValueError if the shape differs from earlier rows."""
        if self.prompt_logprobs is EMPTY_TABLE:
            self.prompt_logprobs = LogprobTable()
        self.prompt_logprobs.extend(rows)

    def add_routed_experts(self, ids: bytes) -> None:
        """Adds the routed experts of the next tokens. Raises ValueError if they were not requested, or end within a token."""
        if self.routed_experts is None:
            raise ValueError("the worker sent routed experts that the request does not ask for")
        self.routed_experts.extend(ids)

    def set_predicted(self, accepted: int, rejected: int) -> None:
        """Sets the numbers of tokens of the client's prediction that the current worker has accepted and rejected."""
        self._predicted = accepted, rejected

    def leave_worker(self) -> None:
        """Prepares the move to another worker. Drops incomplete log probabilities and routed experts of the prompt."""
        self._predicted_before, self._predicted = self._predictions, (0, 0)
        if not self.output_ids:
            self.prompt_logprobs = EMPTY_TABLE
            if self.routed_experts is not None:
                self.routed_experts.clear()

    def handed_over(self, finish: worker_pb2.Finish) -> None:
        """Records the last message of a prefill worker. If there are several prefill workers, only the first one counts."""
        if self._prefilled is None:
            self._prefilled = finish

    def has_all_label_logprobs(self, finish: worker_pb2.Finish) -> bool:
        """Returns whether the last message of a score has a log probability for each label. True if no score was requested."""
        sampling = self.params.sampling
        return not sampling.HasField("score") or len(finish.label_logprobs) == len(sampling.score.label_token_ids)

    def finish(self, finish: worker_pb2.Finish) -> None:
        """Receives the worker's last message of a complete choice. The last text arrives later, unless the output has no text."""
        prefilled = finish if self._prefilled is None else self._prefilled
        self.worker_ending = _ending_of(finish, prefilled, self.params, self._predictions)
        # The detokenizer removes a matched stop string from the text. The text of a matched stop pattern stays.
        self.decoding.finish(finish.matched_stop if finish.reason == pb.FINISH_REASON_MATCHED_STRING else "")
        if finish.reason == pb.FINISH_REASON_EMBEDDED:
            self._embedding = finish.embedding
            self._end()
        elif finish.reason == pb.FINISH_REASON_SCORED:
            self._label_logprobs = finish.label_logprobs
            self._end()

    # Text of the detokenizer

    def on_text(self, text: str, count: int) -> None:
        """Implements DecodeSink: receives the text of the next `count` ids."""
        if text and not self.params.hidden:
            self._pieces.append(text)
        if count and not self.decoding.patient:
            self._time(count)
        if text or self.decoding.done:
            self._shown_ids = self.decoding.decoded
        if self.decoding.done:
            self._end()
        else:
            self.request.has_output(self)

    def on_decode_failed(self, error: ApiError) -> None:
        """Implements DecodeSink: fails the request."""
        self.request.fail(error)

    def take(self) -> Delta | None:
        """Returns the output since the last take(). None if there is no new text and `ending` is not set."""
        if not self._pieces and self.ending is None:
            return None
        text = "".join(self._pieces)
        self._pieces.clear()
        params = self.params
        begin, end = self._delivered_ids, 0 if params.hidden else self._shown_ids
        self._delivered_ids = self._shown_ids
        wants_logprobs = params.wants_logprobs
        ids = self.output_ids[begin:end] if params.answer.return_token_ids or wants_logprobs else ()
        logprobs = self.logprobs.span(begin, end) if wants_logprobs else NO_LOGPROBS
        first, self._delivered = not self._delivered, True
        return Delta(self, first, text, ids, logprobs, self.ending)

    @property
    def taken(self) -> tuple[int, int, int]:
        """Values of the fields `decoded`, `chars` and `shown` of an EarlierOutput. Valid directly after take()."""
        return self.decoding.decoded, self.decoding.emitted_chars, self._delivered_ids

    def _end(self) -> None:
        assert self.ending is None and self.worker_ending is not None, "one terminal event per choice"
        self.ending = self.worker_ending
        self.request.choice_ended(self)
        self.request.has_output(self)

    def _time(self, count: int) -> None:
        request = self.request
        now = request.clock()
        if self._last_at == 0.0:
            request.series.first_token(now - request.arrived)
        else:
            request.series.further_tokens((now - self._last_at) / count, count)
        self._last_at = now


class ChoiceReader:
    """Parses the text of one choice into events: text, reasoning and tool calls."""

    __slots__ = ("_parser", "_parsing", "called")

    def __init__(self, parsing: Parsing | None) -> None:
        """Makes the parser. If `parsing` is None, all output is text."""
        self._parsing = parsing
        self._parser: OutputParser = PlainText() if parsing is None else parsing.parser()
        self.called = False  # whether the output has a tool call

    def read(self, delta: Delta) -> list[Event]:
        """Returns the events of the next delta, possibly none."""
        events = list(self._parser.feed(delta.text))
        if delta.ending is not None:
            events += self._parser.finish(cut=delta.ending.finish_reason in ("length", "abort"))
        if self._parsing is not None:
            for event in events:
                if isinstance(event, CallStart):
                    self.called = True
                elif isinstance(event, CallDropped):
                    self._parsing.dropped()
        return events

    def replay(self, texts: Iterable[str]) -> None:
        """Parses texts that another gateway has parsed before. The client has their events, so none is returned or counted."""
        for text in texts:
            for _ in self._parser.feed(text):
                continue


def _ending_of(
    finish: worker_pb2.Finish, prefilled: worker_pb2.Finish, params: GenerationParams, predicted: tuple[int, int]
) -> Ending:
    """Returns the ending of a complete choice.

    Args:
        finish: Last message of the worker that computed the output.
        prefilled: Last message of the worker that computed the prompt. It has the cached tokens and the time in the queue.
        predicted: Accepted and rejected prediction tokens.
    """
    matched: str | int | None = None
    if finish.reason in (pb.FINISH_REASON_MATCHED_STRING, pb.FINISH_REASON_MATCHED_REGEX):
        matched = finish.matched_stop
    elif finish.reason == pb.FINISH_REASON_MATCHED_TOKEN and finish.HasField("matched_token"):
        matched = finish.matched_token
    reason = _FINISH_REASONS.get(finish.reason, "stop")
    num_tokens = finish.completion_tokens
    if params.hidden:  # the client requested no output tokens, so none are counted
        matched, num_tokens, reason = None, 0, "abort" if reason == "abort" else "length"
    is_end_of_sequence = isinstance(matched, int) and matched not in params.stop_token_ids
    return Ending(
        finish_reason=reason,
        stop_reason=None if is_end_of_sequence else matched,
        matched=matched,
        prompt_tokens=finish.prompt_tokens,
        cached_tokens=prefilled.cached_tokens,
        completion_tokens=num_tokens,
        queue_ms=prefilled.queue_ms,
        retractions=finish.retractions,
        verified_rows=finish.verified_rows,
        drafted_tokens=finish.drafted_tokens,
        accepted_tokens=finish.accepted_tokens,
        accepted_prediction_tokens=predicted[0],
        rejected_prediction_tokens=predicted[1],
        cached_by_tier=_by_tier(prefilled),
    )


def _by_tier(finish: worker_pb2.Finish) -> dict[str, int] | None:
    """Returns cached tokens by SGLang's names of tiers, or None if all are 0.

    Tokens that were read from another worker have the name "peer".
    """
    found = dict(zip(TIERS, (finish.cached_device_tokens, finish.cached_host_tokens, finish.cached_storage_tokens), strict=True))
    if finish.cached_peer_tokens:
        found["peer"] = finish.cached_peer_tokens
    return found if any(found.values()) else None
