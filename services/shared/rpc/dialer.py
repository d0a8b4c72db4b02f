"""Makes gRPC channels to other services, without TLS or with mutual TLS by the current certificate files.

A gRPC channel reconnects with the credentials with which it was created. The owner of a LongLivedChannel therefore calls now()
before each stream: now() replaces the channel if the certificate files have changed. A call that still waits for a connection
fails with StaleChannel after a change of the files. Streams over the replaced channel continue for at most CLOSE_S.
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
from rootstock_llm.services.shared.tls.certificate_files import CHECK_S
from rootstock_llm.services.shared.tls.handshake import handshake_fault
from rootstock_llm.services.shared.tls.mutual_tls import MutualTls
from rootstock_llm.services.shared.tls.roles import Role

logger = logging.getLogger(__name__)

DIAGNOSE_S = 60.0  # pause between two diagnoses of failed connections of one channel
CLOSE_S = 30.0  # seconds for which calls over a replaced channel may continue


class StaleChannel(ConnectionError):
    """The TLS files changed before the channel was connected. The caller must start the call again."""


def _ignore(_service: str) -> None:
    """Ignores a failed handshake."""


@dataclass(frozen=True, slots=True)
class Dialer:
    """Makes channels with the credentials of this process."""

    mtls: MutualTls | None = None  # None: connections without TLS
    failed: Callable[[str], None] = _ignore  # called with the name of the remote service after a TLS handshake has failed

    def channel(self, target: str, role: Role) -> grpc.aio.Channel:
        """Returns a new channel with the current certificate files. It is not replaced when the files change.

        Args:
            target: host:port.
            role: role that the certificate of the server must name.
        """
        if self.mtls is None:
            return grpc_server.channel(target)
        named = ("grpc.ssl_target_name_override", role.value)
        return grpc.aio.secure_channel(target, self.mtls.channel_credentials(), options=[*grpc_server.CHANNEL_OPTIONS, named])

    def long_lived_channel(self, target: str, role: Role) -> LongLivedChannel:
        return LongLivedChannel(self, target, role)


PLAINTEXT = Dialer()


class LongLivedChannel:
    """A long-lived channel to one address, replaced when the TLS files change. Belongs to one event loop."""

    def __init__(self, dialer: Dialer, target: str, role: Role) -> None:
        self._dialer, self._target, self._role = dialer, target, role
        self._version = self._files_version()
        self._channel = dialer.channel(target, role)
        self._closing: set[asyncio.Task[None]] = set()
        self._diagnose_at = 0.0

    def _files_version(self) -> int:
        return 0 if self._dialer.mtls is None else self._dialer.mtls.version

    @property
    def is_stale(self) -> bool:
        """Whether the TLS files have changed since the channel was created. A stale channel must not connect again."""
        return self._files_version() != self._version

    @property
    def may_connect(self) -> bool:
        """Whether a call may start: it would use the current files, or a connection that already exists."""
        return not self.is_stale or self._channel.get_state() is grpc.ChannelConnectivity.READY

    def now(self) -> grpc.aio.Channel:
        """Returns the channel for new streams and calls. Calls over a replaced channel continue for at most CLOSE_S."""
        if self.is_stale:
            self._version, replaced = self._files_version(), self._channel
            self._channel = self._dialer.channel(self._target, self._role)
            closing = asyncio.get_running_loop().create_task(replaced.close(CLOSE_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return self._channel

    async def close(self, grace_s: float | None = None) -> None:
        """Closes the current channel when its calls have ended, at the latest after `grace_s` seconds.

        None ends the calls of the current channel immediately. Calls over replaced channels are no longer awaited.
        """
        for closing in self._closing:
            closing.cancel()
        await self._channel.close(grace_s)

    @contextlib.asynccontextmanager
    async def opening(self) -> AsyncIterator[None]:
        """Wraps a call that waits for the current channel to connect, and logs why the TLS handshake fails.

        Raises:
            StaleChannel: the TLS files have changed, so the channel must not connect.
        """
        if self._dialer.mtls is None:
            yield
            return
        try:
            # The timeout cancels the waiting task, not the gRPC call: a write in grpc.aio never ends if its call is cancelled.
            async with asyncio.timeout(None) as waiting:
                watching = asyncio.create_task(self._watch(waiting))
                try:
                    yield
                finally:
                    watching.cancel()
        except TimeoutError:
            if waiting.expired():
                raise StaleChannel("the TLS files changed before the channel was connected") from None
            raise

    async def state_changed(self, state: grpc.ChannelConnectivity) -> None:
        """Returns when the channel leaves this state, or when the channel is stale and not connected."""
        if self._dialer.mtls is None:
            await self._channel.wait_for_state_change(state)
            return
        change = asyncio.create_task(self._channel.wait_for_state_change(state))
        try:
            while not change.done() and (state is grpc.ChannelConnectivity.READY or not self.is_stale):
                # The channel stays in TRANSIENT_FAILURE while gRPC retries, so no state change wakes this loop.
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    await self._diagnose()
                await asyncio.wait((change,), timeout=CHECK_S)
        finally:
            change.cancel()

    async def _watch(self, waiting: asyncio.Timeout) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            if self._channel.get_state() is not grpc.ChannelConnectivity.READY:
                if self.is_stale:
                    waiting.reschedule(asyncio.get_running_loop().time())
                    return
                await self._diagnose()

    async def _diagnose(self) -> None:
        """Logs why there is no connection, at most once in DIAGNOSE_S. gRPC does not report the reason to a waiting call."""
        clock = asyncio.get_running_loop().time
        mtls = self._dialer.mtls
        if mtls is None or clock() < self._diagnose_at:
            return
        self._diagnose_at = clock() + DIAGNOSE_S
        fault = await handshake_fault(self._target, mtls.files.now().client, self._role)
        if fault:
            self._dialer.failed(self._role.value.removeprefix("rootstock-"))
            logger.error("TLS handshake failed: %s", fault, extra=fields(peer=self._role.value, address=self._target))
