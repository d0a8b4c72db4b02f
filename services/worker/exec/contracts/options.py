"""Options of an executor on a device. The worker's settings of the same names describe their effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.exec.contracts.page_store import PageStore
from rootstock_llm.services.worker.exec.contracts.peer_pages import KvServer, PeerReader, ReadPages

NONE, NGRAM, DRAFT, EAGLE3, MTP = "none", "ngram", "draft", "eagle3", "mtp"  # values of DeviceOptions.speculative_algorithm


OpenStore = Callable[[int, bytes], PageStore | None]
"""Opens the storage tier.

The arguments are the bytes of a page and the identity of the store: a digest of KV layout and secret, 32 bytes. Returns None if
the disk cannot be used. Raises ValueError for wrong settings."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Options of the tiers below the device's KV pool."""

    host_ratio: float  # size of the host tier as a multiple of the pool; used if host_bytes is 0
    host_bytes: int  # size of the host tier; 0: host_ratio decides, limited by host_share
    open_storage: OpenStore | None  # opens the storage tier, None for no storage tier
    secret: bytes = field(repr=False)  # secret of the page keys, see PageKeys
    names_file: Path | None = None  # file with the names of stored blocks for the prefix index, None for no file
    host_share: float = 0.25  # largest part of the free host memory that host_ratio may take


OpenServer = Callable[[bytes, int, ReadPages, Sequence[int]], KvServer]
"""Opens the server of this worker's KV reservations.

The arguments are the KV layout, the bytes of a page, the function that reads pages of the pool, and for each cache group the
number of pages that a unit takes. Raises ValueError if the server cannot be opened with the worker's settings."""
OpenReader = Callable[[bytes, int], PeerReader]
"""Opens the reader of remote workers' pages. The arguments are the KV layout and the bytes of a page."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Options of KV transfers between workers. Exactly one field is not None."""

    open_server: OpenServer | None = None  # set on a prefill worker, whose pages remote workers read
    open_reader: OpenReader | None = None  # set on a decode worker, which reads pages of remote workers


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Options of an executor on a GPU or a CPU."""

    device: str = "cuda:0"  # torch's name of the device
    num_threads: int = 1  # threads with which a CPU computes
    attention_backend: str = "auto"  # see choose_attention()
    kernels: str = "auto"  # auto (triton on a GPU, cpp on a CPU), triton, cpp or torch
    cuda_graphs: bool = True  # whether decode steps are captured as CUDA graphs
    max_graph_rows: int = 256  # rows of the largest graph
    max_tokens: int = 8192  # tokens of one forward pass; a larger step is computed in pieces
    max_whole_tokens: int = 0  # tokens of one forward pass of an encoder, whose prompts are never cut; 0 for max_tokens
    load_threads: int = 8  # threads that read weights for a GPU
    quantization: str = "auto"  # this and the next: see QuantizationOptions
    quantize_head: bool = False
    deterministic: bool = False  # whether the bits of a row's result must not depend on the other rows
    max_drafts: int = 0  # largest number of draft tokens in a decode row
    speculative_algorithm: str = NGRAM  # NONE, NGRAM, DRAFT, EAGLE3 or MTP; ignored if max_drafts is 0
    draft_model: str = ""  # folder of the draft model or head; empty if the target's folder has the head (MTP)
    # int32[n], token ids of texts, separated by BETWEEN_TEXTS. The n-gram drafter searches them if the request's own text has no
    # match. The executor owns the array and changes it in place.
    draft_corpus: NDArray[np.int32] | None = field(default=None, repr=False, compare=False)
    max_chunk: int = 0  # largest number of tokens of a chunk of a prompt; 0: the context
    swa_full_tokens_ratio: float = 0.8  # this and the next two: see CacheShape
    mamba_full_memory_ratio: float = 2.0
    max_mamba_cache_size: int = 0
    tiers: TierOptions | None = None  # tiers below the device's KV pool, None for none
    peers: PeerOptions | None = None  # KV transfers between workers, None for none
