"""Reads an HTTP request's body with a limit that holds while reading, whatever the headers say."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope

from services.gateway.request.errors import ApiError


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """Raises ApiError 413 or 408, or ClientGone."""
    declared = dict(scope["headers"]).get(b"content-length", b"")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _collect(receive, max_bytes)
    except TimeoutError:
        raise ApiError(408, "The request's body did not arrive in time.", code="timeout") from None


async def _collect(receive: Receive, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed its connection, or has its whole answer."""
    while (await receive())["type"] != "http.disconnect":
        continue


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The request's body is larger than {max_bytes} bytes.", code="request_too_large")
