"""The decoding of one sequence of token ids to text, with the state to continue it on another detokenizer.

Three objects change it: its owner (ids, resume, finish), the DetokPool (link_timer), and the DecodeWindow on which it is open
(all other fields).
"""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Sequence
from typing import Protocol

from rootstock_llm.protos import detokenizer_pb2
from rootstock_llm.services.gateway.generation.errors import ApiError

PATIENT_IDS = 64  # ids per message of a response that is not a stream; a message costs more than its ids
PROMPT_TAIL = 5  # last ids of the prompt, which the first decoded text depends on


class DecodeSink(Protocol):
    """The receiver of a Decoding's text. Both methods are called on the event loop and must not block."""

    def on_text(self, text: str, count: int) -> None:
        """Receives the text of `count` more ids, which may be empty. `done` of the decoding is set before the last call."""

    def on_decode_failed(self, error: ApiError) -> None:
        """Receives the error after which no text follows."""


class DecodeStream(Protocol):
    """The stream to a detokenizer that a decoding is open on."""

    def touch(self, decoding: Decoding) -> None:
        """Sends new ids, or the end of a finished decoding."""

    def drop(self, decoding: Decoding) -> None:
        """Closes a decoding. No effect if it is not open on this stream."""


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
            ids: Shared with the owner, which appends to it.
            model: Model id of the detokenizer; "" for any detokenizer.
            traceparent: "" if the request is not traced.
            patient: Whether the text is used only when it is complete, so that ids may wait for more ids.
            kept_tokens: Texts of special tokens that stay in the text.
        """
        self.sink = sink
        self.request_id = request_id  # for logs
        self.ids = ids
        self.handle = 0  # on its stream; a new one with every open
        self.stream: DecodeStream | None = None  # None: open on no detokenizer
        self.link_timer: TimerHandle | None = None  # runs while no detokenizer is connected
        self.sent = 0  # ids sent or replayed to the current stream
        self.decoded = 0  # ids whose text was received
        self.emitted_chars = 0  # characters of the received text
        self.breaks = 0  # batches lost with their stream since the last text
        self.lost = 0  # times that a detokenizer did not have the handle, or failed to decode the ids
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
        """Continues behind text that another gateway has received. Called before the first open."""
        self.decoded, self.emitted_chars = decoded, emitted_chars

    def finish(self, matched_stop: str) -> None:
        """Notes that `ids` is complete. `matched_stop` is the stop string to cut off, or ""."""
        self.finished = True
        self.matched_stop = matched_stop

    @property
    def open_size(self) -> int:
        """Size of open_message() in ids and characters."""
        return self.decoded + self._stop_chars

    def open_message(self) -> detokenizer_pb2.DecodeOpen:
        """Returns the message that opens this handle on a stream. The ids behind `decoded` follow as rows."""
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
