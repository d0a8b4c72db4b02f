"""docs/reference/sglang-settings.md lists each setting that SGLang also has, and the reason of each difference."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rootstock_llm.services.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/sglang-settings.md").read_text()
# Names of SGLang's server arguments, from the page "Server Arguments" and the class ServerArgs.
NAMES = """
    model_path model tokenizer_path tokenizer_mode tokenizer_worker_num skip_tokenizer_init load_format model_loader_extra_config
    trust_remote_code context_length is_embedding enable_multimodal revision model_impl host port fastapi_root_path grpc_mode
    skip_server_warmup warmups nccl_port checkpoint_engine_wait_weights_before_ready dtype quantization quantization_param_path
    kv_cache_dtype enable_fp32_lm_head mem_fraction_static max_running_requests max_queued_requests max_total_tokens
    chunked_prefill_size prefill_max_requests enable_dynamic_chunking max_prefill_tokens schedule_policy
    enable_priority_scheduling disable_priority_preemption default_priority_value abort_on_priority_when_disabled
    schedule_low_priority_values_first priority_scheduling_preemption_threshold schedule_conservativeness page_size
    swa_full_tokens_ratio disable_hybrid_swa_memory radix_eviction_policy enable_prefill_delayer prefill_delayer_max_delay_passes
    device tensor_parallel_size tp_size pipeline_parallel_size pp_size pp_max_micro_batch_size stream_interval stream_output
    incremental_streaming_output random_seed constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
    watchdog_timeout soft_watchdog_timeout dist_timeout download_dir model_checksum base_gpu_id gpu_id_step sleep_on_idle
    log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target crash_dump_folder
    show_time_cost enable_metrics enable_mfu_metrics enable_metrics_for_all_schedulers bucket_time_to_first_token
    bucket_inter_token_latency bucket_e2e_request_latency collect_tokens_histogram gc_warning_threshold_secs decode_log_interval
    enable_request_time_stats_logging kv_events_config enable_trace otlp_traces_endpoint export_metrics_to_file api_key
    admin_api_key served_model_name weight_version chat_template hf_chat_template_name completion_template file_storage_path
    enable_cache_report reasoning_parser tool_call_parser tool_server sampling_defaults data_parallel_size dp_size
    load_balance_method dist_init_addr nnodes node_rank json_model_override_args preferred_sampling_params enable_lora
    enable_lora_overlap_loading max_lora_rank lora_target_modules lora_paths max_loras_per_batch max_loaded_loras
    lora_eviction_policy lora_backend max_lora_chunk_size attention_backend prefill_attention_backend decode_attention_backend
    sampling_backend grammar_backend mm_attention_backend speculative_algorithm speculative_draft_model_path
    speculative_draft_model_revision speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens
    speculative_accept_threshold_single speculative_accept_threshold_acc speculative_token_map speculative_attention_mode
    speculative_draft_attention_backend speculative_adaptive speculative_adaptive_config speculative_ngram_min_bfs_breadth
    speculative_ngram_max_bfs_breadth speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity
    speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens
    enable_multi_layer_eagle expert_parallel_size ep_size moe_a2a_backend moe_runner_backend enable_eplb
    max_mamba_cache_size mamba_full_memory_ratio mamba_ssm_dtype
    enable_hierarchical_cache hicache_ratio hicache_size hicache_write_policy
    hicache_io_backend hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy
    hicache_storage_backend_extra_config enable_lmcache cpu_offload_gb offload_group_size offload_mode
    multi_item_scoring_delimiter disable_radix_cache cuda_graph_max_bs cuda_graph_bs disable_cuda_graph
    disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc enable_nccl_nvls enable_symm_mem
    enable_tokenizer_batch_encode disable_outlines_disk_cache disable_custom_all_reduce disable_overlap_schedule
    enable_mixed_chunk enable_dp_attention enable_two_batch_overlap enable_single_batch_overlap enable_torch_compile
    disable_piecewise_cuda_graph torchao_config enable_nan_detection enable_p2p_check num_continuous_decode_steps
    delete_ckpt_after_loading enable_memory_saver enable_weights_cpu_backup allow_auto_truncate enable_custom_logit_processor
    enable_return_hidden_states enable_return_routed_experts scheduler_recv_interval numa_node enable_deterministic_inference
    enable_dynamic_batch_tokenizer disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port
    disaggregation_ib_device disaggregation_decode_enable_offload_kvcache num_reserved_decode_tokens
    disaggregation_decode_polling_interval custom_weight_loader weight_loader_disable_mmap ssl_keyfile ssl_certfile ssl_ca_certs
"""
ARGUMENTS = set(NAMES.split())


def rows(heading: str) -> list[list[str]]:
    """Returns the cells of the table below a heading of the page, by row."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


SAME = {cells[0].strip("`"): cells[1:] for cells in rows("Settings of the same name")}
OTHER = {cells[0].strip("`"): cells[1:] for cells in rows("Settings of another name")}


def test_table_has_each_setting_that_has_the_same_name_in_sglang() -> None:
    assert set(SAME) == ARGUMENTS & set(WorkerSettings.model_fields)


@pytest.mark.parametrize("name", OTHER)
def test_table_row_refers_to_a_setting_of_sglang_and_of_the_worker(name: str) -> None:
    assert name in ARGUMENTS or re.fullmatch("SGLANG_[A-Z_]+", name), (
        "the name must be an argument or an environment variable of SGLang"
    )
    assert OTHER[name][0].strip("`") in WorkerSettings.model_fields


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        *((cells[0], cells[1]) for cells in SAME.values()),
        *((cells[1], cells[2]) for cells in OTHER.values()),
        *((cells[1], cells[2]) for cells in rows("Rules")),
    ],
    ids=[*SAME, *OTHER, *(cells[0] for cells in rows("Rules"))],
)
def test_table_gives_the_reason_of_each_difference(verdict: str, reason: str) -> None:
    assert verdict == "equal" or (verdict == "different" and reason)


def test_glossary_links_to_the_table() -> None:
    assert "sglang-settings.md" in (ROOT / "docs/reference/glossary.md").read_text()
