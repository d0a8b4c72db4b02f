"""Sends and receives the frames between a worker and its carrier, the process that loads NIXL.

    worker                              carrier
    (after the start)              <-   reply 8 | error message, if NIXL cannot be loaded
    size 8, two descriptors        ->   (the memory, and the line: a socket for this memory, which carries all frames below)
                                   <-   reply 8 | address 8, metadata
    order 32, LOAD | metadata      ->
                                   <-   reply 8
    order 32, READ                 ->
                                   <-   reply 8
    order 32, END                  ->
                                   <-   reply 8, when the memory is not read or written any more

Frames are little-endian and have fixed sizes. The numbers are sizes in bytes. The payload of a refusing reply is an error
message. If the line ends without END, the carrier ends the use of the memory without a reply.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from rootstock_llm.services.shared import limits
from rootstock_llm.services.worker.exec.remote_kv.connection import Connection
from rootstock_llm.services.worker.exec.remote_kv.frames import MAX_ERROR_BYTES

_ORDER = struct.Struct("<B3xIQQd")  # kind, bytes of the payload, address, size, seconds
_REPLY = struct.Struct("<B3xI")  # whether the order was done, bytes of the payload
SIZE, ADDRESS = struct.Struct("<Q"), struct.Struct("<Q")
ORDER_BYTES = _ORDER.size
MOST_PAYLOAD_BYTES = max(limits.MAX_NIXL_METADATA_BYTES + ADDRESS.size, MAX_ERROR_BYTES)


class OrderKind(enum.IntEnum):
    """Kinds of orders for a memory area."""

    LOAD = 1  # add the remote memory from which READ reads
    READ = 2  # read from the remote memory to the beginning of the area
    END = 3  # end the use of the area


class CarrierRefuses(OSError):
    """Raised if the carrier refuses an order. The message is from the carrier."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order of the worker for one memory area."""

    kind: OrderKind
    payload: bytes = b""  # LOAD: metadata of the remote memory; otherwise empty
    address: int = 0  # READ: address in the remote memory; otherwise 0
    size: int = 0  # READ: number of bytes; otherwise 0
    seconds: float = 0.0  # READ: time limit in seconds; otherwise 0


def send_order(line: Connection, order: Order, deadline: float) -> None:
    """Sends an order. Raises OSError."""
    head = _ORDER.pack(order.kind, len(order.payload), order.address, order.size, order.seconds)
    line.send(head + order.payload, deadline)


def receive_order(line: Connection, deadline: float) -> Order:
    """Receives an order. Raises OSError if the line ends, and ValueError for an unknown kind."""
    head = bytearray(ORDER_BYTES)
    if line.receive_into(head, deadline) < len(head):
        raise ConnectionError("the worker has closed the connection to the NIXL carrier")
    kind, size, *rest = _ORDER.unpack(head)
    payload = _payload(line, size, deadline)
    return Order(OrderKind(kind), payload, *rest)


def send_reply(line: Connection, is_done: bool, payload: bytes, deadline: float) -> None:
    """Sends a reply. Raises OSError."""
    line.send(_REPLY.pack(is_done, len(payload)) + payload, deadline)


def receive_reply(line: Connection, deadline: float) -> bytes:
    """Receives a reply and returns its payload. Raises CarrierRefuses for a refusal, and OSError."""
    head = bytearray(_REPLY.size)
    if line.receive_into(head, deadline) < len(head):
        raise ConnectionError("the process that runs NIXL has ended")
    is_done, size = _REPLY.unpack(head)
    payload = _payload(line, size, deadline)
    if not is_done:
        raise CarrierRefuses(payload.decode(errors="replace"))
    return payload


def _payload(line: Connection, size: int, deadline: float) -> bytes:
    """Receives a payload. Raises OSError."""
    if size > MOST_PAYLOAD_BYTES:
        raise ConnectionError(f"the payload of a frame has {size} bytes; the limit is {MOST_PAYLOAD_BYTES} bytes")
    payload = bytearray(size)
    if line.receive_into(payload, deadline) < size:
        raise ConnectionError("the connection ended within a frame")
    return bytes(payload)
