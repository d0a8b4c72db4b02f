"""One tokenizer address: its channel, kept trying, and whether it answers. Everything runs on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from rootstock.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.gateway.peers import served_model
from services.gateway.peers.reconnect import StreamBroken
from services.shared.observe.log import fields
from services.shared.rpc import grpc_server

logger = logging.getLogger(__name__)

PAUSE_S = 0.25  # between two questions to one that does not answer


class Replica:
    """connected: it has answered Info since it connected, and no call has gone unanswered or been sent away since.

    ready: it may be given new calls. retiring: it ends with its last call in flight.
    """

    def __init__(self, address: str, changed: Callable[[], None]) -> None:
        """`changed` is called when `connected` has changed."""
        self.address = address
        self.connected = False
        self.ready = True
        self.retiring = False
        self.in_flight = 0
        self.model = served_model.ANY  # as it said when it connected
        self._changed = changed
        self._doubted = asyncio.Event()
        self._channel = grpc_server.channel(address)
        self.stub = tokenizer_pb2_grpc.TokenizerStub(self._channel)

    @property
    def busy(self) -> bool:
        return self.in_flight > 0

    def serves(self, model: str) -> bool:
        return self.ready and served_model.serves(self.model, model)

    def doubt(self) -> None:
        """A call went unanswered, or was sent away, as by one that stops: not connected until it answers Info."""
        self._doubted.set()
        self._set_connected(False)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                state = self._channel.get_state(try_to_connect=True)
                if state is grpc.ChannelConnectivity.READY:
                    await self._while_ready()
                else:
                    self._set_connected(False)
                    await self._channel.wait_for_state_change(state)
        finally:
            self._set_connected(False)
            await self._channel.close()

    async def _while_ready(self) -> None:
        """Returns when the channel is no longer ready, or when the replica has to be asked again."""
        self._doubted.clear()
        try:
            info = self.stub.Info(tokenizer_pb2.TokenizerInfoRequest(), timeout=served_model.INFO_S)
            self.model = await served_model.ask(info, self.address)
        except StreamBroken as error:
            self._set_connected(False)
            logger.warning("tokenizer does not answer: %s", error, extra=fields(address=self.address))
            await asyncio.sleep(PAUSE_S)
            return
        self._set_connected(True)
        left = asyncio.create_task(self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        doubted = asyncio.create_task(self._doubted.wait())
        try:
            await asyncio.wait((left, doubted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
            doubted.cancel()

    def _set_connected(self, connected: bool) -> None:
        if connected is not self.connected:
            self.connected = connected
            message = "tokenizer connected" if connected else "tokenizer not connected"
            logger.info(message, extra=fields(address=self.address, model=self.model))
            self._changed()
