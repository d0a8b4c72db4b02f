"""Streams a model's text to one coroutine. The coroutine yields if it needs more text to decide how to read the received text.

Every method scans new text once. It scans at most one mark's length of older text again, so reading takes linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from rootstock_llm.services.shared.limits import MAX_HELD_CALL_CHARS

T = TypeVar("T")
Steps = Generator[None, None, T]  # a coroutine that yields when it needs more text
Sink = Callable[[str], None]  # receives text in pieces

SPACE = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):
    """The next text does not fit the format, exceeds the limit of held text, or has ended.

    The reader then undoes or ends the call.
    """


def discard(text: str) -> None:
    """A sink that drops the text."""


class Marks:
    """A set of texts to search for. No text is the beginning of another text of the set."""

    def __init__(self, *texts: str) -> None:
        assert all(texts) and not any(one != other and other.startswith(one) for one in texts for other in texts)
        beginnings = {text[:size] for text in texts for size in range(1, len(text))}
        self._whole = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._begun = re.compile(f"(?:{'|'.join(map(re.escape, beginnings)) or '(?!)'})\\Z")
        self._most_begun = max(map(len, texts), default=1) - 1

    def find(self, text: str, at: int, stop: int) -> re.Match[str] | None:
        return self._whole.search(text, at, stop)

    def begun(self, text: str, at: int, stop: int) -> int:
        """Returns the index at which the incomplete mark at the end of text[at:stop] begins; `stop` if there is none."""
        found = self._begun.search(text, max(at, stop - self._most_begun), stop)
        return found.start() if found else stop

    def without(self, text: str) -> str:
        """Removes marks until the text has no mark.

        A removal can join the text around it to a new mark, so only the characters around each removal are searched again. The
        order of the removals does not change the result if no two marks overlap.
        """
        kept: list[str] = []  # the remaining characters of text[:at], which contain no mark
        at, most = 0, self._most_begun + 1
        while found := self._whole.search(text, at):
            kept += text[at : found.start()]
            at = found.end()
            while before := "".join(kept[-most:]):
                joined = self._whole.search(before + text[at : at + most])
                if not joined or joined.start() >= len(before):
                    break
                del kept[joined.start() - len(before) :]
                at += joined.end() - len(before)
        return "".join(kept) + text[at:]


class TextRecord:
    """The text that was read since the record was started. Its length is limited."""

    def __init__(self, most: int, text: str = "") -> None:
        self._pieces = [text] if text else []
        self.free = most - len(text)  # characters that may still be added

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self.free -= len(text)

    def give_back(self, count: int) -> None:
        """Removes the last `count` characters, or all characters if the record has fewer."""
        while count > 0 and self._pieces:
            last = self._pieces.pop()
            if len(last) > count:
                self._pieces.append(last[: len(last) - count])
            self.free += min(count, len(last))
            count -= len(last)

    @property
    def text(self) -> str:
        return "".join(self._pieces)


class Source:
    """A text stream. Its owner adds text and closes the source. One coroutine reads it.

    The coroutine can record the text that it reads, and give it back to read it again. While the source is bound to marks, it
    ends before the first mark.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # index of the next character to read
        self._num_dropped = 0  # characters of the stream before `_text`
        self._stop = 0  # end of the text that may be read
        self._ends = False  # whether the source ends at `_stop`
        self._closed = False
        self.was_cut = False  # whether a token limit cut off the text
        self._bounds: Marks | None = None
        self._record: TextRecord | None = None
        self._held: TextRecord | None = None
        self._records: tuple[TextRecord, ...] = ()  # _record and _held, if they are active

    def add(self, text: str) -> None:
        self._num_dropped += self._at
        self._text, self._at = self._text[self._at :] + text, 0
        if self._bounds is None:
            self._stop = len(self._text)
        else:
            self._settle()

    def close(self, cut: bool = False) -> None:
        """Ends the text. `cut` is True if a token limit cut it off."""
        self._closed, self.was_cut = True, cut
        self._settle()

    @property
    def position(self) -> int:
        """Index in the whole stream of the next character to read."""
        return self._num_dropped + self._at

    @property
    def unread(self) -> str:
        """The received text that has not been read. If the source is bound to marks, ends before the first of them."""
        return self._text[self._at : self._stop]

    def bind(self, marks: Marks | None) -> None:
        """Binds the source to marks, so that the source ends before the next mark. None removes the bound."""
        self._bounds = marks
        self._settle()

    def hold(self, text: str) -> None:
        """Starts a second record besides the one of record(). The second record begins with `text`.

        Reading raises Malformed if the second record exceeds MAX_HELD_CALL_CHARS.
        """
        self._held = TextRecord(MAX_HELD_CALL_CHARS, text)
        self._list_records()

    def release(self) -> str:
        """Ends the record of hold() and returns its text."""
        held, self._held = self._held, None
        self._list_records()
        return held.text if held is not None else ""

    @property
    def recording(self) -> bool:
        return self._record is not None

    def record(self, most: int = MAX_HELD_CALL_CHARS) -> None:
        """Starts a record of the text that is read. Reading raises Malformed if the record exceeds `most` characters."""
        self._record = TextRecord(most)
        self._list_records()

    def forget(self) -> str:
        """Ends the record of record() and returns its text."""
        found, self._record = self._record, None
        self._list_records()
        return found.text if found is not None else ""

    def give_back(self, text: str) -> None:
        """Makes the last read text unread again, also in the records.

        Args:
            text: The text that was read last. If it is still in the buffer, no text is copied.
        """
        before = self._at - len(text)
        if before >= 0 and self._text.startswith(text, before):
            self._at = before
        else:
            self._num_dropped += before
            self._text, self._at = text + self._text[self._at :], 0
            self._settle()
        for record in self._records:
            record.give_back(len(text))

    def peek(self) -> Steps[str]:
        """Returns the next character without reading it; "" at the end."""
        while self._at == self._stop and not self._ends:
            yield
        return self._text[self._at] if self._at < self._stop else ""

    def take(self) -> Steps[str]:
        """Reads the next character. Raises Malformed at the end."""
        if not (yield from self.peek()):
            raise Malformed
        return self._read(self._at + 1)

    def choose(self, options: Sequence[str]) -> Steps[str]:
        """Reads the next text if it is one of `options`, and returns the option. Otherwise reads nothing and returns "".

        No option may be the beginning of another option.
        """
        longest = max(map(len, options), default=0)
        while True:
            upcoming = self._text[self._at : min(self._at + longest, self._stop)]
            for option in options:
                if upcoming.startswith(option):
                    return self._read(self._at + len(option))
            if self._ends or not any(option.startswith(upcoming) for option in options):
                return ""
            yield

    def expect(self, text: str) -> Steps[None]:
        """Reads this text. Raises Malformed if other text comes."""
        if not (yield from self.choose((text,))):
            raise Malformed

    def run(self, chars: re.Pattern[str], sink: Sink) -> Steps[None]:
        """Reads a run of characters, which may be empty, and passes it to the sink.

        Args:
            chars: Matches a run of any length, also an empty one. The match must not depend on the characters after the run.
        """
        while True:
            found = chars.match(self._text, self._at, self._stop)
            assert found, "the pattern of a run also matches an empty run"
            if found.end() > self._at:
                sink(self._read(found.end()))
            if self._at < self._stop or self._ends:
                return
            yield

    def space(self) -> Steps[None]:
        yield from self.run(SPACE, discard)

    def until(self, marks: Marks, sink: Sink) -> Steps[str]:
        """Reads up to and including the next mark, passes the text before it to the sink, and returns the mark.

        Returns "" at the end.
        """
        while True:
            found = marks.find(self._text, self._at, self._stop)
            stop = found.start() if found else self._undecided(marks)
            if stop > self._at:
                sink(self._read(stop))
            if found:
                return self._read(self._at + len(found[0]))
            if self._ends:
                return ""
            yield

    def _undecided(self, marks: Marks) -> int:
        return self._stop if self._ends else marks.begun(self._text, self._at, self._stop)

    def _settle(self) -> None:
        """Updates `_stop` and `_ends` after new text, a new bound or the end of the text."""
        end = len(self._text)
        found = self._bounds.find(self._text, self._at, end) if self._bounds else None
        if found:
            self._stop, self._ends = found.start(), True
        elif self._bounds and not self._closed:
            self._stop, self._ends = self._bounds.begun(self._text, self._at, end), False
        else:
            self._stop, self._ends = end, self._closed

    def _list_records(self) -> None:
        self._records = tuple(record for record in (self._record, self._held) if record is not None)

    def _read(self, end: int) -> str:
        """Reads up to the index `end` and adds the text to the records. All other methods read through this one.

        Raises:
            Malformed: A record is full. The character at which this happens does not depend on the pieces in which the text
                arrived.
        """
        if not self._records:
            found, self._at = self._text[self._at : end], end
            return found
        fits = min([end, *(self._at + record.free for record in self._records)])
        found, self._at = self._text[self._at : fits], fits
        for record in self._records:
            record.add(found)
        if fits < end:
            raise Malformed
        return found
