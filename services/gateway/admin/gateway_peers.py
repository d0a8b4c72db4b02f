"""The other gateways: a port on which they ask for what only this one can do, and the calls by which it asks them.

Nothing is shared and nothing is kept: a gateway that is not known, or does not answer, is told of as not reached.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import grpc

from rootstock.v1 import gateway_pb2 as pb
from rootstock.v1 import gateway_pb2_grpc
from services.gateway.admin.tenants import Tenants
from services.gateway.discovery.watch import Discovery
from services.gateway.peers.reconnect import StreamBroken
from services.gateway.peers.unary_call import answer_of
from services.gateway.request.abort import AbortScope, PeerAnswer
from services.shared.limits import MAX_REQUEST_ID_CHARS
from services.shared.observe.log_fields import fields
from services.shared.rpc.control_token import authorization
from services.shared.rpc.dialer import IN_THE_CLEAR, Dialer, KeptChannel
from services.shared.tls.roles import Role

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0  # a gateway whose event loop is later than this has worse troubles


class PeerServicer(gateway_pb2_grpc.GatewayPeerServicer):
    """name: this gateway's own, random per start. operators: whether calls for anybody's requests are taken."""

    def __init__(self, name: bytes, abort_here: Callable[[AbortScope], int], tenants: Tenants, operators: bool) -> None:
        self._name = name
        self._abort_here = abort_here
        self._tenants = tenants
        self._operators = operators

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        if request.sender == self._name:
            return pb.AbortResponse(gateway=self._name)
        wrong = _wrong(request)
        if wrong:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, wrong)
        if request.operator and not self._operators:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, "others than loopback need control_token for operators' aborts"
            )
        key = None if request.operator else self._tenants.key(request.tenant)
        if key is None and not request.operator:
            return pb.AbortResponse(gateway=self._name)  # nobody has come here with that key
        aborted = self._abort_here(AbortScope(request.rid or None, key, request.worker))
        logger.info("a peer's abort", extra=fields(rid=request.rid, aborted=aborted))
        return pb.AbortResponse(gateway=self._name, aborted=aborted)


def _wrong(request: pb.AbortRequest) -> str:
    """What is, in a sentence; "" for nothing."""
    if request.WhichOneof("owner") is None or (request.WhichOneof("owner") == "operator" and not request.operator):
        return "neither tenant nor operator is set"
    if not request.operator and (request.all or request.worker):
        return "all, worker: for operators alone"
    if request.all:
        return ""
    if not 1 <= len(request.rid) <= MAX_REQUEST_ID_CHARS:
        return f"rid: must have 1 to {MAX_REQUEST_ID_CHARS} characters"
    return ""


class PeerGateways:
    """Follows discovery. One connection to each, this gateway's own address among them, if it stands there too."""

    def __init__(
        self, targets: Sequence[str], tenants: Tenants, token: str, dns_refresh_s: float, dialer: Dialer = IN_THE_CLEAR
    ) -> None:
        self._dialer = dialer
        self.name = secrets.token_bytes(16)
        self._tenants = tenants
        self._metadata = (("authorization", authorization(token)),) if token else ()
        self._channels: dict[str, KeptChannel] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._discovery = Discovery(targets, self._set_endpoints, dns_refresh_s=dns_refresh_s)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await self._discovery.run()
        finally:
            self._set_endpoints({})
            await asyncio.gather(*self._closing)

    def _set_endpoints(self, endpoints: Mapping[str, bool]) -> None:
        """Those that are not ready are asked too: a gateway that drains still has requests."""
        for address in endpoints.keys() - self._channels.keys():
            self._channels[address] = self._dialer.kept(address, Role.GATEWAY)
        for address in self._channels.keys() - endpoints.keys():
            closing = asyncio.get_running_loop().create_task(self._channels.pop(address).close(CALL_TIMEOUT_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    @property
    def num_known(self) -> int:
        """This gateway's own address among them, if it stands there too."""
        return len(self._channels)

    async def abort(self, scope: AbortScope) -> Sequence[PeerAnswer]:
        request = pb.AbortRequest(sender=self.name, worker=scope.worker)
        if scope.rid is None:
            request.all = True
        else:
            request.rid = scope.rid
        if scope.key is None:
            request.operator = True
        else:
            request.tenant = self._tenants.digest(scope.key)
        asked = [self._ask(address, channel, request) for address, channel in self._channels.items()]
        return [answer for answer in await asyncio.gather(*asked) if answer.gateway != self.name]

    async def _ask(self, address: str, channel: KeptChannel, request: pb.AbortRequest) -> PeerAnswer:
        stub = gateway_pb2_grpc.GatewayPeerStub(channel.now())
        try:
            answer = await answer_of(partial(stub.Abort, request, timeout=CALL_TIMEOUT_S, metadata=self._metadata))
        except grpc.aio.AioRpcError as error:
            logger.warning("a gateway is not reached", extra=fields(address=address, code=error.code().name))
            return PeerAnswer(address, message=f"{error.code().name}: {error.details()}")
        except StreamBroken as error:  # discovery has let it go meanwhile, and its channel is closed
            return PeerAnswer(address, message=str(error))
        return PeerAnswer(address, answer.gateway, answer.aborted)
