"""The arguments of a call as they come, let through only as far as they are the beginning of a JSON object.

Clients parse what has come so far, and break where it is no JSON. So what a model writes wrong ends its object: its client gets
the values that were complete until then, and answers the call with what it lacks. Line feeds and the like in a string, which
models write as they are, are escaped.
"""

from __future__ import annotations

import math
import re

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(rf'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F]){_HEX}{{4}}|u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}})')
_ESCAPE_CHARS = 12  # of the longest one, a pair of surrogates
_BLANKS = re.compile(r"[ \t\r\n]+")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR_CHARS = 400  # more than any number that is a float
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = frozenset(("true", "false", "null"))
_CLOSERS = {"{": "}", "[": "]"}

# What may come next.
_BEGIN, _VALUE, _FIRST, _KEY, _FIRST_KEY, _COLON, _NEXT, _END, _BROKEN = range(9)
_OPENS_VALUE = frozenset((_VALUE, _FIRST))
_CLOSES = frozenset((_NEXT, _FIRST, _FIRST_KEY))


class _Fault(Exception):
    """This is no JSON."""


class ToolInput:
    """One call's."""

    def __init__(self) -> None:
        self._awaits = _BEGIN
        self._in_string = self._is_key = False
        self._closers: list[str] = []
        self._held = ""  # a scalar or an escape that is not complete
        self._given: list[str] = []
        self._num_given = 0  # characters
        self._whole = (0, "{}")  # where the last complete value ends, and what makes an object of the text up to there

    def feed(self, fragment: str) -> str:
        """What of it, and of what was held back, is let through."""
        text, at = self._held + fragment, 0
        self._held = ""
        before = len(self._given)
        try:
            while at < len(text) and self._awaits != _BROKEN:
                piece, end = self._string(text, at) if self._in_string else self._outside(text, at)
                if end == at:
                    self._held = text[at:]
                    break
                self._give(piece)
                at = end
        except _Fault:
            self._awaits = _BROKEN
        return "".join(self._given[before:])

    def text(self) -> str:
        """An object: what was let through, without a last value that is not complete."""
        length, end = self._whole
        return "".join(self._given)[:length] + end

    def _give(self, piece: str) -> None:
        self._given.append(piece)
        self._num_given += len(piece)
        if self._awaits in (_NEXT, _END, _FIRST, _FIRST_KEY) and not self._in_string:
            self._whole = (self._num_given, "".join(reversed(self._closers)))

    def _string(self, text: str, at: int) -> tuple[str, int]:
        """What a part of a string is let through as, and where it ends: where it begins, if more is needed."""
        if (plain := _PLAIN.match(text, at)) is not None:
            return plain.group(), plain.end()
        char = text[at]
        if char == '"':
            self._in_string = False
            self._awaits = _COLON if self._is_key else _NEXT
            return char, at + 1
        if char != "\\":
            return f"\\u{ord(char):04x}", at + 1
        escape = _ESCAPE.match(text, at)
        if escape is None and len(text) - at >= _ESCAPE_CHARS:
            raise _Fault
        return (escape.group(), escape.end()) if escape is not None else ("", at)

    def _outside(self, text: str, at: int) -> tuple[str, int]:
        """The same of anything else."""
        if (blanks := _BLANKS.match(text, at)) is not None:
            return "" if self._awaits == _BEGIN else blanks.group(), blanks.end()
        char = text[at]
        if char in '{}[],:"':
            self._mark(char)
            return char, at + 1
        scalar = _SCALAR.match(text, at)
        if scalar is None or self._awaits not in _OPENS_VALUE or scalar.end() - at > _SCALAR_CHARS:
            raise _Fault
        if scalar.end() == len(text):
            return "", at
        _check_scalar(scalar.group())
        self._awaits = _NEXT
        return scalar.group(), scalar.end()

    def _mark(self, char: str) -> None:
        awaits = self._awaits
        if char in _CLOSERS and (awaits in _OPENS_VALUE or (awaits == _BEGIN and char == "{")):
            self._closers.append(_CLOSERS[char])
            self._awaits = _FIRST_KEY if char == "{" else _FIRST
        elif char == '"' and awaits in (_VALUE, _FIRST, _KEY, _FIRST_KEY):
            self._in_string, self._is_key = True, awaits in (_KEY, _FIRST_KEY)
        elif self._closers and char == self._closers[-1] and awaits in _CLOSES:
            self._closers.pop()
            self._awaits = _NEXT if self._closers else _END
        elif char == "," and awaits == _NEXT:
            self._awaits = _KEY if self._closers[-1] == "}" else _VALUE
        elif char == ":" and awaits == _COLON:
            self._awaits = _VALUE
        else:
            raise _Fault


def _check_scalar(text: str) -> None:
    """Raises _Fault for what is neither a word of JSON nor a number that can be read again."""
    if text not in _WORDS and not (_NUMBER.fullmatch(text) and math.isfinite(float(text))):
        raise _Fault
