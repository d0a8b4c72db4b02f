"""Every number that the scheduler's decisions depend on. Resolved before the core is made; some may be retuned while it runs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from services.worker.core.contracts.graph_limits import GraphLimits
from services.worker.core.contracts.transfers import WritePolicy

GB = 10**9
UNCHUNKED = -1  # of the setting chunked_prefill_size, as 0: prompts are never cut


class SchedulePolicy(enum.StrEnum):
    """The order of the waiting queue (docs/design/scheduler.md#policies; named as SGLang's --schedule-policy)."""

    FCFS = "fcfs"
    LPM = "lpm"  # longest prefix match
    DFS_WEIGHT = "dfs-weight"
    LOF = "lof"  # longest output first
    RANDOM = "random"
    ROUTING_KEY = "routing-key"


class EvictionPolicy(enum.StrEnum):
    """Which unlocked leaf of the radix tree goes first."""

    LRU = "lru"
    LFU = "lfu"
    FIFO = "fifo"
    PRIORITY = "priority"  # lowest request priority first, then least recently used


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Lengths and budgets are in tokens, pool sizes in pages, times in seconds; 0 switches a limit off where it says so.
    No field has a default: whoever makes one says each (services/worker/scheduler_config.py for a worker).

    bos_token_id: what a tokenizer puts before a text, dropped where a session's turn goes on behind another (-1: none).
    chunked_prefill_size: 0 means that prompts are never cut. adaptive_chunk_rows: decode rows at which chunks are half as
    long (0: never shorter). adaptive_chunk_s: that decode rows are to wait for a step of theirs at most, see ChunkPace
    (0: as long as it takes). max_extend_steps: extend steps in a row while decode rows wait (0: any number in that time).
    prefill_max_requests: extend rows of one step (0: any number). max_prompt_logprob_tokens: prompt tokens of one step
    whose logprobs may be computed, which bounds their memory.
    whole_prompts: the model computes each prompt in one row of one step; nothing that cuts one may be switched on.
    priority_preemption_threshold: a waiting request displaces running ones whose priority is worse by more than this.
    pooling_reuses_prefix: a vector may be computed from the tokens after a cached prefix alone (last-token pooling).
    graph_rows, graph_rereads, eager_step_cost: of the executor, see GraphLimits. max_drafts: tokens that it drafts and verifies
    in a decode row beside the one it computes anyway, 0 for none; speculative_adaptive: as many as pay, and not always the most;
    drafts_by_model: it computes something of every token of whom it drafts for.
    host_pages: of the tier in host memory, 0 for no tiers; has_storage: there is one below it; page_bytes: of one page's KV;
    hicache_write_policy: see WritePolicy. hicache_salt_quota, hicache_storage_salt_quota: GB of the host tier, and of the one
    below it, that one salt may have, 0 for no limit. reads_peers: requests may come with a source of their KV in another worker.
    disaggregation_hold_s: that a room stands for such a reader, and that what was read ahead is kept.
    retract_interval: test hook, retracts one request every so many decode steps (0: never). waiting_timeout_s,
    running_timeout_s: from arrival, and from first admission (0: none). session_capacity, session_ttl_s: defaults for
    sessions that name none. random_seed: of the random policy.
    """

    num_pages: int
    page_size: int
    context_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int
    max_running_requests: int
    max_queued_requests: int
    max_prefill_tokens: int
    chunked_prefill_size: int
    adaptive_chunk_rows: int
    adaptive_chunk_s: float
    max_extend_steps: int
    prefill_max_requests: int
    max_prompt_logprob_tokens: int
    enable_mixed_chunk: bool
    whole_prompts: bool
    enable_radix_cache: bool
    eviction_policy: EvictionPolicy
    schedule_policy: SchedulePolicy
    lpm_fallback_threshold: int
    enable_priority_scheduling: bool
    schedule_low_priority_values_first: bool
    priority_preemption_threshold: int
    schedule_conservativeness: float
    pooling_reuses_prefix: bool
    max_sessions: int
    session_capacity: int
    session_ttl_s: float
    waiting_timeout_s: float
    running_timeout_s: float
    graph_rows: int
    graph_rereads: int
    eager_step_cost: float
    max_drafts: int
    speculative_adaptive: bool
    drafts_by_model: bool
    host_pages: int
    has_storage: bool
    page_bytes: int
    hicache_write_policy: WritePolicy
    hicache_salt_quota: float
    hicache_storage_salt_quota: float
    reads_peers: bool
    disaggregation_hold_s: float
    retract_interval: int
    random_seed: int

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.num_pages < 1 or self.max_running_requests < 1:
            raise ValueError("page_size, num_pages and max_running_requests are at least 1")
        if self.chunked_prefill_size and self.chunked_prefill_size < self.page_size:
            raise ValueError(f"chunked_prefill_size {self.chunked_prefill_size} is below page_size {self.page_size}")
        if self.max_prefill_tokens < self.page_size:
            raise ValueError(f"max_prefill_tokens {self.max_prefill_tokens} is below page_size {self.page_size}")
        if self.max_prompt_logprob_tokens < self.page_size:
            raise ValueError(f"max_prompt_logprob_tokens {self.max_prompt_logprob_tokens} is below page_size {self.page_size}")
        if self.context_len < 2:
            raise ValueError("context_len is at least 2: one token in, one out")
        if min(self.graph_rows, self.graph_rereads, self.eager_step_cost) < 0:
            raise ValueError("graph_rows, graph_rereads and eager_step_cost are not negative")
        for quota in (self.hicache_salt_quota, self.hicache_storage_salt_quota):
            if quota and self.page_bytes and not self.pages_within(quota):
                raise ValueError(f"a quota of {quota} GB for each salt has no room for a page of {self.page_bytes} bytes")
        if self.max_drafts < 0:
            raise ValueError("max_drafts is not negative")

    @property
    def max_pages_per_request(self) -> int:
        return -(-self.context_len // self.page_size)

    def pages_within(self, gb: float) -> int:
        return round(gb * GB) // max(self.page_bytes, 1)

    @property
    def graphs(self) -> GraphLimits:
        return GraphLimits(self.graph_rows, self.graph_rereads, self.eager_step_cost)

    def rank(self, priority: int) -> int:
        """Lower is served first. All are equal without priority scheduling."""
        if not self.enable_priority_scheduling:
            return 0
        return priority if self.schedule_low_priority_values_first else -priority
