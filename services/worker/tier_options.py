"""Builds the options of the tiers below the KV pool from the settings, with the secret of the page keys."""

from __future__ import annotations

import logging
import os
import secrets
from functools import partial
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

from rootstock_llm.services.worker.core.tiers.page_keys import SECRET_BYTES
from rootstock_llm.services.worker.exec.contracts.options import OpenStore, TierOptions
from rootstock_llm.services.worker.exec.contracts.page_store import PageStore
from rootstock_llm.services.worker.exec.tiers.redis_page_store import RedisPageStore, page_client
from rootstock_llm.services.worker.exec.tiers.segment_store import SegmentStore
from rootstock_llm.services.worker.exec.tiers.store_folder import StoreUnusable
from rootstock_llm.services.worker.settings import WorkerSettings
from rootstock_llm.services.worker.worker_id import worker_id

logger = logging.getLogger(__name__)

REDIS_PORT = 6379
NAMES_FILE = "blocks"  # file in the worker's folder with the block names of the stored pages
SECRET_FILE = "secret"  # file in the worker's folder with the secret from which its page keys are computed
GB = 10**9


def tier_options(settings: WorkerSettings) -> TierOptions | None:
    """Returns the options of the tiers, or None if there is only the device's memory.

    Raises:
        ValueError: settings are unsuitable or contradict each other, or the file of the secret cannot be used. Other users must
            not be able to read the file tier's secret.
    """
    storage = settings.hicache_storage_backend != "none"
    if settings.hicache_storage_salt_quota and not storage:
        raise ValueError("--hicache-storage-salt-quota needs --hicache-storage-backend")
    if not settings.enable_hierarchical_cache:
        if storage:
            raise ValueError("--hicache-storage-backend needs --enable-hierarchical-cache: pages are stored from the host tier")
        return None
    if not settings.enable_radix_cache:
        raise ValueError("--enable-hierarchical-cache needs the radix cache. Remove --no-enable-radix-cache")
    if settings.hicache_storage_backend == "redis":
        return _redis_options(settings)
    if storage != bool(settings.hicache_storage_dir):
        raise ValueError("--hicache-storage-backend file and --hicache-storage-dir must be set together")
    name = worker_id(settings)
    if storage and ("/" in name or name in (".", "..")):
        raise ValueError(f"--worker-id {name!r} cannot name the worker's folder in --hicache-storage-dir; use a name without '/'")
    folder = Path(settings.hicache_storage_dir, name)
    secret = _secret_of(folder) if storage else None
    sizes = settings.hicache_storage_size * GB, _salt_bytes(settings)
    open_storage = partial(_open, folder / "pages", *sizes) if secret else None
    secret = secret or secrets.token_bytes(SECRET_BYTES)
    return _options(settings, open_storage, secret, folder / NAMES_FILE if open_storage else None)


def _options(
    settings: WorkerSettings, open_storage: OpenStore | None, secret: bytes, names_file: Path | None = None
) -> TierOptions:
    names_file = names_file if settings.redis_url and settings.enable_prefix_index else None
    share = settings.hicache_memory_fraction
    return TierOptions(settings.hicache_ratio, settings.hicache_size * GB, open_storage, secret, names_file, share)


def _redis_options(settings: WorkerSettings) -> TierOptions:
    """Returns the options with a Redis storage tier that workers share. Raises ValueError if its settings are unsuitable."""
    url, file = settings.hicache_storage_url, settings.hicache_storage_secret_file
    if not (url and file):
        raise ValueError("--hicache-storage-backend redis needs --hicache-storage-url and --hicache-storage-secret-file")
    address = _address_of("--hicache-storage-url", url)
    try:
        page_client(url).close()
    except ValueError as error:
        raise ValueError(f"--hicache-storage-url: {error}") from None
    if settings.redis_url and address == _address_of("--redis-url", settings.redis_url):
        raise ValueError("--hicache-storage-url is the prefix index's Redis, which pages of KV would fill. Use another Redis")
    try:
        found = Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"--hicache-storage-secret-file: {error}") from None
    if len(found) < SECRET_BYTES:
        raise ValueError(f"--hicache-storage-secret-file {file} has {len(found)} bytes; it needs at least {SECRET_BYTES}")

    def open_store(page_bytes: int, identity: bytes) -> PageStore:
        return RedisPageStore(url, page_bytes, settings.hicache_storage_ttl_s, identity, salt_bytes=_salt_bytes(settings))

    return _options(settings, open_store, blake2b(found, digest_size=SECRET_BYTES).digest())


def _address_of(flag: str, url: str) -> tuple[str, int]:
    """Returns the host (or the path of a socket) and the port of a flag's Redis URL. Raises ValueError for another URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError(f"{flag} is not a redis://, rediss:// or unix:// URL")
    return parts.hostname or parts.path, parts.port or REDIS_PORT


def _salt_bytes(settings: WorkerSettings) -> int:
    return round(settings.hicache_storage_salt_quota * GB)


def _open(folder: Path, max_bytes: int, salt_bytes: int, page_bytes: int, identity: bytes) -> PageStore | None:
    """Opens the file tier. If the disk cannot be used, logs the reason and returns None; the worker runs without the tier.

    Raises:
        ValueError: the tier's size or quota is too small for a page, or the page size or identity is invalid.
    """
    try:
        return SegmentStore(folder, page_bytes, max_bytes, identity=identity, salt_bytes=salt_bytes)
    except StoreUnusable as error:
        logger.error("this worker runs without the file tier: %s", error)
        return None


def _secret_of(folder: Path) -> bytes | None:
    """Reads the secret in the worker's folder. Creates the folder and the secret if they are missing.

    Returns:
        None if the disk cannot be used.

    Raises:
        ValueError: the file belongs to another user, other users may read it, or it has the wrong size.
    """
    path = folder / SECRET_FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_secret(path)
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            found, secret = os.fstat(file.fileno()), file.read(SECRET_BYTES + 1)
    except OSError as error:
        logger.error("this worker runs without the file tier: %s", error)
        return None
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ValueError(
            f"{path} belongs to another user or is readable by others, so page keys can be forged. Make this user its owner, and"
            " set mode 0600"
        )
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"{path} is not a secret of a file tier: it has not exactly {SECRET_BYTES} bytes")
    return secret


def _make_secret(path: Path) -> None:
    """Creates the secret atomically unless the file exists, even if several processes do so at the same time. Raises OSError."""
    if path.exists():
        return
    made = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            os.fsync(file.fileno())
        os.link(made, path)
    except FileExistsError:
        return  # another process was first
    finally:
        made.unlink()
