"""What the settings say of KV that goes from worker to worker (docs/pd.md)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from services.worker.core.contracts.rooms import Room
from services.worker.exec.contracts.options import PeerOptions
from services.worker.exec.contracts.peer_pages import PeerReader, ReadPages, RoomServer
from services.worker.exec.peers.peer_reader import TcpPeerReader
from services.worker.exec.peers.room_server import TcpRoomServer
from services.worker.settings import WorkerSettings


def peer_options(settings: WorkerSettings, on_left: Callable[[Room], None]) -> PeerOptions | None:
    """None: this worker computes whole answers by itself. on_left: told, on any thread, of rooms whose readers have left. Raises
    ValueError for settings that do not go together."""
    if settings.disaggregation_mode == "both":
        return None
    if not settings.enable_radix_cache:
        raise ValueError("--disaggregation-mode moves what is cached: it means nothing without the radix cache")
    if settings.disaggregation_mode == "prefill":
        return PeerOptions(open_server=partial(_server, settings, on_left))
    return PeerOptions(open_reader=partial(_reader, settings.page_size))


def _server(
    settings: WorkerSettings, on_left: Callable[[Room], None], layout: bytes, page_bytes: int, read_pages: ReadPages
) -> RoomServer:
    host, port = settings.disaggregation_host, settings.disaggregation_port
    try:
        return TcpRoomServer(host, port, layout, settings.page_size, page_bytes, read_pages, on_left)
    except OSError as error:
        raise ValueError(f"--disaggregation-host {host} --disaggregation-port {port}: {error}") from None


def _reader(page_size: int, layout: bytes, page_bytes: int) -> PeerReader:
    return TcpPeerReader(layout, page_size, page_bytes)
