"""The decoding of one sequence of token ids to text, with the state to continue it on another detokenizer.

Three objects change a Decoding:

- its owner: `ids`, resume() and finish();
- the DetokPool: `link_timer`;
- the DecodeWindow on which it is open: all other fields.
"""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Sequence
from typing import Protocol

from rootstock_llm.protos import detokenizer_pb2
from rootstock_llm.services.gateway.generation.errors import ApiError

PATIENT_IDS = 64  # token ids that a decoding without a stream collects per message, because a message costs more than its ids
PROMPT_TAIL = 5  # number of last prompt ids that the detokenizer gets, because the first text depends on them


class DecodeSink(Protocol):
    """The receiver of a Decoding's text. Both methods are called on the event loop and must not block."""

    def on_text(self, text: str, count: int) -> None:
        """Receives the text of the next `count` ids. The text may be empty. Decoding.done is set before the last call."""

    def on_decode_failed(self, error: ApiError) -> None:
        """Receives the error that ends the decoding. No text follows."""


class DecodeStream(Protocol):
    """The stream to a detokenizer on which a decoding is open."""

    def touch(self, decoding: Decoding) -> None:
        """Queues new ids or the end of a decoding, to be sent."""

    def drop(self, decoding: Decoding) -> None:
        """Closes a decoding. Has no effect if the decoding is not open on this stream."""


class Decoding:
    """The decoding of token ids to text by a detokenizer, for a Choice or a single call. Ends when it is `done` or dropped."""

    __slots__ = (
        "_open_fields",
        "_stop_chars",
        "breaks",
        "decoded",
        "done",
        "emitted_chars",
        "finished",
        "handle",
        "ids",
        "link_timer",
        "lost",
        "matched_stop",
        "model",
        "patient",
        "request_id",
        "sent",
        "sink",
        "stream",
        "traceparent",
    )

    def __init__(
        self,
        sink: DecodeSink,
        request_id: str,
        ids: Sequence[int],
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        model: str = "",
        traceparent: str = "",
        patient: bool = False,
        kept_tokens: Sequence[str] = (),
    ) -> None:
        """Creates a decoding that is not yet open on a detokenizer stream.

        Args:
            ids: Token ids to decode. The owner appends to this list.
            model: Model id of the detokenizer; "" for any detokenizer.
            traceparent: "" if the request is not traced.
            patient: Whether the text is needed only when it is complete. Ids may then wait, so that a message has more ids.
            kept_tokens: Texts of special tokens that stay in the text even if `skip_special_tokens` is set.
        """
        self.sink = sink
        self.request_id = request_id  # for logs
        self.ids = ids
        self.handle = 0  # id of the decoding on its stream; changes with each stream
        self.stream: DecodeStream | None = None  # stream on which the decoding is open, or None if it is not open
        self.link_timer: TimerHandle | None = None  # time limit of the wait for a detokenizer, or None while it does not wait
        self.sent = 0  # number of ids that the current stream has, from a replay or sent as new ids
        self.decoded = 0  # number of ids whose text was received
        self.emitted_chars = 0  # number of characters of the received text
        self.breaks = 0  # number of batches that were lost with their stream since the last text
        self.lost = 0  # number of times that a detokenizer did not have the handle, or failed to decode the ids
        self.finished = False  # the owner adds no more ids
        self.done = False  # the last text was received
        self.matched_stop = ""
        self.model = model
        self.traceparent = traceparent
        self.patient = patient
        self._open_fields = (prompt_ids[-PROMPT_TAIL:], tuple(stop), skip_special_tokens, include_stop, tuple(kept_tokens))
        self._stop_chars = sum(map(len, stop))

    @property
    def may_wait(self) -> bool:
        """Whether unsent ids may wait for more ids."""
        return self.patient and not self.finished and len(self.ids) - self.sent < PATIENT_IDS

    def resume(self, decoded: int, emitted_chars: int) -> None:
        """Continues after text that was received earlier. Called before the decoding is opened on a stream."""
        self.decoded, self.emitted_chars = decoded, emitted_chars

    def finish(self, matched_stop: str) -> None:
        """Records that `ids` is complete.

        Args:
            matched_stop: Stop string that the detokenizer removes from the text; "" for none.
        """
        self.finished = True
        self.matched_stop = matched_stop

    @property
    def open_size(self) -> int:
        """Size of open_message() in ids and characters."""
        return self.decoded + self._stop_chars

    def open_message(self) -> detokenizer_pb2.DecodeOpen:
        """Returns the message that opens this decoding on a stream. The ids after `decoded` are sent as rows of batches."""
        tail, stop, skip_special_tokens, include_stop, kept_tokens = self._open_fields
        return detokenizer_pb2.DecodeOpen(
            handle=self.handle,
            prompt_tail=tail,
            replay_ids=self.ids[: self.decoded],
            emitted_chars=self.emitted_chars,
            stop=stop,
            skip_special_tokens=skip_special_tokens,
            include_stop=include_stop,
            kept_tokens=kept_tokens,
            request_id=self.request_id,
            traceparent=self.traceparent,
        )
