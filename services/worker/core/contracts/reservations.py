"""KV reservations: pages of a prompt that a prefill worker pins until a decode worker has read them.

A reservation pins the prompt's pages in the radix tree. It opens with the first computed pages and grows with each chunk. A
reader that sends number, epoch and secret may read these pages, and no others, while the reservation is open.
docs/design/prefill-and-decode.md has the protocol.
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
    """The identity of one reservation, which a reader sends with each read."""

    number: int  # random number of 63 bits that names the reservation
    epoch: int  # identifies the worker process that owns the pages
    secret: bytes = field(repr=False)  # bytes[RESERVATION_SECRET_BYTES], made by the worker that owns the pages


@dataclass(frozen=True, slots=True)
class KvSource:
    """A reservation in another worker, from which the first pages of a prompt can be read."""

    reservation: KvReservation
    address: str  # host:port of the other worker's KV port
    num_pages: int  # number of the prompt's first pages that can be read now


@dataclass(frozen=True, slots=True)
class OpenReservation:
    """The pages of a reservation that just opened or grew."""

    reservation: KvReservation
    tree: str  # name of the radix tree that has the pages
    tokens: bytes  # prompt tokens as bytes of int32, from the beginning to the end of the last page or beyond
    pages: I32  # int32[n], in the order of the prompt
    # Page end, as a number of pages. The token after this page end reads `units`. 0 if there are no units.
    units_end: int = 0
    units: tuple[I32, ...] = ()  # for each cache group: the units that this token reads, in the order of the prompt
    # Number of this opening or growth, unique and rising over all reservations of this worker. KvReservations sets it.
    opening: int = 0


@dataclass(frozen=True, slots=True)
class ReservationReleased:
    """The release of a reservation by its reader, or the notice that the reader has disconnected."""

    reservation: KvReservation
    opening: int  # number of the opening that the reader has read; if the reservation has grown since, the release has no effect


@dataclass(frozen=True, slots=True)
class ReservationEvents:
    """Changes of reservations since the last KvReservations.take(), to be applied in the order of the fields.

    - `closed` may have reservations that were never reported as opened, or that `opened` opens again with other pages.
    - `opened` may have reservations that the executor has open already and that now have more pages.
    - The executor must close a reservation before it launches a step that may write its pages.
    """

    closed: Sequence[KvReservation] = ()  # reservations of this worker
    opened: Sequence[OpenReservation] = ()  # reservations of this worker
    released: Sequence[KvSource] = ()  # reservations of other workers that this worker no longer reads


class Prover:
    """Makes proofs for growing prefixes of a prompt. A proof shows that a reader has the tokens. Each token is hashed once."""

    def __init__(self, secret: bytes, tree: str, tokens: bytes) -> None:
        """Starts with an empty prefix.

        Args:
            secret: secret of the reservation.
            tree: name of the prompt's tree.
            tokens: prompt tokens as bytes of int32, from the beginning.
        """
        name = tree.encode()
        self._digest = blake2b(len(name).to_bytes(8, "little") + name, key=secret, digest_size=PROOF_BYTES)
        self._tokens, self._end = memoryview(tokens), 0

    def up_to(self, end: int) -> bytes:
        """Returns bytes[PROOF_BYTES], the proof of the first `end` bytes of the tokens. `end` must not decrease between calls."""
        assert self._end <= end <= len(self._tokens), "prefixes grow, and end within the prompt"
        self._digest.update(self._tokens[self._end : end])
        self._end = end
        return self._digest.copy().digest()


def proof(secret: bytes, tree: str, tokens: bytes) -> bytes:
    """Returns the proof of a whole prompt, bytes[PROOF_BYTES].

    Reader and owner compute the same proof if secret, tokens, weights, adapter and salt are the same.
    """
    return Prover(secret, tree, tokens).up_to(len(tokens))
