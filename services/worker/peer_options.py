"""Builds the options of KV transfers between workers from the settings (docs/design/prefill-and-decode.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.tls.roles import Role
from rootstock_llm.services.worker.core.contracts.reservations import ReservationReleased
from rootstock_llm.services.worker.exec.contracts.options import PeerOptions
from rootstock_llm.services.worker.exec.contracts.peer_pages import KvServer, PeerReader, ReadPages
from rootstock_llm.services.worker.exec.remote_kv.kv_server import TcpKvServer
from rootstock_llm.services.worker.exec.remote_kv.nixl_process import Carrier
from rootstock_llm.services.worker.exec.remote_kv.peer_reader import TcpPeerReader
from rootstock_llm.services.worker.exec.remote_kv.socket_folder import SocketFolder
from rootstock_llm.services.worker.exec.remote_kv.tls import PeerTls
from rootstock_llm.services.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)
MTLS = ("--mtls-cert-file", "--mtls-key-file", "--mtls-ca-file")  # files that are used if no --disaggregation-tls-*-file is set


def peer_options(settings: WorkerSettings, on_released: Callable[[ReservationReleased], None]) -> PeerOptions | None:
    """Returns the options of a prefill or decode worker, or None for a worker that computes whole requests.

    Args:
        on_released: called on any thread when the reader of a KV reservation has released it or has disconnected.

    Raises:
        ValueError: settings contradict each other, or files or folders cannot be used.
    """
    if settings.disaggregation_mode == "both":
        return None
    if not settings.enable_radix_cache:
        raise ValueError("--disaggregation-mode needs the radix cache. Remove --no-enable-radix-cache")
    tls = _tls(settings)
    folder = _folder(settings.disaggregation_shm_dir)
    is_nixl = settings.disaggregation_transfer_backend == "nixl"
    if is_nixl and tls is not None:
        raise ValueError("--disaggregation-transfer-backend nixl does not encrypt. Remove the TLS files, or use tcp")
    if settings.disaggregation_mode == "prefill":
        return PeerOptions(open_server=partial(_server, settings, on_released, tls, folder))
    return PeerOptions(open_reader=partial(_reader, settings.page_size, tls, folder, is_nixl))


def _folder(name: str) -> SocketFolder | None:
    """Returns the folder of sockets, or None if disaggregation_shm_dir is empty. Raises ValueError for an unusable folder."""
    if not name:
        return None
    try:
        return SocketFolder(Path(name))
    except (OSError, ValueError) as error:
        raise ValueError(f"--disaggregation-shm-dir: {error}") from None


def _tls(settings: WorkerSettings) -> PeerTls | None:
    files = {
        "--disaggregation-tls-cert-file": settings.disaggregation_tls_cert_file,
        "--disaggregation-tls-key-file": settings.disaggregation_tls_key_file,
        "--disaggregation-tls-ca-file": settings.disaggregation_tls_ca_file,
    }
    name = ""
    if not any(files.values()) and settings.mtls_cert_file:
        files, name = {each: getattr(settings, each[2:].replace("-", "_")) for each in MTLS}, Role.WORKER.value
    if not any(files.values()):
        return None
    if missing := [name for name, path in files.items() if not path]:
        raise ValueError(f"{', '.join(files)} must be set together; not set: {', '.join(missing)}")
    try:
        certificate, key, authority = map(Path, files.values())
        return PeerTls(certificate, key, authority, name)
    except ValueError as error:
        raise ValueError(f"{', '.join(files)}: {error}") from None


def _server(
    settings: WorkerSettings,
    on_released: Callable[[ReservationReleased], None],
    tls: PeerTls | None,
    folder: SocketFolder | None,
    layout: bytes,
    page_bytes: int,
    read_pages: ReadPages,
    num_parts: Sequence[int] = (),
) -> KvServer:
    host, port = settings.disaggregation_host, settings.disaggregation_port
    carrier = _carrier() if settings.disaggregation_transfer_backend == "nixl" else None
    try:
        sizes = settings.page_size, page_bytes
        return TcpKvServer(host, port, layout, *sizes, read_pages, on_released, None, tls, folder, carrier, num_parts)
    except OSError as error:
        if carrier is not None:
            carrier.close()
        raise ValueError(f"--disaggregation-host {host} --disaggregation-port {port}: {error}") from None


def _reader(
    page_size: int, tls: PeerTls | None, folder: SocketFolder | None, is_nixl: bool, layout: bytes, page_bytes: int
) -> PeerReader:
    return TcpPeerReader(layout, page_size, page_bytes, tls=tls, folder=folder, carrier=_carrier() if is_nixl else None)


def _carrier() -> Carrier | None:
    """Starts the process that runs NIXL. If NIXL cannot be loaded, logs the reason and returns None; KV is then sent over TCP."""
    try:
        return Carrier()
    except OSError as error:
        logger.warning("NIXL cannot be loaded; KV transfers use TCP", extra=fields(error=str(error)))
        return None
