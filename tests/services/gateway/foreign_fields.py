"""Names of request fields in the installed openai package, in the request types of SGLang and vLLM, and of further servers."""

from __future__ import annotations

from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import chat_completion_stream_options_param
from openai.types.chat import completion_create_params as chat_create_params

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"

OPENAI: dict[str, frozenset[str]] = {
    CHAT: frozenset(chat_create_params.CompletionCreateParamsStreaming.__annotations__)
    | frozenset(chat_create_params.CompletionCreateParamsBase.__annotations__),
    COMPLETIONS: frozenset(completion_create_params.CompletionCreateParamsStreaming.__annotations__)
    | frozenset(completion_create_params.CompletionCreateParamsBase.__annotations__),
    EMBEDDINGS: frozenset(embedding_create_params.EmbeddingCreateParams.__annotations__),
}
STREAM_OPTIONS = frozenset(chat_completion_stream_options_param.ChatCompletionStreamOptionsParam.__annotations__) | {
    "continuous_usage_stats"
}

_SGLANG_BOTH = """
    bootstrap_host bootstrap_port bootstrap_room cache_salt custom_logit_processor custom_params data_parallel_rank
    disagg_prefill_dp_rank ebnf extra_key frequency_penalty ignore_eos images_config logit_bias logprobs lora_path max_tokens
    min_p min_tokens model n ngram_corpus_id no_stop_trim presence_penalty priority regex repetition_penalty response_format
    return_cached_tokens_details return_hidden_states return_routed_experts return_token_ids rid routed_dp_rank
    routed_experts_start_len seed session_id session_params skip_special_tokens stop stop_regex stop_token_ids stream
    stream_options temperature top_k top_p user
"""
SGLANG: dict[str, str] = {
    CHAT: _SGLANG_BOTH
    + """
    chat_template_kwargs continue_final_message input_ids max_completion_tokens max_dynamic_patch messages min_dynamic_patch
    parallel_tool_calls reasoning reasoning_effort return_meta_info return_prompt_token_ids separate_reasoning
    stream_reasoning task tool_choice tools top_logprobs use_audio_in_video
    """,
    COMPLETIONS: _SGLANG_BOTH + "best_of custom_labels echo json_schema prompt suffix",
    EMBEDDINGS: """
    bootstrap_host bootstrap_port bootstrap_room data_parallel_rank dimensions embed_override_token_id embed_overrides
    encoding_format extra_key input lora_path model priority return_pooled_hidden_states rid routed_dp_rank user
    """,
}
_VLLM_BOTH = """
    add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params frequency_penalty guided_choice
    guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos
    include_stop_str_in_output kv_transfer_params length_penalty logit_bias logits_processors logprob_token_ids logprobs
    max_tokens min_p min_tokens model n presence_penalty priority prompt_logprobs repetition_detection repetition_penalty
    request_id response_format return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids
    routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream
    stream_interval stream_options structural_tag structured_outputs temperature thinking_token_budget top_k top_p
    truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
"""
VLLM: dict[str, str] = {
    CHAT: _VLLM_BOTH
    + """
    add_generation_prompt best_of chat_template chat_template_kwargs continue_final_message documents early_stopping echo
    include_reasoning max_completion_tokens media_io_kwargs messages mm_processor_kwargs parallel_tool_calls reasoning_effort
    return_prompt_text tool_choice tools top_logprobs
    """,
    COMPLETIONS: _VLLM_BOTH + "best_of early_stopping echo prompt prompt_embeds suffix",
    EMBEDDINGS: """
    activation add_generation_prompt add_special_tokens additional_data cache_salt chat_template chat_template_kwargs
    continue_final_message dimensions embed_dtype encoding_format endianness input media_io_kwargs messages
    mm_processor_kwargs model normalize priority request_id softmax truncate_prompt_tokens truncation_side use_activation user
    """,
}
SGLANG_GENERATE = """
    audio_data background bootstrap_host bootstrap_port bootstrap_room conversation_id custom_labels custom_logit_processor
    data_parallel_rank disagg_prefill_dp_rank external_trace_header extra_key image_data input_embeds input_ids log_metrics
    logprob_start_len lora_id lora_path modalities need_wait_for_mm_processing ngram_corpus_id no_logs positional_embed_overrides
    priority require_reasoning return_bytes return_entropy return_hidden_states return_logprob return_prompt_token_ids
    return_routed_experts return_text_in_logprobs rid routed_dp_rank routed_experts_start_len routing_key sampling_params
    session_params stream text token_ids_logprob top_logprobs_num use_audio_in_video video_data
"""
SGLANG_SAMPLING = """
    custom_params ebnf frequency_penalty ignore_eos json_schema logit_bias max_new_tokens min_new_tokens min_p n no_stop_trim
    presence_penalty regex repetition_penalty sampling_seed skip_special_tokens spaces_between_special_tokens stop stop_regex
    stop_token_ids stream_interval structural_tag temperature top_k top_p
"""


# Fields of servers other than SGLang and vLLM: switches of reasoning, and fields that change an output.
OTHERS = """
    do_sample dynatemp_range enable_search enable_thinking grammar max_new_tokens mirostat n_predict num_beams prompt_mode
    random_seed reasoning_budget reasoning_format repeat_penalty safe_prompt tfs_z think thinking thinking_budget top_a
"""


def known_to(path: str) -> list[str]:
    """Returns the names of all fields in this file for an OpenAI endpoint."""
    return sorted({*OPENAI[path], *SGLANG[path].split(), *VLLM[path].split(), *OTHERS.split()})
