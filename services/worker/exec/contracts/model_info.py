"""Describes a loaded model to the rest of the worker. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rootstock_llm.services.worker.core.contracts.cache_groups import CacheGroup
from rootstock_llm.services.worker.core.contracts.experts import ExpertShape


@dataclass(frozen=True, slots=True)
class LoadedInfo:
    """A loaded model and the sizes with which its executor runs."""

    architecture: str
    context_len: int  # tokens, prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # EOS tokens of config.json; engine.py adds the EOS tokens of other files
    num_pages: int  # pages of the KV pool, which has num_pages * page_size tokens
    page_size: int  # tokens
    dtype: str  # dtype of weights and KV
    weight_bytes: int  # bytes of the weights in the device's memory, packed copies included
    kv_bytes_per_token: int  # bytes of a token's keys and values over all layers whose KV is in pages
    pool_bytes: int = 0  # bytes of all pages and of all units of cache groups
    generates: bool = True  # whether the model has a vocabulary projection, without which no token can be sampled
    embedding_size: int = 0  # dimensions of an embedding; 0 if the model computes no embeddings
    needs_whole_prompt: bool = False  # each prompt must be one row of one step, without a cached prefix (encoders)
    # an embedding may use a cached prefix (last-token pooling); otherwise the whole prompt is computed, in chunks if needed
    pooling_reuses_prefix: bool = True
    load_seconds: tuple[tuple[str, float], ...] = ()  # (phase, seconds) pairs of LoadPhases
    graph_rows: tuple[int, ...] = ()  # numbers of rows for which decode graphs are captured, rising
    graph_rereads: int = 0  # tokens of KV that a graph may read again, see GraphLimits.rereads
    eager_step_cost: float = 0.0  # extra time of a step without a graph, in multiples of a replayed step's time (GraphLimits)
    # fingerprint of everything that determines a result's bits, except the weights; "" if a row's bits depend on its batch
    numerics: str = ""
    max_drafts: int = 0  # largest number of draft tokens in a decode row; 0 without a drafter
    drafts_by_model: bool = False  # whether a draft model drafts; it computes an entry for every token, prompt tokens included
    host_pages: int = 0  # pages of the host tier; 0 if there is no host tier
    has_storage: bool = False  # there is a storage tier below the host tier
    kv_layout: str = ""  # content and numerics of a page; two workers can exchange pages only if their layouts are equal
    reads_peers: bool = False  # the worker reads KV from remote workers
    groups: tuple[CacheGroup, ...] = ()  # cache groups of windowed and recurrent layers; empty if all KV is in pages
    window_bytes: int = 0  # bytes of a unit of the WINDOW group
    state_bytes: int = 0  # bytes of a unit of the STATE group
    max_running_requests: int = 0  # largest number of running requests, by slots and by units of the STATE group; 0: no limit
    experts: ExpertShape | None = None  # experts whose rows the executor can count; None: the model has no experts
    quantization: str = ""  # see Quantization.__str__
    kv_port: int = 0  # port at which remote workers read this worker's KV; 0 if they cannot

    @property
    def page_bytes(self) -> int:
        """Bytes of the KV of one page."""
        return self.kv_bytes_per_token * self.page_size
