"""Aborts requests across gateways: the gRPC service that other gateways call, and the client that calls their services.

A gateway stores no state about other gateways. The result of an abort lists the gateways that did not respond.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import grpc

from rootstock_llm.protos import gateway_pb2 as pb
from rootstock_llm.protos import gateway_pb2_grpc
from rootstock_llm.services.gateway.discovery.watch import Discovery
from rootstock_llm.services.gateway.generation.abort import AbortScope, PeerAnswer
from rootstock_llm.services.gateway.keys.key_table import KeyTable
from rootstock_llm.services.gateway.remote.connection import StreamBroken, response_of
from rootstock_llm.services.shared.limits import MAX_REQUEST_ID_CHARS
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.rpc.control_token import authorization
from rootstock_llm.services.shared.rpc.dialer import PLAINTEXT, Dialer, LongLivedChannel
from rootstock_llm.services.shared.tls.roles import Role

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0  # seconds for one call of another gateway, and for closing its channel
_PURPOSE = b"rootstock-tenant"  # BLAKE2's personalization, at most 16 bytes


class Tenants:
    """Translates between the names of API keys and digests. Calls between gateways contain digests instead of names.

    A digest is made from the API key's name, so it stays the same if the API key's secret is replaced.
    """

    def __init__(self, table: Callable[[], KeyTable | None], token: str) -> None:
        """Makes the translator.

        Args:
            table: Returns the current API keys, or None if the gateway checks no API keys.
            token: The control token, or "" if none is configured. It is the secret of the digests, so that only gateways can
                compute them.
        """
        self._table = table
        self._secret = hashlib.sha256(token.encode()).digest() if token else b""
        self._known: KeyTable | None = None  # the table that _names was made from
        self._names: dict[bytes, str] = {b"": ""}

    def digest(self, key: str) -> bytes:
        """Returns the digest of an API key's name. b"" for the name "", which means requests without an API key."""
        if not key:
            return b""
        return hashlib.blake2b(key.encode(), digest_size=16, key=self._secret, person=_PURPOSE).digest()

    def key(self, digest: bytes) -> str | None:
        """Returns the name of the API key with this digest, or None if this gateway has no API key with this digest."""
        table = self._table()
        if table is not self._known:
            self._known = table
            self._names = {b"": ""} if table is None else {self.digest(key.name): key.name for key in table}
        return self._names.get(digest)


class PeerServicer(gateway_pb2_grpc.GatewayPeerServicer):
    """The gRPC service that other gateways call to abort requests of this gateway. Each process has one, on its event loop."""

    def __init__(self, name: bytes, abort_here: Callable[[AbortScope], int], tenants: Tenants, operators: bool) -> None:
        """Makes the service.

        Args:
            name: Random name of this gateway's process. A call with this name is from this gateway itself.
            abort_here: Aborts requests of this gateway and returns their number.
            tenants: Translates the digests of API keys in calls.
            operators: Whether a call may abort requests of all API keys. False if no control token protects the port.
        """
        self._name = name
        self._abort_here = abort_here
        self._tenants = tenants
        self._operators = operators

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        if request.sender == self._name:
            return pb.AbortResponse(gateway=self._name)
        fault = _fault_of(request)
        if fault:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)
        if request.operator and not self._operators:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                "aborting requests of all API keys from another host requires the setting control_token on every gateway",
            )
        key = None if request.operator else self._tenants.key(request.tenant)
        if key is None and not request.operator:
            return pb.AbortResponse(gateway=self._name)  # requests of an API key that this gateway does not have cannot run here
        aborted = self._abort_here(AbortScope(request.rid or None, key, request.worker))
        logger.info("aborted requests for another gateway", extra=fields(rid=request.rid, aborted=aborted))
        return pb.AbortResponse(gateway=self._name, aborted=aborted)


def _fault_of(request: pb.AbortRequest) -> str:
    """Returns the reason why a request is invalid, or "" if it is valid."""
    if request.WhichOneof("owner") is None or (request.WhichOneof("owner") == "operator" and not request.operator):
        return "one of 'tenant' and 'operator' must be set"
    if not request.operator and (request.all or request.worker):
        return "'all' and 'worker' are allowed only with 'operator'"
    if request.all:
        return ""
    if not 1 <= len(request.rid) <= MAX_REQUEST_ID_CHARS:
        return f"'rid' must have 1 to {MAX_REQUEST_ID_CHARS} characters"
    return ""


class PeerGateways:
    """The client of all gateways that discovery has found, with a gRPC channel to each. Each process has one, on its event loop.

    Discovery may also list this gateway's own address. The result of a call to this address is dropped.
    """

    def __init__(
        self, targets: Sequence[str], tenants: Tenants, token: str, dns_refresh_s: float, dialer: Dialer = PLAINTEXT
    ) -> None:
        self._dialer = dialer
        self.name = secrets.token_bytes(16)
        self._tenants = tenants
        self._metadata = (("authorization", authorization(token)),) if token else ()
        self._channels: dict[str, LongLivedChannel] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._discovery = Discovery(targets, self._set_endpoints, dns_refresh_s=dns_refresh_s)

    async def run(self) -> None:
        """Opens and closes channels as discovery reports gateways, until cancelled, and then closes all channels."""
        try:
            await self._discovery.run()
        finally:
            self._set_endpoints({})
            await asyncio.gather(*self._closing)

    def _set_endpoints(self, endpoints: Mapping[str, bool]) -> None:
        """Opens channels to new gateways, and closes channels to removed gateways.

        A gateway that is not ready also has a channel, because it may still run requests while it drains.
        """
        for address in endpoints.keys() - self._channels.keys():
            self._channels[address] = self._dialer.long_lived_channel(address, Role.GATEWAY)
        for address in self._channels.keys() - endpoints.keys():
            closing = asyncio.get_running_loop().create_task(self._channels.pop(address).close(CALL_TIMEOUT_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    @property
    def num_known(self) -> int:
        """Number of gateways that discovery lists. It may include this gateway."""
        return len(self._channels)

    async def abort(self, scope: AbortScope) -> Sequence[PeerAnswer]:
        """Aborts requests at all other gateways concurrently. Returns one result for each of them."""
        request = pb.AbortRequest(sender=self.name, worker=scope.worker)
        if scope.rid is None:
            request.all = True
        else:
            request.rid = scope.rid
        if scope.key is None:
            request.operator = True
        else:
            request.tenant = self._tenants.digest(scope.key)
        calls = [self._abort_at(address, channel, request) for address, channel in self._channels.items()]
        return [answer for answer in await asyncio.gather(*calls) if answer.gateway != self.name]

    async def _abort_at(self, address: str, channel: LongLivedChannel, request: pb.AbortRequest) -> PeerAnswer:
        stub = gateway_pb2_grpc.GatewayPeerStub(channel.now())
        try:
            answer = await response_of(partial(stub.Abort, request, timeout=CALL_TIMEOUT_S, metadata=self._metadata))
        except grpc.aio.AioRpcError as error:
            logger.warning("could not reach another gateway", extra=fields(address=address, code=error.code().name))
            return PeerAnswer(address, message=f"{error.code().name}: {error.details()}")
        except StreamBroken as error:  # discovery has removed the gateway during the call, which closes its channel
            return PeerAnswer(address, message=str(error))
        return PeerAnswer(address, answer.gateway, answer.aborted)
