"""Finds the model that a replica of the tokenizer or the detokenizer serves."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import grpc

from services.gateway.peers.reconnect import StreamBroken
from services.gateway.peers.unary_call import answer_of
from services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

INFO_S = 2.0  # time limit of an Info call
ANY = ""  # stands for any model

# After these errors, the gateway asks the replica again: it is stopping, does not respond, or does not accept the gateway. After
# other errors, the replica counts as serving any model.
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


class Info(Protocol):
    model: str


Said = TypeVar("Said", bound=Info)


async def ask(info: Callable[[], Awaitable[Said]], address: str) -> Said | None:
    """Returns a replica's response to Info.

    Args:
        info: Begins the Info call.

    Returns:
        None if the replica cannot name its model.

    Raises:
        StreamBroken: A temporary failure.
    """
    try:
        return await answer_of(info)
    except grpc.aio.AioRpcError as error:
        if error.code() in _PASSING:
            raise StreamBroken(f"no response to Info: {error.code().name}: {error.details()}") from None
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            logger.warning("a replica does not report its model", extra=fields(address=address, code=error.code().name))
        return None


def serves(offered: str, wanted: str) -> bool:
    """Returns whether a replica of the model `offered` can serve requests for the model `wanted`. Either may be ANY."""
    return offered == wanted or ANY in (offered, wanted)
