"""Makes the page mover of an executor: host memory, a storage tier, and a reader of remote workers' pages."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import blake2b

import numpy as np
import torch

from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.worker.exec.contracts.options import TierOptions
from rootstock_llm.services.worker.exec.contracts.peer_pages import PeerReader
from rootstock_llm.services.worker.exec.pools.host_memory import free_memory
from rootstock_llm.services.worker.exec.pools.kv_pool import Arrivals
from rootstock_llm.services.worker.exec.streams.cuda_streams import Streams
from rootstock_llm.services.worker.exec.tiers.block_log import BlockLog
from rootstock_llm.services.worker.exec.tiers.page_copier import PageCopier
from rootstock_llm.services.worker.exec.tiers.page_mover import PageMover

logger = logging.getLogger(__name__)
PATTERN = 251  # period of the bytes of the test page; a prime, so that the parts of a page differ
MOST_FREE = 0.8  # largest share that the host tier may take of the host memory that is free after the KV pool


class NotEnoughHostMemory(ValueError):
    """Raised if the host does not have the memory for one page of the host tier, or for its requested size."""


def host_pages(options: TierOptions, pool_pages: int, page_bytes: int, free_bytes: int, pool_bytes: int = 0) -> int:
    """Returns the number of pages of the host tier.

    Args:
        options: requested sizes.
        pool_pages: size of the pool, units included, in pages.
        page_bytes: bytes of a page.
        free_bytes: free host memory. If the pool is in host memory, its bytes count as free here.
        pool_bytes: bytes of the pool if it is in host memory, otherwise 0.

    Raises:
        NotEnoughHostMemory: the memory cannot hold a page, or the requested size.
    """
    available = max(0, free_bytes - pool_bytes)
    if options.host_bytes:
        most = int(available * MOST_FREE)
        if options.host_bytes > most:
            remedy = f"Set hicache_size to {most // 10**9} or less" if most >= 10**9 else "Turn enable_hierarchical_cache off"
            raise NotEnoughHostMemory(
                f"hicache_size is {options.host_bytes >> 20} MiB; {available >> 20} MiB are free after the KV pool, and the"
                f" host tier may use {most >> 20} MiB of them. {remedy}"
            )
        pages = options.host_bytes // page_bytes
    else:
        most = min(int(free_bytes * options.host_share), int(available * MOST_FREE))
        pages = min(int(options.host_ratio * pool_pages), most // page_bytes)
    if pages < 1:
        raise NotEnoughHostMemory(
            f"the host tier cannot hold a page of {page_bytes} bytes: only {free_bytes >> 20} MiB of host memory are free"
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
    """Returns the page mover, and the number of pages of the host tier.

    Args:
        options: options of host and storage tier, None for no tiers.
        pool_pages: size of the pool, units included, in pages.
        copier: returns a copier of the present pools.
        arrivals: layer-wise loads into the pools.
        layout: see LoadedInfo.kv_layout.
        streams: streams of the executor.
        progress: called with lines about the tiers for the log.
        peers: reader of remote workers' pages, None for no reader.

    Raises:
        ValueError: the host has too little memory, or a setting is wrong.
    """
    page_bytes = copier().page_bytes
    if options is None:
        return PageMover(streams, copier, arrivals, torch.empty((0, page_bytes), dtype=torch.uint8), None, peers), 0
    on_host = streams.device.type == "cpu"  # the memory of the pool then counts as free until its pages are written
    free = free_memory()
    pages = host_pages(options, pool_pages, page_bytes, free, pool_pages * page_bytes if on_host else 0)
    is_cut = not options.host_bytes and pages < int(options.host_ratio * pool_pages)
    why = f"; hicache_ratio uses at most {options.host_share:.0%} of it, hicache_size can use more" if is_cut else ""
    progress(f"host tier: {pages * page_bytes >> 20} MiB in {pages} pages, of {free >> 20} MiB of free memory{why}")
    memory = host_slab(pages, page_bytes)
    store = None if options.open_storage is None else options.open_storage(page_bytes, _identity(options, layout))
    log = None
    if store is not None:
        progress(f"storage tier: found {store.counts().pages} pages")
        if options.names_file is not None:
            log = BlockLog(options.names_file, _identity(options, layout), store.keys)
    unpin = None if on_host else _pinned(memory)
    by_layers = can_load_by_layers(copier(), memory)
    if not by_layers:
        progress("host tier: pages are loaded as a whole, not layer by layer")
    return PageMover(streams, copier, arrivals, memory, store, peers, log, unpin, by_layers), pages


def can_load_by_layers(copier: PageCopier, memory: torch.Tensor) -> bool:
    """Tests with page 0 whether pages can be loaded layer by layer, which compiles the kernel for it.

    A GPU must be able to read host memory in place. The page has its old content afterwards.

    Args:
        copier: copier of the pools.
        memory: uint8[n, page bytes] of the host tier, not in use yet.
    """
    if not copier.can_load_groups:
        return False
    row, page = memory[0], np.zeros(1, dtype=np.int32)
    found, before = torch.empty_like(row), torch.empty_like(row)
    with torch.inference_mode():
        copier.save(page, [before])
        row.copy_(torch.arange(len(row)) % PATTERN)
        try:
            load_group = copier.group_loader(memory, page, page)
            for group in range(len(copier.groups.layers)):
                load_group(group)
            copier.save(page, [found])
            copier.synchronize()
            is_equal = found.equal(row)
        except Exception:  # an error of any type, such as of a compiler or driver; whole pages are copied without the kernel
            logger.exception("could not load a page layer by layer")
            is_equal = False
        row.copy_(before)
        copier.restore([row], page)
        copier.synchronize()
    return is_equal


def host_slab(pages: int, page_bytes: int) -> torch.Tensor:
    """Returns uint8[pages, page_bytes] of host memory, in huge pages if the system has them.

    A byte of each system page is written here, so that the system allocates the memory now. Otherwise, the first copy to each
    page would be several times slower.
    """
    mapped = mmap.mmap(-1, pages * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # referenced by the tensor
    with suppress(OSError):  # the system has no huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    memory[:: mmap.PAGESIZE] = 0
    return memory.view(pages, page_bytes)


def _pinned(memory: torch.Tensor) -> Callable[[], None]:
    """Pins existing memory, because torch would round the size of pinned memory up to a power of two.

    Returns:
        A function that ends the pinning. It must be called before the memory is freed. Otherwise, memory that is later allocated
        at the same addresses could not be pinned.

    Raises:
        NotEnoughHostMemory: CUDA cannot pin the memory.
    """
    cudart = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error != 0:
        raise NotEnoughHostMemory(f"a host tier of {memory.nbytes >> 20} MiB cannot be pinned (CUDA error {error})")
    return partial(_unpin, memory.data_ptr())


def _unpin(address: int) -> None:
    error = int(torch.cuda.cudart().cudaHostUnregister(address))
    if error != 0:
        logger.error("could not unpin the memory of the host tier", extra=fields(error=error))


def _identity(options: TierOptions, layout: str) -> bytes:
    """Returns the identity of a store: a digest of KV layout and secret.

    Pages of another identity cannot be used. A file store deletes them when it is opened.
    """
    return blake2b(layout.encode(), key=options.secret, digest_size=32).digest()
