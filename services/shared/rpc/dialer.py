"""How a process reaches the gRPC ports of others: in the clear, or with TLS on both sides, by the files as they are by then.

A channel of gRPC connects again by itself with what it was made of. So who keeps one asks for it before each stream, and one that
waits for a connection is given up when the files change. Streams over earlier ones end as they would have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc

from services.shared.observe.log_fields import fields
from services.shared.rpc import grpc_server
from services.shared.tls.certificate_files import LOOK_S
from services.shared.tls.handshake import why_refused
from services.shared.tls.mutual_tls import MutualTls
from services.shared.tls.roles import Role

logger = logging.getLogger(__name__)

TELL_S = 60.0  # between two looks at why the same peer cannot be connected to
CLOSE_S = 30.0  # for calls over a channel that another one has taken the place of


class StaleChannel(ConnectionError):
    """What waits for a connection of it is to begin anew."""


def _nothing(_service: str) -> None:
    """Nobody counts."""


@dataclass(frozen=True, slots=True)
class Dialer:
    """mtls: None for connections in the clear. failed: told of which service a peer is with which no TLS comes about."""

    mtls: MutualTls | None = None
    failed: Callable[[str], None] = _nothing

    def channel(self, target: str, role: Role) -> grpc.aio.Channel:
        """For calls that follow at once. role: of the process that is meant to be there."""
        if self.mtls is None:
            return grpc_server.channel(target)
        named = ("grpc.ssl_target_name_override", role.value)
        return grpc.aio.secure_channel(target, self.mtls.channel_credentials(), options=[*grpc_server.CHANNEL_OPTIONS, named])

    def kept(self, target: str, role: Role) -> KeptChannel:
        return KeptChannel(self, target, role)


IN_THE_CLEAR = Dialer()


class KeptChannel:
    """A channel to one address for as long as its owner wants one. Of one event loop. target: host:port."""

    def __init__(self, dialer: Dialer, target: str, role: Role) -> None:
        self._dialer, self._target, self._role = dialer, target, role
        self._number = self._numbered()
        self._channel = dialer.channel(target, role)
        self._closing: set[asyncio.Task[None]] = set()
        self._tell_at = 0.0

    def _numbered(self) -> int:
        return 0 if self._dialer.mtls is None else self._dialer.mtls.number

    @property
    def is_stale(self) -> bool:
        """Whether the files have changed since it was made: it must not connect again."""
        return self._numbered() != self._number

    @property
    def may_connect(self) -> bool:
        """Whether a call over it, made at once, is sure to use no old files."""
        return not self.is_stale or self._channel.get_state() is grpc.ChannelConnectivity.READY

    def now(self) -> grpc.aio.Channel:
        """For streams and calls to come. Those over an earlier one go on."""
        if self.is_stale:
            self._number, earlier = self._numbered(), self._channel
            self._channel = self._dialer.channel(self._target, self._role)
            closing = asyncio.get_running_loop().create_task(earlier.close(CLOSE_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return self._channel

    async def close(self, grace_s: float | None = None) -> None:
        """Ends its calls, after so long, and those of earlier ones."""
        for closing in self._closing:
            closing.cancel()
        await self._channel.close(grace_s)

    @contextlib.asynccontextmanager
    async def opening(self) -> AsyncIterator[None]:
        """While a call over the channel that there is waits for a connection. Why none comes about is told. Raises StaleChannel
        where none may come about any more, the files having changed."""
        if self._dialer.mtls is None:
            yield
            return
        try:
            # Not by cancelling the call: grpc.aio has a write wait for ever then.
            async with asyncio.timeout(None) as waiting:
                watching = asyncio.create_task(self._watch(waiting))
                try:
                    yield
                finally:
                    watching.cancel()
        except TimeoutError:
            if waiting.expired():
                raise StaleChannel("TLS files have changed before it was connected") from None
            raise

    async def state_changed(self, state: grpc.ChannelConnectivity) -> None:
        """Returns once the channel is in another state than this one, or may not come into another any more."""
        if self._dialer.mtls is None:
            await self._channel.wait_for_state_change(state)
            return
        change = asyncio.create_task(self._channel.wait_for_state_change(state))
        try:
            while not change.done() and (state is grpc.ChannelConnectivity.READY or not self.is_stale):
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:  # in which it stays, try after try
                    await self._tell()
                await asyncio.wait((change,), timeout=LOOK_S)
        finally:
            change.cancel()

    async def _watch(self, waiting: asyncio.Timeout) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
                if self.is_stale:
                    waiting.reschedule(asyncio.get_running_loop().time())
                    return
                await self._tell()

    async def _tell(self) -> None:
        """Looks why there is no connection, once in a while: gRPC does not say it to who waits for one."""
        clock = asyncio.get_running_loop().time
        mtls = self._dialer.mtls
        if mtls is None or clock() < self._tell_at:
            return
        self._tell_at = clock() + TELL_S
        why = await why_refused(self._target, mtls.files.now().client, self._role)
        if why:
            self._dialer.failed(self._role.value.removeprefix("rootstock-"))
            logger.error("no TLS with a peer: %s", why, extra=fields(peer=self._role.value, address=self._target))
