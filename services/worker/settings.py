"""The worker's settings: every flag and environment variable that it reads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from rootstock_llm.services.shared.settings import ServiceSettings
from rootstock_llm.services.worker.core.contracts.config import UNCHUNKED, EvictionPolicy, SchedulePolicy
from rootstock_llm.services.worker.core.contracts.transfers import WritePolicy
from rootstock_llm.services.worker.identity.sampling_defaults import parse_preferences

BY_DEVICE = 0  # value of max_running_requests that leaves it to services/worker/device_limits.py


class WorkerSettings(ServiceSettings):
    port: int = Field(7003, ge=0, le=65535, description="gRPC port for generation and health checks.")
    metrics_host: str = Field("127.0.0.1", description="Address on which the metrics port listens.")
    metrics_port: int = Field(9103, ge=0, le=65535, description="HTTP port of /metrics.")
    control_host: str = Field(
        "127.0.0.1", description="Address on which the control service listens. Addresses other than loopback require a token."
    )
    control_port: int = Field(
        0, ge=0, le=65535, description="gRPC port of the control service for operators. 0: no control service."
    )
    control_token: str = Field(
        "", repr=False, description="Token that every call of the control service must have. Empty: calls need no token."
    )
    control_token_file: str = Field("", description="File with the token of the control service, instead of control_token.")
    profile_dir: str = Field("build/profiles", description="Folder in which StartProfile writes its traces.")
    model: str = Field("models/demo", description="Folder of the model in Hugging Face layout (safetensors).")
    served_model_name: str = Field("", description="Name of the model for clients. Empty: the name of its folder.")
    chat_template: str = Field(
        "", description="Chat template file of the tokenizers. Grammars may contain its marks. Empty: the model's template."
    )
    worker_id: str = Field("", description="Name of this worker in logs and metrics. Empty: host name and port.")
    redis_url: str = Field("", description="URL of the prefix index's Redis, e.g. redis://127.0.0.1:6379/0. Empty: no index.")
    pod_name: str = Field("", description="This worker's pod. Its deletion cost follows the load. Empty: no pod.")
    pod_namespace: str = Field("", description="Namespace of the pod that pod_name names.")
    executor: Literal["auto", "cpu", "cuda", "fake"] = Field(
        "auto", description="Executor of the steps. auto: cuda if there is a GPU, else cpu. `fake` needs no model weights."
    )
    device: str = Field("cuda:0", description="GPU of the executor cuda, by torch's name.")
    attention_backend: Literal["auto", "flashinfer", "triton", "torch"] = Field(
        "auto", description="Attention on a GPU. auto: flashinfer if it is installed and supports the model, else triton."
    )
    cuda_graphs: bool = Field(True, description="Capture decode steps as CUDA graphs at the start.")
    cuda_graph_max_rows: int = Field(256, ge=1, le=4096, description="Rows of the largest captured decode step.")
    load_threads: int = Field(8, ge=1, le=64, description="Threads that read weights for a GPU.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Type of weights and KV. auto: the type of the checkpoint."
    )
    deterministic: bool = Field(
        False,
        description="Compute equal bits of a request's tokens and logprobs for every batch, chunk size and cache content. For"
        " models of our own decoder; on a CPU in float32 and bfloat16.",
    )
    num_threads: int = Field(0, ge=0, description="Compute threads. 0: one per core that the process may use.")
    context_len: int = Field(0, ge=0, description="Largest number of tokens of prompt and output. 0: the model's context.")
    page_size: int = Field(16, ge=1, le=256, description="Tokens of a KV page.")
    mem_fraction_static: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="On a CPU, share of the free memory for the KV pool. On a GPU, share of the device's memory for all its uses;"
        " the KV pool takes the part that weights, graphs and activations leave. 0: 0.5 on a CPU, 0.9 on a GPU.",
    )
    max_total_tokens: int = Field(0, ge=0, description="Size of the KV pool in tokens. 0: by mem_fraction_static.")
    max_running_requests: int = Field(
        BY_DEVICE,
        ge=0,
        le=4096,
        description="Largest number of running requests. 0: 64 on a CPU, 64 to 256 by the memory of a GPU.",
    )
    max_queued_requests: int = Field(
        2048, ge=0, description="Largest number of waiting requests; others are refused. 0: every request is refused."
    )
    max_prefill_tokens: int = Field(16384, ge=1, description="Largest number of prompt tokens of a step.")
    chunked_prefill_size: int | None = Field(
        None,
        ge=UNCHUNKED,
        description="Length of the chunks of long prompts in tokens. 0 or -1: prompts are not cut. Unset: 2048 on a CPU, 2048 to"
        " 16384 by the memory of a GPU.",
    )
    adaptive_chunk_rows: int = Field(
        256, ge=0, description="Decode rows from which chunks are half as long. 0: chunks are never shorter."
    )
    adaptive_chunk_s: float = Field(
        0.25,
        ge=0,
        le=3600,
        description="Longest time between two decode steps in seconds, for which chunks of prompts are shortened by the times of"
        " recent steps. 0: no limit.",
    )
    max_extend_steps: int = Field(
        2, ge=0, description="Prefill steps in a row while decode rows wait. 0: any number within adaptive_chunk_s."
    )
    prefill_max_requests: int = Field(0, ge=0, description="Largest number of prompts of a prefill step. 0: no limit.")
    max_prompt_logprob_tokens: int = Field(4096, ge=256, description="Largest number of prompt tokens with logprobs in a step.")
    enable_mixed_chunk: bool = Field(False, description="Add decode rows to prefill steps.")
    enable_radix_cache: bool = Field(True, description="Share the KV of common prefixes between requests.")
    eviction_policy: EvictionPolicy = Field(EvictionPolicy.LRU, description="Order in which cached prefixes are evicted.")
    enable_prefix_index: bool = Field(True, description="Publish cached blocks of 64 tokens to redis_url.")
    schedule_policy: SchedulePolicy = Field(SchedulePolicy.FCFS, description="Order in which waiting requests are admitted.")
    lpm_fallback_threshold: int = Field(128, ge=0, description="Waiting requests above which lpm behaves like fcfs.")
    enable_priority_scheduling: bool = Field(False, description="Admit requests by priority before all other criteria.")
    schedule_low_priority_values_first: bool = Field(False, description="Treat lower priority values as more urgent.")
    priority_preemption_threshold: int = Field(
        0, ge=0, description="A waiting request preempts running requests that are less urgent by more than this value."
    )
    enable_overlap: bool = Field(True, description="Plan step N+1 while step N runs on the device.")
    consecutive_prefill_overlap: bool = Field(
        True, description="Overlap prefill steps, too. If off, first tokens are sent before the next prefill step is launched."
    )
    max_sessions: int = Field(1024, ge=0, description="Largest number of open sessions.")
    session_capacity: int = Field(1 << 20, ge=1, description="Tokens of all turns of a session that sets no limit.")
    session_ttl_s: float = Field(600.0, gt=0, description="Seconds for which a session stays open after its last turn.")
    grammar_compile_timeout_s: float = Field(10.0, gt=0, description="Largest CPU time of a grammar's compilation in seconds.")
    grammar_memory_mib: int = Field(512, ge=64, description="Largest memory of a grammar's compilation in MiB.")
    grammar_cache_mib: int = Field(256, ge=0, description="Memory for compiled grammars in MiB.")
    grammar_idle_s: float = Field(
        60.0, gt=0, description="Seconds without use after which compiled grammars are dropped, except for 16 MiB."
    )
    grammar_workers: int = Field(2, ge=0, le=16, description="Grammars that are compiled at once. 0: no structured output.")
    grammar_step_ms: float = Field(5.0, gt=0, description="Allowed average CPU time of a grammar per token in ms.")
    grammar_burst_ms: float = Field(
        50.0,
        gt=0,
        description="CPU time in ms by which a grammar may exceed grammar_step_ms in total. At the second excess, it is refused.",
    )
    grammar_fill_ms: float = Field(20.0, gt=0, description="Largest CPU time of all grammar masks of a step in ms.")
    grammar_mask_threads: int = Field(
        1, ge=1, le=64, description="Threads that fill grammar masks. More than 1 pays for large vocabularies."
    )
    speculative_algorithm: Literal["none", "ngram", "draft", "eagle3", "mtp"] = Field(
        "none",
        description="Source of draft tokens, which a step verifies; the text stays the same. ngram: tokens that followed the last"
        " tokens earlier in prompt or output; draft: a smaller model with the same vocabulary; eagle3: a head that reads the"
        " model's hidden states; mtp: a layer for multi-token prediction, of the model or of another folder.",
    )
    speculative_draft_model_path: str = Field(
        "",
        description="Folder of the draft model, of the eagle3 head or of the mtp layer, with safetensors. Empty: a folder next to"
        " the model's with the algorithm after its name (models/demo-eagle3); if none exists, mtp uses the model's own layer.",
    )
    speculative_adaptive: bool = Field(
        True, description="Choose the number of draft tokens by step times and acceptance. If off, it is always the largest."
    )
    speculative_num_steps: int = Field(4, ge=1, le=7, description="Largest number of draft tokens of a request per step.")
    speculative_ngram_external_corpus_path: str = Field(
        "",
        description="File of texts that ngram searches if a request's own texts have no match. A .jsonl file has a JSON string or"
        " an object with `text` per line; any other file is one plain text. UTF-8, at most 64 MiB.",
    )
    speculative_ngram_external_corpus_max_tokens: int = Field(
        10_000_000,
        ge=1,
        le=1 << 26,
        description="Largest number of tokens of the external corpus, which takes 8 bytes of memory per token. A longer file is"
        " refused.",
    )
    enable_hierarchical_cache: bool = Field(
        False, description="Copy KV from the pool to host memory, and read it back if that is faster than computing it."
    )
    hicache_ratio: float = Field(2.0, gt=0, description="Size of the host tier as a multiple of the pool.")
    hicache_size: int = Field(0, ge=0, description="Size of the host tier in GB. 0: by hicache_ratio.")
    hicache_memory_fraction: float = Field(
        0.25, gt=0, le=0.8, description="Largest share of the machine's free memory for the host tier if hicache_ratio sizes it."
    )
    hicache_salt_quota: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Largest size of one cache salt's KV in the host tier in GB. At the limit, the salt's least recently used"
        " pages are evicted. 0: no quota.",
    )
    hicache_write_policy: WritePolicy = Field(
        WritePolicy.WRITE_BACK,
        description="Pages that are copied to lower tiers. write_back: unused pages before their eviction, the coldest first;"
        " write_through: all computed pages; write_through_selective: pages that are hit again.",
    )
    hicache_storage_backend: Literal["none", "file", "redis"] = Field(
        "none",
        description="Tier below host memory. none: no such tier; file: segment files in a folder, which outlive the worker;"
        " redis: a Redis or Valkey that workers of one model share.",
    )
    hicache_storage_dir: str = Field(
        "", description="Folder of the file tier. Each worker has a subfolder with its worker_id as the name."
    )
    hicache_storage_size: int = Field(32, ge=1, description="Size of the file tier in GB. The oldest pages are deleted first.")
    hicache_storage_salt_quota: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Largest size of one cache salt's KV in the storage tier in GB. At the limit, the salt's oldest pages are"
        " deleted. 0: no quota.",
    )
    hicache_storage_url: str = Field(
        "", description="redis:// or rediss:// URL of the shared storage. It must not be the prefix index's, which would fill up."
    )
    hicache_storage_secret_file: str = Field(
        "",
        description="File of at least 32 secret bytes from which the page keys of a shared storage are computed. All workers"
        " that share the storage need the same file, and it must be secret to all other users.",
    )
    hicache_storage_ttl_s: int = Field(
        86400, ge=1, description="Seconds after the last read or write at which a shared storage deletes a page."
    )
    disaggregation_mode: Literal["both", "prefill", "decode"] = Field(
        "both",
        description="prefill: computes prompts and their first tokens for decode workers; decode: reads the KV of prompts from"
        " prefill workers; both: computes whole requests (docs/design/prefill-and-decode.md).",
    )
    disaggregation_host: str = Field("127.0.0.1", description="Address at which decode workers read a prefill worker's KV.")
    disaggregation_port: int = Field(0, ge=0, le=65535, description="Port of disaggregation_host. 0: any free port.")
    disaggregation_tls_cert_file: str = Field(
        "",
        description="PEM file of this worker's certificate for KV transfers, read again when it changes. Empty: mtls_cert_file is"
        " used; if that is empty too, no TLS.",
    )
    disaggregation_tls_key_file: str = Field("", description="PEM file of the key of disaggregation_tls_cert_file.")
    disaggregation_tls_ca_file: str = Field(
        "", description="PEM file of the authority of KV transfers, which must sign only certificates of workers."
    )
    disaggregation_shm_dir: str = Field(
        "",
        description="Folder for sockets through which workers on one machine or in one pod read KV in shared memory instead of by"
        " TCP. It must belong to this user only and be the same for both workers. Empty: no shared memory.",
    )
    disaggregation_transfer_backend: Literal["tcp", "nixl"] = Field(
        "tcp",
        description="Transfer of KV between workers without shared memory. nixl: through NIXL if both workers can load it, in a"
        " network of the workers only, otherwise over TCP (docs/design/prefill-and-decode.md).",
    )
    disaggregation_hold_s: float = Field(
        10.0,
        gt=0,
        description="Seconds after which a prefill worker frees the KV of a prompt that no decode worker has read, and after"
        " which a decode worker frees the KV that it has read for a request that does not arrive.",
    )
    enable_jump_forward: bool = Field(True, description="Add text that a grammar determines without sampling it.")
    schedule_conservativeness: float = Field(
        1.0, gt=0, description="Factor of the KV that is reserved for running requests' output."
    )
    allow_auto_truncate: bool = Field(
        False, description="Cut prompts that exceed the context to their first tokens instead of refusing them."
    )
    stream_interval: int = Field(1, ge=1, description="Tokens per message of a stream whose request sets none.")
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="Defaults of temperature, top_p, top_k, min_p and repetition_penalty. model: the values of the model's"
        " generation_config.json, in which do_sample false means temperature 0; openai: the API's.",
    )
    preferred_sampling_params: str = Field(
        "", description='JSON object with values that override sampling_defaults, e.g. {"temperature": 0.6}. Empty: none.'
    )
    waiting_timeout_s: float = Field(
        0.0, ge=0, description="Seconds for which a request may wait for its first step. 0: no limit."
    )
    running_timeout_s: float = Field(
        0.0, ge=0, description="Seconds for which a request may run from its first step. 0: no limit."
    )
    watchdog_timeout_s: float = Field(300.0, gt=0, description="Seconds without progress after which liveness fails.")
    retract_interval: int = Field(0, ge=0, description="Decode steps between two retractions, for tests. 0: no retractions.")
    fake_step_s: float = Field(0.01, ge=0, description="Seconds of a step with the fake executor.")

    @field_validator("preferred_sampling_params")
    @classmethod
    def _preferences_hold(cls, text: str) -> str:
        parse_preferences(text)
        return text
