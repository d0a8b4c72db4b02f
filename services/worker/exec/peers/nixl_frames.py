"""The bytes between a worker and its carrier, the process that has NIXL in it. Little-endian, of fixed sizes.

    worker                              carrier
    (started)                      <-   reply 8 | why there is no NIXL, if there is none
    size 8, with two descriptors   ->   of memory, and of a line of its own, on which follows:
                                   <-   reply 8 | address 8, metadata
    order 32, LOAD | metadata      ->
                                   <-   reply 8
    order 32, READ                 ->
                                   <-   reply 8
    order 32, END                  ->
                                   <-   reply 8: nobody reads or writes it any more

A reply that refuses has a sentence for its payload. A line that ends without END says the same, with nobody to answer.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from services.shared import limits
from services.worker.exec.peers.connection import Connection
from services.worker.exec.peers.frames import MOST_SENTENCE_BYTES

_ORDER = struct.Struct("<B3xIQQd")  # kind, bytes of the payload, address, size, seconds
_REPLY = struct.Struct("<B3xI")  # whether it was done, bytes of the payload
SIZE, ADDRESS = struct.Struct("<Q"), struct.Struct("<Q")
ORDER_BYTES = _ORDER.size
MOST_PAYLOAD_BYTES = max(limits.MAX_NIXL_METADATA_BYTES + ADDRESS.size, MOST_SENTENCE_BYTES)


class OrderKind(enum.IntEnum):
    LOAD = 1
    READ = 2
    END = 3


class CarrierRefuses(OSError):
    """And says why."""


@dataclass(frozen=True, slots=True)
class Order:
    """payload: of LOAD. address: of another's memory, read to the beginning of one's own; size: bytes; seconds: that it may take:
    of READ."""

    kind: OrderKind
    payload: bytes = b""
    address: int = 0
    size: int = 0
    seconds: float = 0.0


def send_order(line: Connection, order: Order, deadline: float) -> None:
    """Raises OSError."""
    head = _ORDER.pack(order.kind, len(order.payload), order.address, order.size, order.seconds)
    line.send(head + order.payload, deadline)


def receive_order(line: Connection, deadline: float) -> Order:
    """Raises OSError, also where the line has ended; ValueError."""
    head = bytearray(ORDER_BYTES)
    if line.receive_into(head, deadline) < len(head):
        raise ConnectionError("its line has ended")
    kind, size, *rest = _ORDER.unpack(head)
    payload = _payload(line, size, deadline)
    return Order(OrderKind(kind), payload, *rest)


def send_reply(line: Connection, is_done: bool, payload: bytes, deadline: float) -> None:
    """Raises OSError."""
    line.send(_REPLY.pack(is_done, len(payload)) + payload, deadline)


def receive_reply(line: Connection, deadline: float) -> bytes:
    """Its payload. Raises CarrierRefuses, OSError."""
    head = bytearray(_REPLY.size)
    if line.receive_into(head, deadline) < len(head):
        raise ConnectionError("the process that has NIXL in it has ended")
    is_done, size = _REPLY.unpack(head)
    payload = _payload(line, size, deadline)
    if not is_done:
        raise CarrierRefuses(payload.decode(errors="replace"))
    return payload


def _payload(line: Connection, size: int, deadline: float) -> bytes:
    """Raises OSError."""
    if size > MOST_PAYLOAD_BYTES:
        raise ConnectionError(f"{size} bytes are said to follow; {MOST_PAYLOAD_BYTES} are the most")
    payload = bytearray(size)
    if line.receive_into(payload, deadline) < size:
        raise ConnectionError("a message has broken off")
    return bytes(payload)
