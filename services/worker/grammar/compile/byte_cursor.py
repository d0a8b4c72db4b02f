"""A second place in the same grammar, kept byte by byte: what the grammar leaves no choice about is found there.

The library's own search for forced text has no bound (it never ends for `root ::= "a" root`, and takes seconds where a rule is
repeated often). This one looks at one byte after the other, and at no more than MAX_FORCED_BYTES.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import xgrammar

MAX_FORCED_BYTES = 256
_STOP = 256  # the id after the bytes: set in a mask where the output may end
_ALL_IDS = (1 << (_STOP + 1)) - 1


class BytesRefused(RuntimeError):
    """The grammar over bytes disagrees with the one over tokens, or with its own mask. Never the client's fault."""


def byte_vocabulary() -> xgrammar.TokenizerInfo:
    """Ids 0 to 255 are the bytes; one more is the stop token."""
    import xgrammar  # imported only where it is wanted

    tokens = [bytes([value]) for value in range(256)]
    return xgrammar.TokenizerInfo([*tokens, b""], xgrammar.VocabType.RAW, vocab_size=_STOP + 1, stop_token_ids=[_STOP])


class ByteCursor:
    """grammar: compiled for byte_vocabulary()."""

    def __init__(self, grammar: xgrammar.CompiledGrammar) -> None:
        import xgrammar  # as above

        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._mask = np.zeros((1, -(-(_STOP + 1) // 32)), np.int32)

    def advance(self, data: bytes) -> None:
        """Raises BytesRefused; the cursor is of no use then."""
        if data and not self._matcher.accept_string(data):
            raise BytesRefused("bytes of an accepted token are not accepted")

    def forced(self) -> bytes:
        """The bytes that must follow, at most MAX_FORCED_BYTES; the cursor stays where it is. Raises BytesRefused."""
        found = bytearray()
        while len(found) < MAX_FORCED_BYTES:
            byte = self._only_byte()
            if byte is None:
                break
            if not self._matcher.accept_token(byte):
                raise BytesRefused("the mask allows a byte that is not accepted")
            found.append(byte)
        if found:
            self._matcher.rollback(len(found))
        return bytes(found)

    def _only_byte(self) -> int | None:
        """None where the output may end, several bytes may follow, or none."""
        self._matcher.fill_next_token_bitmask(self._mask, 0)
        allowed = int.from_bytes(self._mask.tobytes(), "little") & _ALL_IDS
        if not allowed or allowed & (allowed - 1) or allowed >> _STOP:
            return None
        return allowed.bit_length() - 1
