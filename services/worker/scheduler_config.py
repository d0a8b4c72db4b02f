"""Builds the configuration of a worker's core from the settings and the loaded model.

The simulators use the same function, so that they behave like a worker with the same settings.
"""

from __future__ import annotations

from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.exec.contracts.model_info import LoadedInfo
from rootstock_llm.services.worker.settings import BY_DEVICE, WorkerSettings

RANDOM_SEED = 0  # seed of schedule_policy `random`; equal in all workers, so that equal requests give an equal order


def scheduler_config(settings: WorkerSettings, info: LoadedInfo, bos_token_id: int) -> SchedulerConfig:
    """Returns the configuration of the core.

    Args:
        settings: settings from device_limits.resolved().
        bos_token_id: the only token that the tokenizer puts before a text; -1 if it puts no token or several tokens.

    Raises:
        ValueError: settings contradict each other.
    """
    assert settings.max_running_requests != BY_DEVICE, "settings come from device_limits.resolved()"
    assert settings.chunked_prefill_size is not None, "settings come from device_limits.resolved()"
    assert settings.enable_mixed_chunk is not None, "settings come from device_limits.resolved()"
    whole = info.needs_whole_prompt  # whether the model must compute a prompt in one step, without chunks and cached prefixes
    return SchedulerConfig(
        num_pages=info.num_pages,
        page_size=info.page_size,
        context_len=info.context_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        bos_token_id=bos_token_id,
        max_running_requests=settings.max_running_requests,
        max_queued_requests=settings.max_queued_requests,
        max_prefill_tokens=max(settings.max_prefill_tokens, info.context_len) if whole else settings.max_prefill_tokens,
        chunked_prefill_size=0 if whole else settings.chunked_prefill_size,
        adaptive_chunk_rows=settings.adaptive_chunk_rows,
        adaptive_chunk_s=settings.adaptive_chunk_s,
        max_extend_steps=settings.max_extend_steps,
        prefill_max_requests=settings.prefill_max_requests,
        max_prompt_logprob_tokens=settings.max_prompt_logprob_tokens,
        enable_mixed_chunk=settings.enable_mixed_chunk and not whole,
        whole_prompts=whole,
        enable_radix_cache=settings.enable_radix_cache and not whole,
        eviction_policy=settings.eviction_policy,
        schedule_policy=settings.schedule_policy,
        lpm_fallback_threshold=settings.lpm_fallback_threshold,
        enable_priority_scheduling=settings.enable_priority_scheduling,
        schedule_low_priority_values_first=settings.schedule_low_priority_values_first,
        priority_preemption_threshold=settings.priority_preemption_threshold,
        schedule_conservativeness=settings.schedule_conservativeness,
        pooling_reuses_prefix=info.pooling_reuses_prefix,
        max_sessions=settings.max_sessions,
        session_capacity=settings.session_capacity,
        session_ttl_s=settings.session_ttl_s,
        waiting_timeout_s=settings.waiting_timeout_s,
        running_timeout_s=settings.running_timeout_s,
        graph_rows=max(info.graph_rows, default=0),
        graph_rereads=info.graph_rereads,
        eager_step_cost=info.eager_step_cost,
        max_drafts=info.max_drafts,
        speculative_adaptive=settings.speculative_adaptive,
        drafts_by_model=info.drafts_by_model,
        host_pages=info.host_pages,
        has_storage=info.has_storage,
        page_bytes=info.page_bytes,
        hicache_write_policy=settings.hicache_write_policy,
        hicache_salt_quota=settings.hicache_salt_quota,
        hicache_storage_salt_quota=settings.hicache_storage_salt_quota,
        reads_peers=info.reads_peers,
        disaggregation_hold_s=settings.disaggregation_hold_s,
        retract_interval=settings.retract_interval,
        random_seed=RANDOM_SEED,
        groups=info.groups,
        state_interval=max(settings.state_interval, info.page_size),
        experts=info.experts,
    )
