"""Text as it comes, read by one coroutine, which waits wherever what has come does not decide yet.

Each method looks at what is new, and at no more of what came before than the longest mark that it was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from services.shared.limits import MAX_HELD_CALL_CHARS

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where it needs more text
Sink = Callable[[str], None]

SPACE = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):
    """What comes is not what the format has here, is too long to be held, or has ended."""


def discard(text: str) -> None:
    """Whoever passes text here has no use for it."""


class Marks:
    """Texts that are looked for, none of which begins another."""

    def __init__(self, *texts: str) -> None:
        assert all(texts) and not any(one != other and other.startswith(one) for one in texts for other in texts)
        beginnings = {text[:size] for text in texts for size in range(1, len(text))}
        self._whole = re.compile("|".join(map(re.escape, texts)))
        self._begun = re.compile(f"(?:{'|'.join(map(re.escape, beginnings)) or '(?!)'})\\Z")
        self._most_begun = max(map(len, texts)) - 1

    def find(self, text: str, at: int) -> re.Match[str] | None:
        return self._whole.search(text, at)

    def begun(self, text: str, at: int) -> int:
        """Where a mark may have begun that the text does not complete; the text's end if none has."""
        found = self._begun.search(text, max(at, len(text) - self._most_begun))
        return found.start() if found else len(text)


class Source:
    """One owner adds text and closes it, one coroutine reads. What is read can be recorded, and then given back."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._closed = False
        self._record: list[str] | None = None
        self._room = 0  # characters that the record still takes

    def add(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True

    @property
    def recording(self) -> bool:
        return self._record is not None

    def record(self, most: int = MAX_HELD_CALL_CHARS) -> None:
        """From here on, what is read is kept; a reader that goes on for more than so many characters is Malformed."""
        self._record, self._room = [], most

    def forget(self) -> str:
        """What was recorded; the record ends."""
        found, self._record = "".join(self._record or ()), None
        return found

    def give_back(self, text: str) -> None:
        """text: what was read last, to be read again. What is unread behind it is not copied, where the text is still there."""
        before = self._at - len(text)
        if before >= 0 and self._text.startswith(text, before):
            self._at = before
        else:
            self._text, self._at = text + self._text[self._at :], 0

    def peek(self) -> Steps[str]:
        """The next character, which stays; empty at the end."""
        while self._at == len(self._text) and not self._closed:
            yield
        return self._text[self._at : self._at + 1]

    def take(self) -> Steps[str]:
        """The next character. Raises Malformed at the end."""
        if not (yield from self.peek()):
            raise Malformed
        return self._read(self._at + 1)

    def choose(self, options: Sequence[str]) -> Steps[str]:
        """The option that comes next, taken; empty, with nothing taken, if none does. None begins another."""
        longest = max(map(len, options))
        while True:
            ahead = self._text[self._at : self._at + longest]
            for option in options:
                if ahead.startswith(option):
                    return self._read(self._at + len(option))
            if self._closed or not any(option.startswith(ahead) for option in options):
                return ""
            yield

    def expect(self, text: str) -> Steps[None]:
        """Takes the text. Raises Malformed if another one comes."""
        if not (yield from self.choose((text,))):
            raise Malformed

    def run(self, chars: re.Pattern[str], sink: Sink) -> Steps[None]:
        """chars: matches as many characters of a kind as there are, or none; whether one belongs depends on it alone."""
        while True:
            found = chars.match(self._text, self._at)
            assert found, "a run may be empty"
            if found.end() > self._at:
                sink(self._read(found.end()))
            if self._at < len(self._text) or self._closed:
                return
            yield

    def space(self) -> Steps[None]:
        yield from self.run(SPACE, discard)

    def until(self, marks: Marks, sink: Sink) -> Steps[str]:
        """Passes on what stands before the next mark, and takes the mark; empty at the end."""
        while True:
            found = marks.find(self._text, self._at)
            stop = found.start() if found else self._undecided(marks)
            if stop > self._at:
                sink(self._read(stop))
            if found:
                return self._read(self._at + len(found[0]))
            if self._closed:
                return ""
            yield

    def _undecided(self, marks: Marks) -> int:
        return len(self._text) if self._closed else marks.begun(self._text, self._at)

    def _read(self, end: int) -> str:
        """All reading is done here. Raises Malformed where the record is full: at the same character however text comes."""
        if self._record is not None:
            fits = min(end - self._at, self._room)
            self._record.append(self._text[self._at : self._at + fits])
            self._room -= fits
            if self._at + fits < end:
                self._at += fits
                raise Malformed
        found, self._at = self._text[self._at : end], end
        return found
