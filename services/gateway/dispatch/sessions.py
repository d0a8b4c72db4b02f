"""Opens and closes sessions on their workers, and makes the errors of a session that cannot continue."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import grpc

from rootstock_llm.protos import worker_pb2, worker_pb2_grpc
from rootstock_llm.services.gateway.generation.errors import (
    MAX_DETAIL_CHARS,
    ApiError,
    bad_request,
    internal,
    timed_out,
    unavailable,
)
from rootstock_llm.services.gateway.routing.session_home import new_session_id, owned_id, worker_index
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.rpc.dialer import PLAINTEXT, Dialer
from rootstock_llm.services.shared.tls.roles import Role

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0  # seconds in which a worker must open or close a session

R = TypeVar("R")


class SessionWorker(NamedTuple):
    """A connected worker that may have sessions."""

    worker_id: str
    address: str
    paused: bool  # an operator has paused its steps


class SessionCalls:
    """Opens and closes sessions on their workers. Each call makes its own connection, because sessions are rarely opened."""

    def __init__(
        self, connected: Callable[[str | None], Sequence[SessionWorker]], retry_after_s: int, dialer: Dialer = PLAINTEXT
    ) -> None:
        """Prepares the calls.

        Args:
            connected: Returns the connected workers of a model, or of the default model for None.
        """
        self._connected = connected
        self._dialer = dialer
        self._retry_after_s = retry_after_s

    async def open(self, model: str | None, key: str, session_id: str | None, capacity_tokens: int, ttl_s: float | None) -> str:
        """Opens a session that only this API key can use, and returns its id. Raises ApiError."""
        if session_id is None:
            workers = self._workers(model)
            # A session on a paused worker would wait, so paused workers are chosen only if all are paused.
            running = [each for each in workers if not each.paused] or workers
            session_id = new_session_id([each.worker_id for each in running])
        owned = owned_id(session_id, key)
        request = worker_pb2.OpenSessionRequest(
            session_id=owned,
            capacity_tokens=capacity_tokens,
            ttl_ms=None if ttl_s is None else max(1, int(ttl_s * 1000)),
        )
        answer = await self._call(model, owned, lambda stub: stub.OpenSession(request, timeout=CALL_TIMEOUT_S))
        if not answer.opened:
            message = answer.message[:MAX_DETAIL_CHARS] or "The worker has refused the session."
            raise bad_request("session_id", message, "session_refused")
        return session_id

    async def close(self, model: str | None, key: str, session_id: str) -> None:
        """Closes a session. Raises ApiError, with status 404 if this API key has no such session."""
        owned = owned_id(session_id, key)
        request = worker_pb2.CloseSessionRequest(session_id=owned)
        answer = await self._call(model, owned, lambda stub: stub.CloseSession(request, timeout=CALL_TIMEOUT_S))
        if not answer.closed:
            raise ApiError(404, "No session has this id, or it has ended.", param="session_id", code="session_not_found")

    def _workers(self, model: str | None) -> Sequence[SessionWorker]:
        workers = self._connected(model)
        if not workers:
            raise unavailable("No worker is connected.", self._retry_after_s, "no_worker")
        return workers

    async def _call(self, model: str | None, session_id: str, call: Callable[[worker_pb2_grpc.WorkerStub], Awaitable[R]]) -> R:
        workers = self._workers(model)
        index = worker_index(session_id, [each.worker_id for each in workers])
        if index is None:
            raise session_worker_away(self._retry_after_s)
        address = workers[index].address
        async with self._dialer.channel(address, Role.WORKER) as channel:
            try:
                return await call(worker_pb2_grpc.WorkerStub(channel))
            except grpc.aio.AioRpcError as error:
                raise self._translate(error, address) from None

    def _translate(self, error: grpc.aio.AioRpcError, address: str) -> ApiError:
        code = error.code()
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return bad_request("session_id", (error.details() or "")[:MAX_DETAIL_CHARS] or "The worker has refused the session.")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return session_worker_away(self._retry_after_s)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return timed_out("The session's worker did not respond in time.")
        logger.error("session call failed", extra=fields(address=address, code=code.name))
        return internal("The session's worker failed.")


def session_weights_replaced(retry_after_s: int) -> ApiError:
    message = "The worker of the session has loaded other weights, and the session has ended. Open a new session."
    return unavailable(message, retry_after_s, "session_unavailable")


def session_worker_away(retry_after_s: int) -> ApiError:
    return unavailable("The worker of the session is not available.", retry_after_s, "session_unavailable")
