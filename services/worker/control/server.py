"""The control service's own port: who may call it, and its start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from rootstock.v1 import control_pb2_grpc
from services.shared.rpc.control_token import read_token, require_token_beyond_loopback
from services.shared.rpc.port_guard import PortGuard
from services.shared.rpc.token_check import start_guarded_server
from services.worker.control.profiles import Profiles
from services.worker.control.servicer import ControlServicer
from services.worker.exec.contracts.peer_pages import PeerRate
from services.worker.identity.model_identity import ServedWeights
from services.worker.loop.barrier import Command

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ControlServer:
    """A running control service on `port`. stop(): once the loop has ended, which ends what waits for it."""

    port: int
    server: grpc.aio.Server

    async def stop(self, grace_s: float) -> None:
        await self.server.stop(grace_s)


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """port: 0 for no control service. token, or the file that holds it: what callers bring. profile_dir: where profiles go."""

    host: str
    port: int
    token: str
    token_file: str
    profile_dir: str


async def start_control(
    at: ControlAddress,
    put: Callable[[Command], None],
    worker_id: str,
    model: str,
    weights: ServedWeights | None = None,
    guard: PortGuard | None = None,
    kv_peers: Callable[[], Sequence[PeerRate]] = tuple,
) -> ControlServer | None:
    """None where it is switched off. put: the inbox's. weights: None where they have no name. guard: as start_server has it.
    kv_peers: whose KV is read.

    Raises ValueError for settings that would let strangers in or a token that cannot be read, RuntimeError if the port is taken.
    """
    if not at.port:
        return None
    token = read_token(at.token, at.token_file)
    require_token_beyond_loopback("control_host", at.host, token)
    servicer = ControlServicer(
        put, worker_id, model, Profiles(Path(at.profile_dir), worker_id), weights=weights, kv_peers=kv_peers
    )

    def add(server: grpc.aio.Server) -> None:
        control_pb2_grpc.add_ControlServicer_to_server(servicer, server)

    server, port = await start_guarded_server(at.host, at.port, token, add, guard)
    logger.info("control service on %s:%d, %s", at.host, port, "with a token" if token else "without a token")
    return ControlServer(port, server)
