"""How an executor for a device is made; see the worker's settings of the same names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.worker.exec.contracts.page_store import PageStore
from services.worker.exec.contracts.peer_pages import PeerReader, ReadPages, RoomServer

NONE, NGRAM, DRAFT, EAGLE3, MTP = "none", "ngram", "draft", "eagle3", "mtp"  # who drafts


OpenStore = Callable[[int, bytes], PageStore | None]
"""(bytes of a page, identity: 32 bytes, of layout and secret) -> the storage; None if its disk does not serve.
Raises ValueError."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Of KV that leaves the pool. host_bytes: of the host's memory; 0: host_ratio times the pool's, at most host_share of what
    is free. open_storage: of the tier
    below it, None for none. secret: of the keys, see PageKeys. names_file: where the names of its blocks are kept, for the prefix
    index; None: nowhere."""

    host_ratio: float
    host_bytes: int
    open_storage: OpenStore | None
    secret: bytes = field(repr=False)
    names_file: Path | None = None
    host_share: float = 0.25


OpenServer = Callable[[bytes, int, ReadPages], RoomServer]
"""(layout, bytes of a page, what reads them) -> what lets others read this worker's rooms. Raises ValueError."""
OpenReader = Callable[[bytes, int], PeerReader]
"""(layout, bytes of a page) -> what reads from other workers."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Of KV that goes from worker to worker: one of the two."""

    open_server: OpenServer | None = None
    open_reader: OpenReader | None = None


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """device: as torch names it. num_threads: that a CPU computes with. kernels: auto (triton on a GPU, cpp on a CPU), triton,
    cpp or torch. cuda_graphs: capture decode steps, up to max_graph_rows rows. max_tokens: of one step; a larger one is
    computed in pieces. max_whole_tokens: the same of a model whose prompts are not cut; 0: max_tokens. load_threads: that read
    weights for a GPU. deterministic: what a row gives is a function of that row alone, to the last bit. max_drafts: tokens of
    a decode row that are guessed and verified beside the one that it computes anyway. speculative_algorithm:
    who guesses, if there are any. draft_model: folder of a model or head that does, where it is not the target's own.
    draft_corpus: int32[n], texts in which n-grams are sought where a request's own have none, with BETWEEN_TEXTS among them; the
    executor's to change.
    tiers: of KV below the device's pool; None: there are none. peers: other workers that read KV here, or whose KV is read;
    None: there are none."""

    device: str = "cuda:0"
    num_threads: int = 1
    attention_backend: str = "auto"
    kernels: str = "auto"
    cuda_graphs: bool = True
    max_graph_rows: int = 256
    max_tokens: int = 8192
    max_whole_tokens: int = 0
    load_threads: int = 8
    deterministic: bool = False
    max_drafts: int = 0
    speculative_algorithm: str = NGRAM
    draft_model: str = ""
    draft_corpus: NDArray[np.int32] | None = field(default=None, repr=False, compare=False)
    tiers: TierOptions | None = None
    peers: PeerOptions | None = None
