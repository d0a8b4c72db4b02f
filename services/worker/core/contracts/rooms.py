"""Rooms: what a prefill worker keeps of a prompt that it has computed, until a decode worker has read it.

See docs/design/prefill-and-decode.md.

A room is a lock on the prompt's pages in the tree, under a number that is no other request's. It opens with the first pages that
are computed and grows with each chunk. Who names number, epoch and secret may read those pages while the room is open, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
ROOM_SECRET_BYTES = 16
PROOF_BYTES = 32


@dataclass(frozen=True, slots=True)
class Room:
    """number: 63 random bits. epoch: of the worker's start. secret: bytes[ROOM_SECRET_BYTES], made by the worker whose pages
    these are."""

    number: int
    epoch: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Source:
    """Where the first pages of a prompt can be read. address: host:port of the other worker's KV port."""

    room: Room
    address: str
    num_pages: int


@dataclass(frozen=True, slots=True)
class OpenRoom:
    """tree: name of the tree that the pages are of. tokens: int32 as bytes, of the prompt, those of the pages at least. pages:
    int32[n], in the prompt's order. opening: counts what this worker opens, and each time that a room gets further pages: of one
    room the later one has the higher number; set by Rooms."""

    room: Room
    tree: str
    tokens: bytes
    pages: I32
    opening: int = 0


@dataclass(frozen=True, slots=True)
class RoomLeft:
    """The word that a reader wants nothing more of a room, or is gone. opening: of the OpenRoom that it has read, or has named;
    of what the room has become since then the word says nothing."""

    room: Room
    opening: int


@dataclass(frozen=True, slots=True)
class RoomEvents:
    """Of the rooms since the last look, in this order. closed, opened: of this worker; left: others' that nothing more is wanted
    of. One of the closed may never have stood, or be opened anew, with other pages. One of the opened may stand already: it has
    got further pages behind those that it had. What is closed is closed before any step is launched that may write its pages."""

    closed: Sequence[Room] = ()
    opened: Sequence[OpenRoom] = ()
    left: Sequence[Source] = ()


class Prover:
    """Makes proofs of what the pages of a prompt up to some place are of, for places that rise: each token is looked at once.
    tokens: int32 as bytes, from the prompt's beginning."""

    def __init__(self, secret: bytes, tree: str, tokens: bytes) -> None:
        name = tree.encode()
        self._digest = blake2b(len(name).to_bytes(8, "little") + name, key=secret, digest_size=PROOF_BYTES)
        self._tokens, self._end = memoryview(tokens), 0

    def up_to(self, end: int) -> bytes:
        """bytes[PROOF_BYTES] of the first `end` bytes of tokens."""
        assert self._end <= end <= len(self._tokens), "places rise, within the prompt"
        self._digest.update(self._tokens[self._end : end])
        self._end = end
        return self._digest.copy().digest()


def proof(secret: bytes, tree: str, tokens: bytes) -> bytes:
    """bytes[PROOF_BYTES] that both sides make: who reads has these very tokens, weights, adapter and salt, or gets nothing."""
    return Prover(secret, tree, tokens).up_to(len(tokens))
