"""A form with files as it arrives (multipart/form-data, RFC 7578), in pieces of any size. Pure, and strict: no text before the
first part, no folded headers. What it holds back is at most a part's head, or a boundary.
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
    """The body is not a valid form. The text names the fault, for the client."""


@dataclass(frozen=True, slots=True)
class PartBegins:
    """The head of a part. A plain field has no filename."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartContent:
    content: bytes


@dataclass(frozen=True, slots=True)
class PartEnds:
    """The content of the current part is complete."""


Event = PartBegins | PartContent | PartEnds


class _At(Enum):
    START = auto()
    BOUNDARY = auto()  # after a delimiter
    HEAD = auto()
    CONTENT = auto()
    END = auto()


def boundary_of(content_type: str) -> bytes | None:
    """Returns the boundary of a form with files; without one, None."""
    found = _BOUNDARY.fullmatch(content_type.strip())
    return None if found is None else (found[1] or found[2]).encode("latin-1")


class FormReader:
    """Reads a form as it arrives."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._held = bytearray(b"\r\n")  # the first boundary has no line's end before it
        self._at = _At.START
        self._parts = 0

    @property
    def is_complete(self) -> bool:
        return self._at is _At.END

    def feed(self, piece: bytes) -> Iterator[Event]:
        """Returns the parts and pieces that are complete so far. Raises BadForm."""
        self._held += piece
        while (found := self._next()) is not None:
            yield from found

    def _next(self) -> list[Event] | None:
        """Returns the next event. None if more bytes are needed."""
        steps = {_At.START: self._start, _At.BOUNDARY: self._boundary, _At.HEAD: self._head, _At.CONTENT: self._content}
        if self._at is _At.END:
            self._held.clear()
            return None
        return steps[self._at]()

    def _start(self) -> list[Event] | None:
        if not self._delimiter.startswith(self._held[: len(self._delimiter)]):
            raise BadForm("it does not begin with its boundary")
        if len(self._held) < len(self._delimiter):
            return None
        return self._pass_boundary()

    def _pass_boundary(self) -> list[Event]:
        del self._held[: len(self._delimiter)]
        self._at = _At.BOUNDARY
        return []

    def _boundary(self) -> list[Event] | None:
        if len(self._held) < 2:
            return None
        ends = bytes(self._held[:2])
        if ends not in (b"--", b"\r\n"):
            raise BadForm("there is something behind a boundary")
        self._at = _At.END if ends == b"--" else _At.HEAD
        if ends == b"--":
            del self._held[:2]  # else they may be the first half of an empty head's end
        return []

    def _head(self) -> list[Event] | None:
        end = self._held.find(b"\r\n\r\n")
        if end < 0 and len(self._held) <= MAX_FORM_HEAD_BYTES:
            return None
        if not 0 <= end <= MAX_FORM_HEAD_BYTES:
            raise BadForm(f"the head of a part is larger than {MAX_FORM_HEAD_BYTES} bytes")
        self._parts += 1
        if self._parts > MAX_FORM_PARTS:
            raise BadForm(f"it has more than {MAX_FORM_PARTS} parts")
        begins = _begins(bytes(self._held[:end]))
        del self._held[: end + 4]
        self._at = _At.CONTENT
        return [begins]

    def _content(self) -> list[Event] | None:
        end = self._held.find(self._delimiter)
        if end >= 0:
            content = bytes(self._held[:end])
            del self._held[:end]
            return [*([PartContent(content)] if content else []), PartEnds(), *self._pass_boundary()]
        sure = len(self._held) - len(self._delimiter) + 1
        if sure <= 0:
            return None
        content = bytes(self._held[:sure])
        del self._held[:sure]
        return [PartContent(content)]


def _begins(head: bytes) -> PartBegins:
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
