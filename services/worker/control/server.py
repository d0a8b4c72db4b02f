"""Starts the gRPC server of the control service. The server checks each caller's token and certificate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from rootstock_llm.protos import control_pb2_grpc
from rootstock_llm.services.shared.rpc.control_token import read_token, require_token_beyond_loopback
from rootstock_llm.services.shared.rpc.grpc_server import PortGuard
from rootstock_llm.services.shared.rpc.token_check import start_guarded_server
from rootstock_llm.services.worker.control.profiles import Profiles
from rootstock_llm.services.worker.control.servicer import ControlServicer
from rootstock_llm.services.worker.exec.contracts.peer_pages import PeerRate
from rootstock_llm.services.worker.identity.model_identity import ServedWeights
from rootstock_llm.services.worker.loop.inbox import Command

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ControlServer:
    """A running control service."""

    port: int
    server: grpc.aio.Server

    async def stop(self, grace_s: float) -> None:
        """Stops the server. The scheduler's loop must have ended, so that no call still waits for a command's result."""
        await self.server.stop(grace_s)


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """The settings of the control port."""

    host: str
    port: int  # 0: no control service
    token: str  # token that callers must send; empty: no token, or the token of token_file
    token_file: str  # file with that token; empty: no file
    profile_dir: str  # folder of the profile files


async def start_control(
    at: ControlAddress,
    put: Callable[[Command], None],
    worker_id: str,
    model: str,
    weights: ServedWeights | None = None,
    guard: PortGuard | None = None,
    kv_peers: Callable[[], Sequence[PeerRate]] = tuple,
) -> ControlServer | None:
    """Starts the control service. Returns None if its port is 0.

    Args:
        at: the settings of the port.
        put: passes a command to the scheduler's loop.
        worker_id: name of the worker.
        model: name of the model.
        weights: the served weights; None if the model has no revision.
        guard: checks the callers' certificates; None without mutual TLS.
        kv_peers: returns the remote workers whose KV this worker reads, with the measured rates.

    Raises:
        ValueError: the address is not loopback and there is no token, or the token file cannot be read.
        RuntimeError: the port is in use.
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
