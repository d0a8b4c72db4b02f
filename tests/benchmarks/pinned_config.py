"""A scheduler configuration that does not follow the worker's defaults, so that figures stay comparable over years.

This module imports no settings, because GPU machines may lack the dependencies of the settings modules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rootstock_llm.services.worker.core.contracts.config import EvictionPolicy, SchedulePolicy, SchedulerConfig
from rootstock_llm.services.worker.core.contracts.transfers import WritePolicy

PINNED = SchedulerConfig(
    num_pages=1,
    page_size=1,
    context_len=2,
    vocab_size=1,
    eos_token_ids=(),
    bos_token_id=-1,
    max_running_requests=256,
    max_queued_requests=4096,
    max_prefill_tokens=16384,
    chunked_prefill_size=8192,
    adaptive_chunk_rows=64,
    adaptive_chunk_s=0.0,
    max_extend_steps=0,
    prefill_max_requests=0,
    max_prompt_logprob_tokens=4096,
    enable_mixed_chunk=False,
    whole_prompts=False,
    enable_radix_cache=True,
    eviction_policy=EvictionPolicy.LRU,
    schedule_policy=SchedulePolicy.FCFS,
    lpm_fallback_threshold=128,
    enable_priority_scheduling=False,
    schedule_low_priority_values_first=False,
    priority_preemption_threshold=0,
    schedule_conservativeness=1.0,
    pooling_reuses_prefix=True,
    max_sessions=1024,
    session_capacity=1 << 20,
    session_ttl_s=600.0,
    waiting_timeout_s=0.0,
    running_timeout_s=0.0,
    graph_rows=0,
    graph_rereads=0,
    eager_step_cost=0.0,
    max_drafts=0,
    speculative_adaptive=True,
    drafts_by_model=False,
    host_pages=0,
    has_storage=False,
    page_bytes=0,
    hicache_write_policy=WritePolicy.WRITE_BACK,
    hicache_salt_quota=0.0,
    hicache_storage_salt_quota=0.0,
    reads_peers=False,
    disaggregation_hold_s=10.0,
    retract_interval=0,
    random_seed=0,
    groups=(),
    state_interval=1,
    experts=None,
)


def pinned_config(num_pages: int, page_size: int, context_len: int, vocab_size: int, **given: Any) -> SchedulerConfig:
    """Returns the pinned configuration with these values. `given` overrides further fields of SchedulerConfig."""
    return replace(PINNED, num_pages=num_pages, page_size=page_size, context_len=context_len, vocab_size=vocab_size, **given)
