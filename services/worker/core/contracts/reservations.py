"""KV reservations: pages of a prompt that a prefill worker keeps until a decode worker has read them.

See docs/design/prefill-and-decode.md. A reservation pins the prompt's pages in the tree. It opens with the first computed pages
and grows with each chunk. A reader that names number, epoch and secret may read these pages while the reservation is open, and
no other pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
RESERVATION_SECRET_BYTES = 16
PROOF_BYTES = 32


@dataclass(frozen=True, slots=True)
class KvReservation:
    """The name of one reservation."""

    number: int  # 63 random bits
    epoch: int  # of the worker's start
    secret: bytes = field(repr=False)  # bytes[RESERVATION_SECRET_BYTES], made by the worker that owns the pages


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where a worker can read the first pages of a prompt."""

    room: KvReservation
    address: str  # host:port of the other worker's KV port
    num_pages: int


@dataclass(frozen=True, slots=True)
class OpenReservation:
    """The pages of a reservation that just opened or grew."""

    room: KvReservation
    tree: str  # name of the tree that has the pages
    tokens: bytes  # int32 as bytes; the prompt's tokens up to the last page at least
    pages: I32  # int32[n], in the prompt's order
    opening: int = 0  # rises with every opening and growth on this worker; set by KvReservations


@dataclass(frozen=True, slots=True)
class ReservationReleased:
    """A reader's message that it needs a reservation no more, or the notice that the reader is gone."""

    room: KvReservation
    opening: int  # of the OpenReservation that the reader has read; the message does not concern later ones


@dataclass(frozen=True, slots=True)
class ReservationEvents:
    """Changes of reservations since the last look, in the order of the fields.

    A closed reservation may never have been open, or may open again with other pages. An opened one may be open already; it
    then has further pages. A reservation closes before a step is launched that may write its pages.
    """

    closed: Sequence[KvReservation] = ()  # of this worker
    opened: Sequence[OpenReservation] = ()  # of this worker
    left: Sequence[KvSource] = ()  # reservations of other workers that this worker needs no more


class Prover:
    """Makes proofs of a prompt's first tokens, for rising numbers of tokens. It hashes each token once."""

    def __init__(self, secret: bytes, tree: str, tokens: bytes) -> None:
        """Starts with an empty prefix. tokens: int32 as bytes, from the prompt's beginning."""
        name = tree.encode()
        self._digest = blake2b(len(name).to_bytes(8, "little") + name, key=secret, digest_size=PROOF_BYTES)
        self._tokens, self._end = memoryview(tokens), 0

    def up_to(self, end: int) -> bytes:
        """Returns bytes[PROOF_BYTES], the proof of the first `end` bytes of the tokens."""
        assert self._end <= end <= len(self._tokens), "places rise, within the prompt"
        self._digest.update(self._tokens[self._end : end])
        self._end = end
        return self._digest.copy().digest()


def proof(secret: bytes, tree: str, tokens: bytes) -> bytes:
    """Returns bytes[PROOF_BYTES]. Reader and owner agree on it if tokens, weights, adapter and salt are the same."""
    return Prover(secret, tree, tokens).up_to(len(tokens))
