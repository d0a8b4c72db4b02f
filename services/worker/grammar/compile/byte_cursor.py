"""A second matcher of a grammar that advances byte by byte, to find text that the grammar determines.

xgrammar's own search for forced text has no limit: it never ends for `root ::= "a" root`, and takes seconds for a rule with many
repetitions. This search checks one byte at a time, up to MAX_FORCED_BYTES.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import xgrammar

MAX_FORCED_BYTES = 256
_STOP = 256  # stop token, the id after the 256 bytes; a mask allows it if the output may end
_ALL_IDS = (1 << (_STOP + 1)) - 1  # mask of all ids


class BytesRefused(RuntimeError):
    """The byte matcher refuses bytes that the token matcher or its own mask allows.

    This is a fault of the library, not of the client's grammar. The request continues without jumps.
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
            raise BytesRefused("the byte matcher refuses the bytes of an accepted token")

    def forced(self) -> bytes:
        """Returns the bytes that must follow, at most MAX_FORCED_BYTES. The cursor does not advance. Raises BytesRefused."""
        found = bytearray()
        while len(found) < MAX_FORCED_BYTES:
            byte = self._only_byte()
            if byte is None:
                break
            if not self._matcher.accept_token(byte):
                raise BytesRefused("the byte matcher refuses a byte that its mask allows")
            found.append(byte)
        if found:
            self._matcher.rollback(len(found))
        return bytes(found)

    def _only_byte(self) -> int | None:
        """Returns the byte that must follow, or None if several bytes or the end of the output may follow."""
        self._matcher.fill_next_token_bitmask(self._mask, 0)
        allowed = int.from_bytes(self._mask.tobytes(), "little") & _ALL_IDS
        if not allowed or allowed & (allowed - 1) or allowed >> _STOP:
            return None
        return allowed.bit_length() - 1
