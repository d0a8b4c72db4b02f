"""The text of one choice as it comes from a detokenizer, and what of it waits for the client: a slow one costs one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rootstock.v1 import common_pb2 as pb
from rootstock.v1 import worker_pb2
from services.gateway.request.choice_output import ChoiceOutput, Ending
from services.gateway.request.decoding import Decoding
from services.gateway.request.errors import ApiError
from services.gateway.request.generation import Generation, Part
from services.gateway.request.logprobs import LogprobSpan


class TextEvents(Protocol):
    """Who the text is for. Called on the event loop; must not block."""

    def has_news(self) -> None:
        """There is more to take."""

    def begun(self) -> None:
        """A token has come."""

    def ended(self) -> None:
        """The answer is complete; comes once, before its last news."""

    def failed(self, error: ApiError) -> None:
        """No text will follow."""


class TokenTimes(Protocol):
    """Told when text arrives. Seconds."""

    def first_token(self, since_arrival: float) -> None: ...

    def further_tokens(self, between_two: float, count: int) -> None: ...


class Clock(NamedTuple):
    """now: the event loop's time. arrived: when the request did. times: what is told of it."""

    now: Callable[[], float]
    arrived: float
    times: TokenTimes


class Taken(NamedTuple):
    """A piece for the client. first: there was none before it. token_ids, logprobs: where they are wanted, of those tokens whose
    text this is; one that gave no text when it came (held back for a stop string, part of a character) waits for the next."""

    first: bool
    text: str
    token_ids: Sequence[int]
    logprobs: LogprobSpan
    ending: Ending | None


class ChoiceText:
    """decoding: its way through detokenizers. ending: the whole answer's, once its last text is here."""

    __slots__ = (
        "_clock",
        "_delivered",
        "_events",
        "_generation",
        "_last_at",
        "_output",
        "_pieces",
        "_shown_ids",
        "_taken_ids",
        "decoding",
        "ending",
    )

    def __init__(
        self, part: Part, output: ChoiceOutput, events: TextEvents, clock: Clock, request_id: str, model: str, traceparent: str
    ) -> None:
        """request_id: for logs. model: as detokenizers name it. traceparent: "" where nothing is traced."""
        generation = part.generation
        self._generation: Generation = generation
        self._output = output
        self._events = events
        self._clock = clock
        self._pieces = [part.prefix] if part.prefix else []
        self._shown_ids = 0  # ids whose text has come, not counting those at the end that have given no text yet
        self._taken_ids = 0
        self._delivered = False  # the client has something of it
        self._last_at = 0.0
        self.ending: Ending | None = None
        self.decoding = Decoding(
            self,
            request_id,
            output.ids,
            part.prompt.ids,
            generation.sampling.stop,
            generation.skip_special_tokens,
            generation.include_stop,
            model=model,
            traceparent=traceparent,
            patient=not generation.stream,
            kept_tokens=generation.parsing.kept_tokens if generation.parsing is not None else (),
        )

    def resume(self, decoded: int, chars: int, shown: int) -> None:
        """So many ids have been decoded elsewhere, to so many characters, which somebody has. shown: ids that these are of."""
        self.decoding.resume(decoded, chars)
        self._shown_ids = self._taken_ids = shown
        self._delivered = chars > 0
        if decoded:
            self._last_at = self._clock.now()  # the next token is not its first

    @property
    def place(self) -> tuple[int, int, int]:
        """Ids decoded, characters of them, and ids whose text has been taken: what resume() goes on from after a take()."""
        return self.decoding.decoded, self.decoding.emitted_chars, self._taken_ids

    def finish(self, finish: worker_pb2.Finish) -> None:
        """The output is complete; its last text is still to come, unless it is a vector or a score."""
        # What a stop pattern has matched stays in the text; a stop string is cut off.
        self.decoding.finish(finish.matched_stop if finish.reason == pb.FINISH_REASON_MATCHED_STRING else "")
        if finish.reason in (pb.FINISH_REASON_EMBEDDED, pb.FINISH_REASON_SCORED):
            self._end()

    def ids_came(self, count: int) -> None:
        """So many have been added to the output. Of an answer that nobody reads before its end, this is when they are timed."""
        if self.decoding.patient:
            self._time(count)
            self._events.begun()

    def on_text(self, text: str, count: int) -> None:
        if text and not self._generation.hidden:
            self._pieces.append(text)
        if count and not self.decoding.patient:
            self._time(count)
        if text or self.decoding.done:
            self._shown_ids = self.decoding.decoded
        if self.decoding.done:
            self._end()
        else:
            self._events.has_news()

    def on_decode_failed(self, error: ApiError) -> None:
        self._events.failed(error)

    def take(self) -> Taken | None:
        """What has gathered for the client, or None if there is nothing to show yet. Never None after the ending."""
        if not self._pieces and self.ending is None:
            return None
        text = "".join(self._pieces)
        self._pieces.clear()
        generation, output = self._generation, self._output
        begin, end = self._taken_ids, 0 if generation.hidden else self._shown_ids
        self._taken_ids = self._shown_ids
        ids = output.ids[begin:end] if generation.answer.return_token_ids or generation.wants_logprobs else ()
        logprobs = output.logprobs.span(begin, end if generation.wants_logprobs else 0)
        first, self._delivered = not self._delivered, True
        return Taken(first, text, ids, logprobs, self.ending)

    def _end(self) -> None:
        verdict = self._output.verdict
        assert self.ending is None and verdict is not None, "one terminal event per choice"
        self.ending = verdict
        self._events.ended()
        self._events.has_news()

    def _time(self, count: int) -> None:
        clock = self._clock
        now = clock.now()
        if self._last_at == 0.0:
            clock.times.first_token(now - clock.arrived)
        else:
            clock.times.further_tokens((now - self._last_at) / count, count)
        self._last_at = now
