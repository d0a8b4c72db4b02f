"""The routed experts of a choice: the experts that computed each of its tokens, as packed expert ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WIRE_ID = np.dtype("<u2")  # expert id in the messages of workers
CLIENT_ID = np.dtype("<i4")  # expert id in responses, as in SGLang


@dataclass(frozen=True, slots=True)
class RoutedExpertsParams:
    """A request for the routed experts of its tokens."""

    start: int  # position of the first token whose experts are returned, at most the number of prompt tokens
    per_token: int  # expert ids of a token: sparse layers times chosen experts


class RoutedExpertsTable:
    """The expert ids of consecutive tokens, from the position RoutedExpertsParams.start on, with 2 bytes per id."""

    __slots__ = ("_ids", "_per_token")

    def __init__(self, per_token: int) -> None:
        self._ids = bytearray()  # uint16 little-endian [tokens, layers, chosen]
        self._per_token = per_token

    def __len__(self) -> int:
        """Returns the number of tokens."""
        return len(self._ids) // (self._per_token * WIRE_ID.itemsize)

    def extend(self, ids: bytes) -> None:
        """Adds the ids of the next tokens, as in the message RoutedExperts. Raises ValueError if they end within a token."""
        if len(ids) % (self._per_token * WIRE_ID.itemsize):
            raise ValueError(f"{len(ids)} bytes are no whole number of tokens with {self._per_token} expert ids each")
        self._ids += ids

    def clear(self) -> None:
        self._ids.clear()

    def client_bytes(self, begin: int, end: int) -> bytes:
        """Returns the ids with the indices [begin, end) as int32 little-endian, for a response."""
        return np.frombuffer(self._ids, WIRE_ID)[begin:end].astype(CLIENT_ID).tobytes()

    @property
    def num_ids(self) -> int:
        return len(self._ids) // WIRE_ID.itemsize
