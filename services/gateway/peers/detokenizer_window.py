"""The open decodings, unsent changes and unanswered batches of one stream to a detokenizer.

The state belongs to the event loop, and nothing here does I/O. Handles are unique within a stream. A decoding is in `open` from
adopt() until its last text, drop() or reset().
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rootstock.v1 import detokenizer_pb2
from services.gateway.peers.reconnect import StreamBroken
from services.gateway.request.decoding import Decoding

# Most unanswered batches: one is on its way while the other is decoded. New ids of a row wait for its next batch.
MAX_IN_FLIGHT = 2
# Most ids of a batch, replayed ids and characters of stop strings included, unless it has only one row. So each batch is answered
# soon, even if all decodings of a lost detokenizer arrive together.
MAX_BATCH_IDS = 1 << 17

Rows = list[tuple[int, int, bool]]  # handle, new ids, finished


class DecodeWindow:
    """The state of one stream to a detokenizer. A new stream continues with the state after reset()."""

    def __init__(self, on_lost: Callable[[list[Decoding]], None], on_change: Callable[[], None]) -> None:
        """Makes an empty window.

        Args:
            on_lost: Called with decodings that the detokenizer does not know.
            on_change: Called when there may be more to send, or fewer decodings are open.
        """
        self.open: dict[int, Decoding] = {}  # by handle, sent or not
        self.answers = 0  # batches answered
        self._opening: dict[int, Decoding] = {}  # decodings of _dirty whose open message is not sent
        self._dirty: dict[int, Decoding] = {}  # decodings with ids or a finish to send
        self._closes: list[int] = []  # handles of dropped decodings, to be sent
        self._in_flight: deque[tuple[int, Rows]] = deque()  # unanswered batches
        self._seq = 0
        self._on_lost = on_lost
        self._on_change = on_change

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_more(self) -> bool:
        return bool(self._dirty or self._closes)

    def adopt(self, decoding: Decoding, handle: int) -> None:
        """Pins a decoding to this stream under a handle that was never used before."""
        decoding.stream, decoding.handle, decoding.sent = self, handle, decoding.decoded
        self.open[handle] = self._opening[handle] = self._dirty[handle] = decoding
        self._on_change()

    def touch(self, decoding: Decoding) -> None:
        self._dirty[decoding.handle] = decoding
        self._on_change()

    def drop(self, decoding: Decoding) -> None:
        if self.open.pop(decoding.handle, None) is None:
            return
        self._dirty.pop(decoding.handle, None)
        if self._opening.pop(decoding.handle, None) is None:
            self._closes.append(decoding.handle)
        decoding.stream = None
        self._on_change()

    def greeting(self) -> detokenizer_pb2.DecodeBatch:
        """Returns the first batch of a stream. It is empty, and its reply shows that the stream is served."""
        self._in_flight.append((0, []))
        return detokenizer_pb2.DecodeBatch(seq=0)

    def next_batch(self) -> detokenizer_pb2.DecodeBatch | None:
        """Returns a batch of the changes since the last one. None if there are no changes or too many batches are unanswered."""
        if not self.has_more or len(self._in_flight) >= MAX_IN_FLIGHT:
            return None
        self._seq += 1
        batch = detokenizer_pb2.DecodeBatch(seq=self._seq, closes=self._closes)
        self._closes.clear()
        rows: Rows = []
        size = 0
        for handle, decoding in self._dirty.items():
            opens = handle in self._opening
            size += len(decoding.ids) - decoding.sent + (decoding.open_size if opens else 0)
            if rows and size > MAX_BATCH_IDS:
                break
            if opens:
                batch.opens.append(decoding.open_message())
            new = decoding.ids[decoding.sent :]
            decoding.sent = len(decoding.ids)
            rows.append((handle, len(new), decoding.finished))
            batch.token_ids.extend(new)
            batch.matched_stops.append(decoding.matched_stop)
        batch.handles.extend(row[0] for row in rows)
        batch.counts.extend(row[1] for row in rows)
        batch.finished.extend(row[2] for row in rows)
        for handle, _, _ in rows:
            del self._dirty[handle]
            self._opening.pop(handle, None)
        self._in_flight.append((self._seq, rows))
        return batch

    def answered(self, batch: detokenizer_pb2.TextBatch) -> None:
        """Applies the reply to the oldest unanswered batch.

        Decodings that the detokenizer does not know go to `on_lost`. The others get their texts.

        Raises:
            StreamBroken: The reply does not match the batch.
        """
        if not self._in_flight:
            raise StreamBroken("a reply without a batch")
        seq, rows = self._in_flight[0]
        if batch.unknown:
            unknown = frozenset(batch.unknown)
            lost = [row[0] for row in rows if row[0] in unknown]
            rows = [row for row in rows if row[0] not in unknown]
        else:
            lost = []
        if batch.seq != seq or len(batch.texts) != len(rows) or list(batch.handles) != [row[0] for row in rows]:
            raise StreamBroken("a reply that does not match its batch")
        self._in_flight.popleft()
        self.answers += 1
        # The lost decodings come first, because a sink that gets a text may touch or drop them.
        if lost:
            self._on_lost(self._take_lost(lost))
        for (handle, count, finished), text in zip(rows, batch.texts, strict=True):
            self._hand_out(handle, count, finished, text)
        self._on_change()

    def _hand_out(self, handle: int, count: int, finished: bool, text: str) -> None:
        decoding = self.open.get(handle)
        if decoding is None:
            return  # the decoding is dropped, or open under another handle
        decoding.breaks = 0
        decoding.decoded += count
        decoding.emitted_chars += len(text)
        if finished:
            del self.open[handle]
            decoding.stream, decoding.done = None, True
        decoding.sink.on_text(text, count)

    def _take_lost(self, handles: list[int]) -> list[Decoding]:
        lost = [self.open.pop(handle) for handle in handles if handle in self.open]
        for decoding in lost:
            self._dirty.pop(decoding.handle, None)
            decoding.stream = None
            decoding.lost += 1
        return lost

    def reset(self) -> list[Decoding]:
        """Clears the window after the end of its stream. Returns the open decodings."""
        orphans = list(self.open.values())
        for _, rows in self._in_flight:
            for handle, _, _ in rows:
                if handle in self.open:
                    self.open[handle].breaks += 1
        self.open.clear()
        self._opening.clear()
        self._dirty.clear()
        self._closes.clear()
        self._in_flight.clear()
        self._seq = 0
        for decoding in orphans:
            decoding.stream = None
        return orphans
