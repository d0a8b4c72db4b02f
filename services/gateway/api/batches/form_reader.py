"""Parses a form with files (multipart/form-data, RFC 7578) while its bytes arrive in pieces of any size. Pure.

The parser refuses text before the first boundary. It does not join a header that continues on a second line. Between two pieces,
its buffer holds at most the head of a part, or a boundary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from rootstock_llm.services.shared.limits import MAX_FORM_HEAD_BYTES, MAX_FORM_PARTS

_BOUNDARY = re.compile(r"multipart/form-data\s*;(?:.*;)?\s*boundary=(?:\"([^\"]{1,70})\"|([^\s;\"]{1,70}))\s*(?:;.*)?", re.I)
_PARAMETER = re.compile(r";\s*(name|filename)=(?:\"([^\"]*)\"|([^\s;\"]+))", re.I)
_DISPOSITION = "content-disposition"


class BadForm(ValueError):
    """The body is not a valid form. The message completes the sentence "The form is invalid: …" in the client's error."""


@dataclass(frozen=True, slots=True)
class PartBegins:
    """The head of a part has arrived."""

    name: str  # name of the form field
    filename: str | None  # file name, or None for a field that is no file


@dataclass(frozen=True, slots=True)
class PartContent:
    """Bytes of the current part's content have arrived."""

    content: bytes


@dataclass(frozen=True, slots=True)
class PartEnds:
    """The content of the current part is complete."""


Event = PartBegins | PartContent | PartEnds


class _State(Enum):
    START = auto()  # before the first boundary
    BOUNDARY = auto()  # after a boundary, before its line end or --
    HEAD = auto()  # in the headers of a part
    CONTENT = auto()
    END = auto()  # after the last boundary


def boundary_of(content_type: str) -> bytes | None:
    """Returns the boundary in a Content-Type header, or None if the body is not multipart/form-data."""
    found = _BOUNDARY.fullmatch(content_type.strip())
    return None if found is None else (found[1] or found[2]).encode("latin-1")


class FormReader:
    """Parses one form. The caller passes each piece of the body to feed(), in order."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # the delimiter begins with a line end, which the first boundary lacks
        self._state = _State.START
        self._parts = 0

    @property
    def is_complete(self) -> bool:
        return self._state is _State.END

    def feed(self, piece: bytes) -> Iterator[Event]:
        """Yields the events that `piece` completes. Raises BadForm."""
        self._buffer += piece
        while (found := self._next()) is not None:
            yield from found

    def _next(self) -> list[Event] | None:
        """Parses the next element of the buffer. Returns its events, possibly an empty list; None if more bytes are needed."""
        steps = {
            _State.START: self._start,
            _State.BOUNDARY: self._boundary,
            _State.HEAD: self._head,
            _State.CONTENT: self._content,
        }
        if self._state is _State.END:
            self._buffer.clear()
            return None
        return steps[self._state]()

    def _start(self) -> list[Event] | None:
        if not self._delimiter.startswith(self._buffer[: len(self._delimiter)]):
            raise BadForm("the body does not begin with its boundary")
        if len(self._buffer) < len(self._delimiter):
            return None
        return self._pass_boundary()

    def _pass_boundary(self) -> list[Event]:
        del self._buffer[: len(self._delimiter)]
        self._state = _State.BOUNDARY
        return []

    def _boundary(self) -> list[Event] | None:
        if len(self._buffer) < 2:
            return None
        ends = bytes(self._buffer[:2])
        if ends not in (b"--", b"\r\n"):
            raise BadForm("a boundary is not followed by a line end or by --")
        self._state = _State.END if ends == b"--" else _State.HEAD
        if ends == b"--":
            del self._buffer[:2]
        # Otherwise, the line end stays in the buffer, so that _head() also finds the end of a head without headers.
        return []

    def _head(self) -> list[Event] | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 and len(self._buffer) <= MAX_FORM_HEAD_BYTES:
            return None
        if not 0 <= end <= MAX_FORM_HEAD_BYTES:
            raise BadForm(f"the head of a part is larger than {MAX_FORM_HEAD_BYTES} bytes")
        self._parts += 1
        if self._parts > MAX_FORM_PARTS:
            raise BadForm(f"the form has more than {MAX_FORM_PARTS} parts")
        part = _part_begins(bytes(self._buffer[:end]))
        del self._buffer[: end + 4]
        self._state = _State.CONTENT
        return [part]

    def _content(self) -> list[Event] | None:
        end = self._buffer.find(self._delimiter)
        if end >= 0:
            content = bytes(self._buffer[:end])
            del self._buffer[:end]
            return [*([PartContent(content)] if content else []), PartEnds(), *self._pass_boundary()]
        num_content = len(self._buffer) - len(self._delimiter) + 1  # later bytes may be the beginning of a delimiter
        if num_content <= 0:
            return None
        content = bytes(self._buffer[:num_content])
        del self._buffer[:num_content]
        return [PartContent(content)]


def _part_begins(head: bytes) -> PartBegins:
    try:
        lines = head.decode().split("\r\n")
    except UnicodeDecodeError:
        raise BadForm("the head of a part is not UTF-8") from None
    for line in lines:
        header, _, value = line.partition(":")
        if header.strip().lower() == _DISPOSITION and value.strip().lower().startswith("form-data"):
            found = {name.lower(): quoted or bare for name, quoted, bare in _PARAMETER.findall(value)}
            if "name" in found:
                return PartBegins(found["name"], found.get("filename"))
    raise BadForm("a part has no name")
