"""Where a session lives, and the calls that open and close it.

A session's KV is on one worker. Every gateway computes which one from the session's id and the workers that it sees ready, so
several gateways agree without talking, and none keeps a table. An id that a gateway has made up ends in its worker's mark and
stays with that worker whatever others come and go; an id that a client has chosen moves when a worker appears that ranks
higher for it, and the session is then unknown there.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from typing import TypeVar

import grpc

from rootstock.v1 import worker_pb2, worker_pb2_grpc
from services.gateway.request.errors import MAX_DETAIL_CHARS, ApiError, bad_request, internal, timed_out, unavailable
from services.shared.observe.log import fields
from services.shared.rpc import grpc_server as rpc

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
_MADE_HERE = re.compile(r"s-[0-9a-f]{32}-([0-9a-f]{8})")

R = TypeVar("R")


def place(session_id: str, worker_ids: Sequence[str]) -> int | None:
    """Index of the session's worker; None if there is none, or if the id names a worker that is not among them.

    Rendezvous hashing (Thaler and Ravishankar 1998): the worker with the highest hash of (worker, session) wins, so one
    that comes or goes moves only the sessions that it wins.
    """
    made_here = _MADE_HERE.fullmatch(session_id)
    if made_here is not None:
        marks = [_mark(worker_id) for worker_id in worker_ids]
        return marks.index(made_here[1]) if made_here[1] in marks else None
    if not worker_ids:
        return None
    return max(range(len(worker_ids)), key=lambda i: (_weight(session_id, worker_ids[i]), worker_ids[i]))


def new_session_id(worker_ids: Sequence[str]) -> str:
    """An id that stays with one of these workers, of which there is at least one."""
    name = uuid.uuid4().hex
    index = place(name, worker_ids)
    assert index is not None
    return f"s-{name}-{_mark(worker_ids[index])}"


def _mark(worker_id: str) -> str:
    return blake2b(worker_id.encode(), digest_size=4).hexdigest()


def _weight(session_id: str, worker_id: str) -> bytes:
    return blake2b(session_id.encode(), digest_size=16, key=blake2b(worker_id.encode(), digest_size=32).digest()).digest()


class SessionCalls:
    """Opens and closes sessions on their workers. Each call has a connection of its own: they are rare."""

    def __init__(self, connected: Callable[[str | None], Sequence[tuple[str, str]]], retry_after_s: int) -> None:
        """connected: (worker id, address) of a model's workers, of the default one's for None."""
        self._connected = connected
        self._retry_after_s = retry_after_s

    async def open(self, model: str | None, session_id: str | None, capacity_tokens: int, ttl_s: float | None) -> str:
        """The id of the session that was opened. Raises ApiError."""
        if session_id is None:
            session_id = new_session_id([worker_id for worker_id, _ in self._workers(model)])
        request = worker_pb2.OpenSessionRequest(
            session_id=session_id,
            capacity_tokens=capacity_tokens,
            ttl_ms=None if ttl_s is None else max(1, int(ttl_s * 1000)),
        )
        answer = await self._call(model, session_id, lambda stub: stub.OpenSession(request, timeout=CALL_TIMEOUT_S))
        if not answer.opened:
            message = answer.message[:MAX_DETAIL_CHARS] or "The session was refused by its worker."
            raise bad_request("session_id", message, "session_refused")
        return session_id

    async def close(self, model: str | None, session_id: str) -> None:
        """Raises ApiError, 404 if there is no such session."""
        request = worker_pb2.CloseSessionRequest(session_id=session_id)
        answer = await self._call(model, session_id, lambda stub: stub.CloseSession(request, timeout=CALL_TIMEOUT_S))
        if not answer.closed:
            raise ApiError(404, "There is no such session.", param="session_id", code="session_not_found")

    def _workers(self, model: str | None) -> Sequence[tuple[str, str]]:
        workers = self._connected(model)
        if not workers:
            raise unavailable("No worker is connected.", self._retry_after_s, "no_worker")
        return workers

    async def _call(self, model: str | None, session_id: str, call: Callable[[worker_pb2_grpc.WorkerStub], Awaitable[R]]) -> R:
        workers = self._workers(model)
        index = place(session_id, [worker_id for worker_id, _ in workers])
        if index is None:
            raise session_worker_away(self._retry_after_s)
        address = workers[index][1]
        async with rpc.channel(address) as channel:
            try:
                return await call(worker_pb2_grpc.WorkerStub(channel))  # type: ignore[no-untyped-call]
            except grpc.aio.AioRpcError as error:
                raise self._translate(error, address) from None

    def _translate(self, error: grpc.aio.AioRpcError, address: str) -> ApiError:
        code = error.code()
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return bad_request(
                "session_id", (error.details() or "")[:MAX_DETAIL_CHARS] or "The session was refused by its worker."
            )
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return session_worker_away(self._retry_after_s)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return timed_out("The session's worker did not answer in time.")
        logger.error("session call failed", extra=fields(address=address, code=code.name))
        return internal("The session's worker failed.")


def session_weights_replaced(retry_after_s: int) -> ApiError:
    message = "The worker that holds the session has replaced its weights: the session is gone."
    return unavailable(message, retry_after_s, "session_unavailable")


def session_worker_away(retry_after_s: int) -> ApiError:
    return unavailable("The worker that holds the session is not available.", retry_after_s, "session_unavailable")
