"""The configuration of the scheduler's decisions. control.py lists the settings that may change at run time."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rootstock_llm.services.worker.core.contracts.cache_groups import (
    CacheGroup,
    CacheKind,
    draft_window_tokens,
    states_per_slot,
    window_pages,
)
from rootstock_llm.services.worker.core.contracts.experts import ExpertShape
from rootstock_llm.services.worker.core.contracts.graph_limits import GraphLimits
from rootstock_llm.services.worker.core.contracts.transfers import WritePolicy

GB = 10**9
UNCHUNKED = -1  # SGLang's chunked_prefill_size for prompts that are never cut into chunks; SchedulerConfig has 0 in its place


class SchedulePolicy(enum.StrEnum):
    """The order of the waiting queue (docs/design/scheduler.md#policies; named as SGLang's --schedule-policy)."""

    FCFS = "fcfs"
    LPM = "lpm"  # longest prefix match
    DFS_WEIGHT = "dfs-weight"
    LOF = "lof"  # longest output first
    RANDOM = "random"
    ROUTING_KEY = "routing-key"


class EvictionPolicy(enum.StrEnum):
    """The order in which unlocked leaves of the radix tree are evicted."""

    LRU = "lru"
    LFU = "lfu"
    FIFO = "fifo"
    PRIORITY = "priority"  # lowest request priority first, then least recently used


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Configuration of one scheduler. Lengths and budgets are in tokens, pool sizes in pages, times in seconds.

    No field has a default. services/worker/scheduler_config.py makes the configuration of a worker.
    """

    num_pages: int
    page_size: int
    context_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int  # beginning-of-sequence token, removed from the second and later turns of a session; -1: none
    max_running_requests: int
    max_queued_requests: int
    max_prefill_tokens: int
    chunked_prefill_size: int  # 0: prompts are never cut
    adaptive_chunk_rows: int  # number of decode rows at which the chunk size is halved; 0: the chunk size is constant
    # Target in seconds for the time between two decode steps while prompts are computed, see ChunkPace. 0: no target.
    adaptive_chunk_s: float
    # Largest number of consecutive extend steps while decode rows wait. 0: only adaptive_chunk_s limits them.
    max_extend_steps: int
    prefill_max_requests: int  # largest number of extend rows in one step; 0: no limit
    # Largest number of prompt tokens whose logprobs one step computes. It limits the memory for these logprobs.
    max_prompt_logprob_tokens: int
    enable_mixed_chunk: bool
    whole_prompts: bool  # whether the model needs each prompt in one row of one step, so that no setting may cut prompts
    enable_radix_cache: bool
    eviction_policy: EvictionPolicy
    schedule_policy: SchedulePolicy
    lpm_fallback_threshold: int  # number of waiting requests above which the policy `lpm` works like `fcfs`
    enable_priority_scheduling: bool
    schedule_low_priority_values_first: bool
    # A waiting request may displace a running request that is less urgent by more than this difference of priorities.
    priority_preemption_threshold: int
    schedule_conservativeness: float  # factor by which the initial new-token ratio is multiplied, see NewTokenRatio
    # Whether an embedding can be computed from the tokens after a cached prefix, as with last-token pooling.
    pooling_reuses_prefix: bool
    max_sessions: int
    session_capacity: int  # default capacity and largest capacity of a session in tokens
    session_ttl_s: float  # default lifetime of a session after its last turn
    waiting_timeout_s: float  # time limit from arrival to the first admission, unless the request has given output; 0: no limit
    running_timeout_s: float  # time limit from a request's first admission to its end; 0: no limit
    graph_rows: int  # number of rows of the executor's largest CUDA graph, see GraphLimits.rows
    graph_rereads: int  # see GraphLimits.rereads
    eager_step_cost: float  # see GraphLimits.eager_cost
    max_drafts: int  # largest number of draft tokens of a decode row; 0: the executor has no drafter
    # Whether the scheduler chooses the number of draft tokens by measured throughput. If not, each row gets max_drafts.
    speculative_adaptive: bool
    # Whether a draft model proposes the draft tokens. It must compute every token of the requests that get draft tokens.
    drafts_by_model: bool
    host_pages: int  # number of pages of the tier in host memory; 0: the worker has neither a host tier nor a storage tier
    has_storage: bool  # whether a storage tier is below the host tier
    page_bytes: int  # bytes of one page's KV
    hicache_write_policy: WritePolicy
    hicache_salt_quota: float  # GB of the host tier for one cache salt; 0: no limit
    hicache_storage_salt_quota: float  # GB of the storage tier for one cache salt; 0: no limit
    reads_peers: bool  # whether requests may name a KV source in another worker
    disaggregation_hold_s: float  # time limit of KV reservations, and of prefetched pages whose request does not arrive
    retract_interval: int  # for tests: number of decode steps after which one request is retracted; 0: never
    random_seed: int  # seed of the policy `random`
    groups: tuple[CacheGroup, ...]  # caches beside the keys and values of every token, at most one of each kind
    state_interval: int  # smallest distance in tokens between two chunk ends whose units are kept for prefix hits
    experts: ExpertShape | None  # experts whose rows the executor can count; None: the model has no experts

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.num_pages < 1 or self.max_running_requests < 1:
            raise ValueError("page_size, num_pages and max_running_requests must be at least 1")
        if self.chunked_prefill_size and self.chunked_prefill_size < self.page_size:
            raise ValueError(f"chunked_prefill_size {self.chunked_prefill_size} is below page_size {self.page_size}")
        if self.max_prefill_tokens < self.page_size:
            raise ValueError(f"max_prefill_tokens {self.max_prefill_tokens} is below page_size {self.page_size}")
        if self.max_prompt_logprob_tokens < self.page_size:
            raise ValueError(f"max_prompt_logprob_tokens {self.max_prompt_logprob_tokens} is below page_size {self.page_size}")
        if self.context_len < 2:
            raise ValueError(
                f"context_len is {self.context_len}; it must be at least 2, for one prompt token and one output token"
            )
        if min(self.graph_rows, self.graph_rereads, self.eager_step_cost) < 0:
            raise ValueError("graph_rows, graph_rereads and eager_step_cost must not be negative")
        for quota in (self.hicache_salt_quota, self.hicache_storage_salt_quota):
            if quota and self.page_bytes and not self.pages_within(quota):
                raise ValueError(f"the salt quota of {quota} GB is smaller than one page of {self.page_bytes} bytes")
        if (self.host_pages or self.reads_peers) and any(not group.unit_bytes for group in self.groups):
            raise ValueError("tiers and remote workers need the bytes of the units of cache groups")
        if (self.host_pages or self.reads_peers) and self.groups and not self.page_bytes:
            raise ValueError("tiers and remote workers need a layer with full attention, whose KV is in pages")
        if self.groups and self.state_interval < self.page_size:
            raise ValueError(f"state_interval {self.state_interval} is below page_size {self.page_size}")
        for group in self.groups:
            least = states_per_slot(self.max_drafts) * self.max_running_requests
            if group.kind is CacheKind.WINDOW:
                tokens = group.window + max(self.max_chunk, draft_window_tokens(self.max_drafts))
                least = window_pages(tokens, self.page_size, self.max_pages_per_request)
            if group.num_units < least:
                raise ValueError(f"the group {group.kind} has {group.num_units} units; it needs at least {least}")
        if self.max_drafts < 0:
            raise ValueError(f"max_drafts is {self.max_drafts}; it must not be negative")

    @property
    def max_chunk(self) -> int:
        """Largest number of tokens of a chunk."""
        size = self.chunked_prefill_size or self.context_len
        return min(
            max(min(size, self.max_prefill_tokens) if self.chunked_prefill_size else size, self.page_size), self.context_len
        )

    @property
    def max_pages_per_request(self) -> int:
        return -(-self.context_len // self.page_size)

    def pages_within(self, gb: float) -> int:
        return round(gb * GB) // max(self.page_bytes, 1)

    @property
    def graphs(self) -> GraphLimits:
        return GraphLimits(self.graph_rows, self.graph_rereads, self.eager_step_cost)

    def rank(self, priority: int) -> int:
        """Returns the rank of a priority. Lower ranks are served first; all are 0 without priority scheduling."""
        if not self.enable_priority_scheduling:
            return 0
        return priority if self.schedule_low_priority_values_first else -priority
