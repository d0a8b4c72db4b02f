"""Makes what moves a pool's pages from options: host memory, a storage in a folder, a reader of other workers' pages."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import blake2b

import numpy as np
import torch

from services.shared.observe.log_fields import fields
from services.worker.exec.contracts.options import TierOptions
from services.worker.exec.contracts.peer_pages import PeerReader
from services.worker.exec.pools.arrivals import Arrivals
from services.worker.exec.pools.host_memory import free_memory
from services.worker.exec.streams.cuda_streams import Streams
from services.worker.exec.tiers.block_log import BlockLog
from services.worker.exec.tiers.page_copier import PageCopier
from services.worker.exec.tiers.page_mover import PageMover

logger = logging.getLogger(__name__)
PATTERN = 251  # a prime: few pieces of a page begin alike
MOST_FREE = 0.8  # of the memory that is free beside the pool, which a host tier of a given size may take


class NoRoomForTiers(ValueError):
    """The host's memory has no room for a page beside what is there."""


def host_pages(options: TierOptions, pool_pages: int, page_bytes: int, free_bytes: int, pool_bytes: int = 0) -> int:
    """Returns the pages of the host tier.

    Args:
        free_bytes: of the host's memory, with the pool's.
        pool_bytes: of the pool, if its pages are in the same memory.

    Raises:
        NoRoomForTiers: the memory has no room for a page, or for the size that is asked for.
    """
    beside = max(0, free_bytes - pool_bytes)
    if options.host_bytes:
        most = int(beside * MOST_FREE)
        if options.host_bytes > most:
            raise NoRoomForTiers(
                f"hicache_size asks for {options.host_bytes >> 20} MiB; {beside >> 20} MiB are free beside the KV pool, of which"
                f" the host tier takes {most >> 20} MiB at most. Set it to {most // 10**9} or less"
            )
        pages = options.host_bytes // page_bytes
    else:
        most = min(int(free_bytes * options.host_share), int(beside * MOST_FREE))
        pages = min(int(options.host_ratio * pool_pages), most // page_bytes)
    if pages < 1:
        raise NoRoomForTiers(
            f"the host tier has no room for a page of {page_bytes} bytes: {free_bytes >> 20} MiB of the memory are free"
        )
    return pages


def make_mover(
    options: TierOptions | None,
    pool_pages: int,
    copier: Callable[[], PageCopier],
    arrivals: Arrivals,
    layout: str,
    streams: Streams,
    progress: Callable[[str], None],
    peers: PeerReader | None,
) -> tuple[PageMover, int]:
    """The mover, and the pages of the host tier. options: None for no tiers. layout: see LoadedInfo. Raises ValueError for what
    cannot be had."""
    page_bytes = copier().page_bytes
    if options is None:
        return PageMover(streams, copier, arrivals, torch.empty((0, page_bytes), dtype=torch.uint8), None, peers), 0
    on_host = streams.device.type == "cpu"  # where the pool's pages are taken from the system only when they are written
    free = free_memory()
    pages = host_pages(options, pool_pages, page_bytes, free, pool_pages * page_bytes if on_host else 0)
    is_cut = not options.host_bytes and pages < int(options.host_ratio * pool_pages)
    why = f"; by hicache_ratio it takes {options.host_share:.0%} of that at most, by hicache_size more" if is_cut else ""
    progress(f"host tier: {pages * page_bytes >> 20} MiB in {pages} pages, of {free >> 20} MiB of memory that are free{why}")
    memory = host_slab(pages, page_bytes)
    store = None if options.open_storage is None else options.open_storage(page_bytes, _identity(options, layout))
    log = None
    if store is not None:
        progress(f"storage tier: {store.counts().pages} pages are there")
        if options.names_file is not None:
            log = BlockLog(options.names_file, _identity(options, layout), store.keys)
    unpin = None if on_host else _pinned(memory)
    by_layers = brings_rightly(copier(), memory)
    if not by_layers:
        progress("host tier: pages are loaded whole, and not layer by layer")
    return PageMover(streams, copier, arrivals, memory, store, peers, log, unpin, by_layers), pages


def brings_rightly(copier: PageCopier, memory: torch.Tensor) -> bool:
    """Tries it with one page, which is afterwards what it was: a device has to read the host's memory where it lies, and what
    does that is compiled here. memory: uint8[n, page bytes], for which nobody has a use yet."""
    if not copier.can_bring:
        return False
    row, page = memory[0], np.zeros(1, dtype=np.int32)
    found, before = torch.empty_like(row), torch.empty_like(row)
    with torch.inference_mode():
        copier.save(page, [before])
        row.copy_(torch.arange(len(row)) % PATTERN)
        try:
            bring = copier.bringing(memory, page, page)
            for group in range(len(copier.groups.layers)):
                bring(group)
            copier.save(page, [found])
            copier.synchronize()
            came = found.equal(row)
        except Exception:  # of any kind: whatever compilers and drivers raise; whole pages are copied in another way
            logger.exception("pages cannot be loaded layer by layer")
            came = False
        row.copy_(before)
        copier.restore([row], page)
        copier.synchronize()
    return came


def host_slab(pages: int, page_bytes: int) -> torch.Tensor:
    """uint8[pages, page_bytes] that the system has given already, in huge pages where it has them: what is given only when it is
    written costs a copy beside a step several times its own time, in a step's."""
    mapped = mmap.mmap(-1, pages * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # kept by the tensor
    with suppress(OSError):  # a system without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    memory[:: mmap.PAGESIZE] = 0
    return memory.view(pages, page_bytes)


def _pinned(memory: torch.Tensor) -> Callable[[], None]:
    """In place: torch's own pinned memory has sizes of powers of two. What ends it, to be called before the memory goes: whoever
    gets its addresses next could pin nothing there. Raises NoRoomForTiers."""
    cudart = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error != 0:
        raise NoRoomForTiers(f"a host tier of {memory.nbytes >> 20} MiB cannot be pinned (CUDA error {error})")
    return partial(_unpin, memory.data_ptr())


def _unpin(address: int) -> None:
    error = int(torch.cuda.cudart().cudaHostUnregister(address))
    if error != 0:
        logger.error("the host tier stays pinned", extra=fields(error=error))


def _identity(options: TierOptions, layout: str) -> bytes:
    """Pages of another layout, or with keys of another secret, are of no use to anybody: they go when it is opened."""
    return blake2b(layout.encode(), key=options.secret, digest_size=32).digest()
