"""Every number that the scheduler's decisions depend on. Resolved before the core is made; some may be retuned while it runs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from services.worker.core.contracts.graph_limits import GraphLimits


class SchedulePolicy(enum.StrEnum):
    """The order of the waiting queue (reference 2 §6; named as SGLang's --schedule-policy)."""

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


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Lengths and budgets are in tokens, pool sizes in pages, times in seconds; 0 switches a limit off where it says so.

    bos_token_id: what a tokenizer puts before a text, dropped where a session's turn goes on behind another (-1: none).
    chunked_prefill_size: 0 means that prompts are never cut. adaptive_chunk_rows: decode rows at which chunks are half as
    long (0: never shorter). max_extend_steps: extend steps in a row while decode rows wait (0: any number).
    prefill_max_requests: extend rows of one step (0: any number). max_prompt_logprob_tokens: prompt tokens of one step
    whose logprobs may be computed, which bounds their memory.
    whole_prompts: the model computes each prompt in one row of one step; nothing that cuts one may be switched on.
    priority_preemption_threshold: a waiting request displaces running ones whose priority is worse by more than this.
    pooling_reuses_prefix: a vector may be computed from the tokens after a cached prefix alone (last-token pooling).
    graph_rows, graph_rereads, eager_step_cost: of the executor, see GraphLimits.
    retract_interval: test hook, retracts one request every so many decode steps (0: never). waiting_timeout_s,
    running_timeout_s: from arrival, and from first admission (0: none). session_capacity, session_ttl_s: defaults for
    sessions that name none. random_seed: of the random policy.
    """

    num_pages: int
    page_size: int
    context_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int = -1
    max_running_requests: int = 256
    max_queued_requests: int = 4096
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int = 8192
    adaptive_chunk_rows: int = 64
    max_extend_steps: int = 0
    prefill_max_requests: int = 0
    max_prompt_logprob_tokens: int = 4096
    enable_mixed_chunk: bool = False
    whole_prompts: bool = False
    enable_radix_cache: bool = True
    eviction_policy: EvictionPolicy = EvictionPolicy.LRU
    schedule_policy: SchedulePolicy = SchedulePolicy.FCFS
    lpm_fallback_threshold: int = 128
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    priority_preemption_threshold: int = 0
    schedule_conservativeness: float = 1.0
    pooling_reuses_prefix: bool = True
    max_sessions: int = 1024
    session_capacity: int = 1 << 20
    session_ttl_s: float = 600.0
    waiting_timeout_s: float = 0.0
    running_timeout_s: float = 0.0
    graph_rows: int = 0
    graph_rereads: int = 0
    eager_step_cost: float = 0.0
    retract_interval: int = 0
    random_seed: int = 0

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.num_pages < 1 or self.max_running_requests < 1:
            raise ValueError("page_size, num_pages and max_running_requests are at least 1")
        if 0 < self.chunked_prefill_size < self.page_size:
            raise ValueError(f"chunked_prefill_size {self.chunked_prefill_size} is below page_size {self.page_size}")
        if self.max_prefill_tokens < self.page_size:
            raise ValueError(f"max_prefill_tokens {self.max_prefill_tokens} is below page_size {self.page_size}")
        if self.max_prompt_logprob_tokens < self.page_size:
            raise ValueError(f"max_prompt_logprob_tokens {self.max_prompt_logprob_tokens} is below page_size {self.page_size}")
        if self.context_len < 2:
            raise ValueError("context_len is at least 2: one token in, one out")
        if min(self.graph_rows, self.graph_rereads, self.eager_step_cost) < 0:
            raise ValueError("graph_rows, graph_rereads and eager_step_cost are not negative")

    @property
    def max_pages_per_request(self) -> int:
        return -(-self.context_len // self.page_size)

    @property
    def graphs(self) -> GraphLimits:
        return GraphLimits(self.graph_rows, self.graph_rereads, self.eager_step_cost)

    def rank(self, priority: int) -> int:
        """Lower is served first. All are equal without priority scheduling."""
        if not self.enable_priority_scheduling:
            return 0
        return priority if self.schedule_low_priority_values_first else -priority
