"""Makes gRPC channels to other services, without TLS or with mutual TLS by the current certificate files.

A gRPC channel reconnects with the credentials with which it was created. An owner of a long-lived channel therefore asks for the
current channel before each stream (KeptChannel.now). A call that waits for a connection is given up when the files change.
Streams over earlier channels continue for at most CLOSE_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc

from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.rpc import grpc_server
from rootstock_llm.services.shared.tls.certificate_files import LOOK_S
from rootstock_llm.services.shared.tls.handshake import why_refused
from rootstock_llm.services.shared.tls.mutual_tls import MutualTls
from rootstock_llm.services.shared.tls.roles import Role

logger = logging.getLogger(__name__)

TELL_S = 60.0  # pause between two diagnoses of failed connections of one channel
CLOSE_S = 30.0  # time that calls over a replaced channel may take to end


class StaleChannel(ConnectionError):
    """The TLS files changed before the channel was connected. The caller must start the call again."""


def _ignore(_service: str) -> None:
    """Ignores a failed handshake."""


@dataclass(frozen=True, slots=True)
class Dialer:
    """Makes channels with the credentials of this process."""

    mtls: MutualTls | None = None  # None: connections without TLS
    failed: Callable[[str], None] = _ignore  # receives the name of the service with which a TLS handshake fails

    def channel(self, target: str, role: Role) -> grpc.aio.Channel:
        """Returns a new channel for calls that start immediately.

        Args:
            target: host:port.
            role: role that the certificate of the server must name.
        """
        if self.mtls is None:
            return grpc_server.channel(target)
        named = ("grpc.ssl_target_name_override", role.value)
        return grpc.aio.secure_channel(target, self.mtls.channel_credentials(), options=[*grpc_server.CHANNEL_OPTIONS, named])

    def kept(self, target: str, role: Role) -> KeptChannel:
        return KeptChannel(self, target, role)


IN_THE_CLEAR = Dialer()


class KeptChannel:
    """A long-lived channel to one address, replaced when the TLS files change. Belongs to one event loop."""

    def __init__(self, dialer: Dialer, target: str, role: Role) -> None:
        self._dialer, self._target, self._role = dialer, target, role
        self._number = self._numbered()
        self._channel = dialer.channel(target, role)
        self._closing: set[asyncio.Task[None]] = set()
        self._diagnose_at = 0.0

    def _numbered(self) -> int:
        return 0 if self._dialer.mtls is None else self._dialer.mtls.number

    @property
    def is_stale(self) -> bool:
        """Whether the files have changed since the channel was created, so that it must not connect again."""
        return self._numbered() != self._number

    @property
    def may_connect(self) -> bool:
        """Whether a call that starts now is certain not to connect with old files."""
        return not self.is_stale or self._channel.get_state() is grpc.ChannelConnectivity.READY

    def now(self) -> grpc.aio.Channel:
        """Returns the channel for new streams and calls. Calls over an earlier channel continue for at most CLOSE_S."""
        if self.is_stale:
            self._number, earlier = self._numbered(), self._channel
            self._channel = self._dialer.channel(self._target, self._role)
            closing = asyncio.get_running_loop().create_task(earlier.close(CLOSE_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return self._channel

    async def close(self, grace_s: float | None = None) -> None:
        """Closes this channel after the grace period, and stops waiting for calls over earlier channels."""
        for closing in self._closing:
            closing.cancel()
        await self._channel.close(grace_s)

    @contextlib.asynccontextmanager
    async def opening(self) -> AsyncIterator[None]:
        """Wraps a call that waits for a connection over the current channel, and logs why the TLS handshake fails.

        Raises:
            StaleChannel: the files have changed, so the channel must not connect.
        """
        if self._dialer.mtls is None:
            yield
            return
        try:
            # The call itself is not cancelled, because a write in grpc.aio would then never end.
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
        """Returns when the channel leaves this state, or when the channel is stale and not connected."""
        if self._dialer.mtls is None:
            await self._channel.wait_for_state_change(state)
            return
        change = asyncio.create_task(self._channel.wait_for_state_change(state))
        try:
            while not change.done() and (state is grpc.ChannelConnectivity.READY or not self.is_stale):
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:  # repeated attempts do not leave this state
                    await self._diagnose()
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
                await self._diagnose()

    async def _diagnose(self) -> None:
        """Logs why there is no connection, at most once in TELL_S. gRPC does not report the reason to a waiting call."""
        clock = asyncio.get_running_loop().time
        mtls = self._dialer.mtls
        if mtls is None or clock() < self._diagnose_at:
            return
        self._diagnose_at = clock() + TELL_S
        why = await why_refused(self._target, mtls.files.now().client, self._role)
        if why:
            self._dialer.failed(self._role.value.removeprefix("rootstock-"))
            logger.error("TLS handshake failed: %s", why, extra=fields(peer=self._role.value, address=self._target))
