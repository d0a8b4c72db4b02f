"""A second matcher of the same grammar that advances byte by byte, to find text that the grammar determines.

The library's own search for forced text has no bound: it never ends for `root ::= "a" root`, and takes seconds for a rule that is
repeated often. This search looks at one byte at a time, and at no more than MAX_FORCED_BYTES.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import xgrammar

MAX_FORCED_BYTES = 256
_STOP = 256  # the id after those of the bytes; a mask allows it if the output may end
_ALL_IDS = (1 << (_STOP + 1)) - 1


class BytesRefused(RuntimeError):
    """The grammar over bytes contradicts the grammar over tokens, or its own mask.

    The cause is never the client's grammar. The request continues without jumps.
    """


def byte_vocabulary() -> xgrammar.TokenizerInfo:
    """Returns a vocabulary in which the ids 0 to 255 are the bytes and 256 is the stop token."""
    import xgrammar  # imported at first use, because it takes seconds

    tokens = [bytes([value]) for value in range(256)]
    return xgrammar.TokenizerInfo([*tokens, b""], xgrammar.VocabType.RAW, vocab_size=_STOP + 1, stop_token_ids=[_STOP])


class ByteCursor:
    """The position of a request in a grammar that was compiled for byte_vocabulary()."""

    def __init__(self, grammar: xgrammar.CompiledGrammar) -> None:
        import xgrammar  # imported at first use, because it takes seconds

        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._mask = np.zeros((1, -(-(_STOP + 1) // 32)), np.int32)

    def advance(self, data: bytes) -> None:
        """Advances by the bytes of accepted tokens. Raises BytesRefused, after which the cursor must not be used."""
        if data and not self._matcher.accept_string(data):
            raise BytesRefused("bytes of an accepted token are not accepted")

    def forced(self) -> bytes:
        """Returns the bytes that must follow, at most MAX_FORCED_BYTES. The cursor does not advance. Raises BytesRefused."""
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
        """Returns the only byte that may follow. None if the output may end, or if several bytes or no byte may follow."""
        self._matcher.fill_next_token_bitmask(self._mask, 0)
        allowed = int.from_bytes(self._mask.tobytes(), "little") & _ALL_IDS
        if not allowed or allowed & (allowed - 1) or allowed >> _STOP:
            return None
        return allowed.bit_length() - 1
