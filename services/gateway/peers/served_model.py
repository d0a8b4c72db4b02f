"""Which model a replica of the tokenizer or the detokenizer is for."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import grpc

from services.gateway.peers.reconnect import StreamBroken
from services.gateway.peers.unary_call import answer_of
from services.shared.observe.log_fields import fields

logger = logging.getLogger(__name__)

INFO_S = 2.0  # that a replica has to answer
ANY = ""

# Of a replica that goes away, does not answer, or does not take this gateway for one: to be asked again. Its model is not taken
# for any model.
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
    """None where the replica cannot say. info: begins its Info call. Raises StreamBroken for a passing failure."""
    try:
        return await answer_of(info)
    except grpc.aio.AioRpcError as error:
        if error.code() in _PASSING:
            raise StreamBroken(f"no answer to Info: {error.code().name}: {error.details()}") from None
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            logger.warning("a replica does not say its model", extra=fields(address=address, code=error.code().name))
        return None


def serves(offered: str, wanted: str) -> bool:
    """Whether a replica of the model `offered` may take what is for the model `wanted`; either may be ANY."""
    return offered == wanted or ANY in (offered, wanted)
