"""One handle's way from token ids to text: everything that is needed to go on decoding on another detokenizer.

Written by its owner (ids, resume, finish), by the DecodeWindow that holds it (the rest), and by the DetokPool (homeless).
"""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Sequence
from typing import Protocol

from rootstock.v1 import detokenizer_pb2
from services.gateway.request.errors import ApiError

PATIENT_IDS = 64  # that gather where nobody reads before the end: a message costs its gateway more than all that is in it
PROMPT_TAIL = 5  # ids of the prompt that give the first decoded piece its context


class DecodeSink(Protocol):
    """Who a Decoding's text is for. Both are called on the event loop and must not block."""

    def on_text(self, text: str, count: int) -> None:
        """`count` more ids are decoded; `text` may be empty. The last call comes with the decoding's `done` set."""

    def on_decode_failed(self, error: ApiError) -> None:
        """No text will follow."""


class DecodeStream(Protocol):
    """What a decoding is pinned to."""

    def touch(self, decoding: Decoding) -> None:
        """`ids` has grown or the decoding is finished."""

    def drop(self, decoding: Decoding) -> None:
        """No more text is wanted. No effect on one that is not here."""


class Decoding:
    __slots__ = (
        "_open_fields",
        "_stop_chars",
        "breaks",
        "decoded",
        "done",
        "emitted_chars",
        "finished",
        "handle",
        "homeless",
        "ids",
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
        """`ids` is shared with the owner, who appends to it. patient: nobody reads its text before its
        end. model: whose ids they are, as detokenizers name it; "" for any.
        traceparent: "" for ids of a request that is not traced. kept_tokens: special ones that are not skipped, by their text."""
        self.sink = sink
        self.request_id = request_id  # for logs
        self.ids = ids
        self.handle = 0  # of the stream that it is open on; a new one with every open
        self.stream: DecodeStream | None = None  # None: on no detokenizer
        self.homeless: TimerHandle | None = None  # runs while no detokenizer is connected
        self.sent = 0  # ids that went out on the current stream or were replayed to it
        self.decoded = 0  # ids whose text has come back
        self.emitted_chars = 0  # of all text that has come back
        self.breaks = 0  # batches of it that no answer came to because the stream broke, since it last got text
        self.lost = 0  # times that a detokenizer did not know it, or failed to decode it
        self.finished = False  # said by the owner
        self.done = False  # the detokenizer has answered the finish
        self.matched_stop = ""
        self.model = model
        self.traceparent = traceparent
        self.patient = patient
        self._open_fields = (prompt_ids[-PROMPT_TAIL:], tuple(stop), skip_special_tokens, include_stop, tuple(kept_tokens))
        self._stop_chars = sum(map(len, stop))

    @property
    def may_wait(self) -> bool:
        """What there is to decode can go with what is to come."""
        return self.patient and not self.finished and len(self.ids) - self.sent < PATIENT_IDS

    def resume(self, decoded: int, emitted_chars: int) -> None:
        """So much of it has come back elsewhere. Before it is on any detokenizer."""
        self.decoded, self.emitted_chars = decoded, emitted_chars

    def finish(self, matched_stop: str) -> None:
        """No ids follow those that `ids` holds."""
        self.finished = True
        self.matched_stop = matched_stop

    @property
    def open_size(self) -> int:
        """Ids and characters that an open_message has."""
        return self.decoded + self._stop_chars

    def open_message(self) -> detokenizer_pb2.DecodeOpen:
        """What a stream needs that has never seen this handle. The ids after `decoded` follow as rows."""
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
