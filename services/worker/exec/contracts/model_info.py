"""What the rest of the worker may know of a loaded model. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadedInfo:
    """context_len: tokens, prompt and output together. dtype: of weights and KV. weight_bytes: resident, packed copies
    included. kv_bytes_per_token: over all layers, keys and values. The KV pool holds num_pages * page_size tokens.

    generates: has a vocabulary projection, so that tokens can be sampled. embedding_size: numbers in an embedding, 0 where
    the model gives none. needs_whole_prompt: every prompt has to be one row of one step, without a cached prefix (encoders).
    pooling_reuses_prefix: an embedding may start behind a cached prefix (last-token pooling); if not, all of its prompt is
    computed, though it may be cut into chunks. load_seconds: (phase, seconds) as LoadPhases has them. graph_rows: numbers of
    rows that decode graphs are captured for, rising. graph_rereads, eager_step_cost: see GraphLimits. max_drafts: tokens that are
    drafted and verified in a row of a decode step, 0 where nothing drafts; drafts_by_model: a model does, which computes
    something of every token. numerics: a fingerprint of all that decides a result's bits beside its weights; "" where these
    are no function of the row alone. host_pages: of the host tier, 0 where there is none; has_storage: whether there is one
    below it.
    kv_layout: all that two workers' pages have to agree in to be exchangeable. reads_peers: it reads KV from other workers.
    kv_port: at which others read its own; 0: nowhere.
    """

    architecture: str
    context_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # as an executor makes it, of the config alone; engine.py adds those of other files
    num_pages: int
    page_size: int
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    generates: bool = True
    embedding_size: int = 0
    needs_whole_prompt: bool = False
    pooling_reuses_prefix: bool = True
    load_seconds: tuple[tuple[str, float], ...] = ()
    graph_rows: tuple[int, ...] = ()
    graph_rereads: int = 0
    eager_step_cost: float = 0.0
    numerics: str = ""
    max_drafts: int = 0
    drafts_by_model: bool = False
    host_pages: int = 0
    has_storage: bool = False
    kv_layout: str = ""
    reads_peers: bool = False
    kv_port: int = 0

    @property
    def page_bytes(self) -> int:
        """Of the KV of one page, over all layers."""
        return self.kv_bytes_per_token * self.page_size
