"""The text of one choice as it comes from a detokenizer, and what of it waits for the client: a slow one costs one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rootstock.v1 import common_pb2 as pb
from rootstock.v1 import worker_pb2
from services.gateway.request.choice_output import ChoiceOutput, Ending
from services.gateway.request.decoding import Decoding
from services.gateway.request.errors import ApiError
from services.gateway.request.generation import Generation, Part
from services.gateway.request.logprobs import LogprobSpan

if TYPE_CHECKING:
    from services.gateway.request.request import Choice


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice, for its client."""

    choice: Choice
    first: bool  # the choice has had no delta before
    text: str
    # If the client wants them: ids whose text this is, and their log probabilities. An id without text so far (held back for a
    # stop string, part of a character) waits for the next delta.
    token_ids: Sequence[int]
    logprobs: LogprobSpan
    ending: Ending | None  # None while the choice goes on


class ChoiceText:
    """decoding: its way through detokenizers. ending: the whole answer's, once its last text is here."""

    __slots__ = (
        "_choice",
        "_delivered",
        "_generation",
        "_last_at",
        "_output",
        "_pieces",
        "_shown_ids",
        "_taken_ids",
        "decoding",
        "ending",
    )

    def __init__(self, choice: Choice, part: Part, output: ChoiceOutput) -> None:
        request, generation = choice.request, part.generation
        self._choice = choice
        self._generation: Generation = generation
        self._output = output
        self._pieces = [part.prefix] if part.prefix else []
        self._shown_ids = 0  # ids whose text has come, not counting those at the end that have given no text yet
        self._taken_ids = 0
        self._delivered = False  # the client has something of it
        self._last_at = 0.0
        self.ending: Ending | None = None
        self.decoding = Decoding(
            self,
            request.request_id,
            output.ids,
            part.prompt.ids,
            generation.sampling.stop,
            generation.skip_special_tokens,
            generation.include_stop,
            model=request.model_source,
            traceparent=request.origin.traceparent,
            patient=not generation.stream,
            kept_tokens=generation.parsing.kept_tokens if generation.parsing is not None else (),
        )

    def resume(self, decoded: int, chars: int, shown: int) -> None:
        """So many ids have been decoded elsewhere, to so many characters, which somebody has. shown: ids that these are of."""
        self.decoding.resume(decoded, chars)
        self._shown_ids = self._taken_ids = shown
        self._delivered = chars > 0
        if decoded:
            self._last_at = self._choice.request.clock()  # the next token is not its first

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
            self._choice.begun()

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
            self._choice.has_news()

    def on_decode_failed(self, error: ApiError) -> None:
        self._choice.failed(error)

    def take(self) -> Delta | None:
        """Returns the output since the last take, or None if there is none. After the ending it is never None."""
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
        return Delta(self._choice, first, text, ids, logprobs, self.ending)

    def _end(self) -> None:
        verdict = self._output.verdict
        assert self.ending is None and verdict is not None, "one terminal event per choice"
        self.ending = verdict
        self._choice.ended()
        self._choice.has_news()

    def _time(self, count: int) -> None:
        request = self._choice.request
        now = request.clock()
        if self._last_at == 0.0:
            request.series.first_token(now - request.arrived)
        else:
            request.series.further_tokens((now - self._last_at) / count, count)
        self._last_at = now
