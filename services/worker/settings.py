"""The worker's settings: every flag and environment variable that it reads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from rootstock_llm.services.shared.settings import ServiceSettings
from rootstock_llm.services.worker.core.contracts.config import UNCHUNKED, EvictionPolicy, SchedulePolicy
from rootstock_llm.services.worker.core.contracts.transfers import WritePolicy
from rootstock_llm.services.worker.identity.sampling_defaults import parse_preferences

BY_DEVICE = 0  # value of max_running_requests for which services/worker/device_limits.py chooses a default


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
        "", repr=False, description="Token that every call of the control service must carry. Empty: calls need no token."
    )
    control_token_file: str = Field("", description="File with the token of the control service. Replaces control_token.")
    profile_dir: str = Field("build/profiles", description="Folder for the traces of the control operation StartProfile.")
    model: str = Field("models/demo", description="Folder of the model in Hugging Face layout (safetensors).")
    served_model_name: str = Field("", description="Name of the model for clients. Empty: the name of its folder.")
    chat_template: str = Field(
        "",
        description="Chat template file; must be the same as chat_template of the tokenizers. Grammars may contain the special"
        " tokens that the template puts around reasoning and tool calls. Empty: the model's template.",
    )
    worker_id: str = Field("", description="Name of this worker in logs, metrics and folders. Empty: host name and port.")
    redis_url: str = Field("", description="URL of the prefix index's Redis, e.g. redis://127.0.0.1:6379/0. Empty: no index.")
    pod_name: str = Field(
        "",
        description="Kubernetes pod of this worker, whose deletion cost is set to the number of requests, so that a scale-down"
        " deletes the least loaded pod first. Empty: no deletion cost is set.",
    )
    pod_namespace: str = Field("", description="Namespace of pod_name. Empty: no deletion cost is set.")
    executor: Literal["auto", "cpu", "cuda", "fake"] = Field(
        "auto",
        description="Computes the steps. auto: cuda if there is a GPU, else cpu. fake: no model; tokens are made up for tests.",
    )
    device: str = Field("cuda:0", description="torch's name of the GPU that executor cuda uses.")
    attention_backend: Literal["auto", "flashinfer", "triton", "torch"] = Field(
        "auto", description="Attention kernels on a GPU. auto: flashinfer if it is installed and supports the model, else triton."
    )
    cuda_graphs: bool = Field(True, description="Capture decode steps as CUDA graphs when the worker starts.")
    cuda_graph_max_rows: int = Field(256, ge=1, le=4096, description="Largest number of rows in a captured decode step.")
    load_threads: int = Field(8, ge=1, le=64, description="Threads that read weights into a GPU.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Type of weights and KV. auto: the type of the checkpoint."
    )
    quantization: Literal["auto", "int8", "int4"] = Field(
        "auto",
        description="Quantization of linear layers and experts while they are loaded. auto: none. int8: 8 bits with a scale per"
        " output channel. int4: 4 bits with a scale per group of 128 weights, or of 64 or 32 if the input size is no multiple of"
        " 128. Only for models of Rootstock's own decoder.",
    )
    quantize_head: bool = Field(
        False,
        description="Quantize the vocabulary projection to 8 bits while it is loaded. If the embedding has the same weight, it"
        " also has 8 bits.",
    )
    deterministic: bool = Field(
        False,
        description="Compute a request's tokens and logprobs with equal bits, whatever the batch, the chunk size and the cache"
        " content. Only for models of Rootstock's own decoder; on a CPU, only in float32 and bfloat16.",
    )
    num_threads: int = Field(0, ge=0, description="CPU threads that compute. 0: one per core that the process may use.")
    context_len: int = Field(
        0, ge=0, description="Largest number of tokens of a request, prompt and output together. 0: the model's context."
    )
    page_size: int = Field(16, ge=1, le=256, description="Tokens of a KV page.")
    mem_fraction_static: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="On a CPU, share of the free memory for the KV pool. On a GPU, share of the device's memory for the worker;"
        " the KV pool gets this share minus weights, graphs and activations. 0: 0.5 on a CPU, 0.9 on a GPU.",
    )
    max_total_tokens: int = Field(0, ge=0, description="Size of the KV pool in tokens. 0: mem_fraction_static sets the size.")
    swa_full_tokens_ratio: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Tokens that the caches of layers with a sliding window hold, per token that the caches of layers with full"
        " attention hold.",
    )
    mamba_full_memory_ratio: float = Field(
        2.0, gt=0, le=100, description="Bytes for states of recurrent layers, per byte of the KV pool."
    )
    max_mamba_cache_size: int = Field(
        0,
        ge=0,
        description="Number of states of recurrent layers; a running request has up to 3, with draft tokens up to 4."
        " 0: mamba_full_memory_ratio sets it.",
    )
    state_interval: int = Field(
        1024,
        ge=1,
        description="At some ends of prompt chunks, recurrent and windowed layers keep their caches for later requests with the"
        " same beginning. Smallest distance in tokens between two such ends. Smaller than a page: the page size.",
    )
    max_running_requests: int = Field(
        BY_DEVICE,
        ge=0,
        le=4096,
        description="Largest number of running requests. 0: 64 on a CPU; 64, 128 or 256 on a GPU, depending on its memory.",
    )
    max_queued_requests: int = Field(
        2048, ge=0, description="Largest number of waiting requests; further requests are refused. 0: every request is refused."
    )
    max_prefill_tokens: int = Field(
        16384,
        ge=1,
        description="Largest number of prompt tokens in a step. If prompts are not cut, a longer prompt gets a step without other"
        " prompts.",
    )
    chunked_prefill_size: int | None = Field(
        None,
        ge=UNCHUNKED,
        description="Length in tokens of the chunks into which long prompts are cut. 0 or -1: prompts are not cut. Unset: 2048 on"
        " a CPU; 2048 to 16384 on a GPU, depending on its memory.",
    )
    adaptive_chunk_rows: int = Field(
        256,
        ge=0,
        description="Number of decoding requests at which chunks have half of chunked_prefill_size. Chunks shrink steadily with"
        " the number of decoding requests, down to an eighth. 0: chunks do not shrink.",
    )
    adaptive_chunk_s: float = Field(
        0.25,
        ge=0,
        le=3600,
        description="Longest time in seconds between two decode steps. If the times of recent steps predict a longer time,"
        " prompts are cut into shorter chunks. 0: no limit.",
    )
    max_extend_steps: int = Field(
        2,
        ge=0,
        description="Largest number of consecutive prefill steps while decoding requests wait. 0: only adaptive_chunk_s limits"
        " it.",
    )
    prefill_max_requests: int = Field(0, ge=0, description="Largest number of prompts in a prefill step. 0: no limit.")
    max_prompt_logprob_tokens: int = Field(4096, ge=256, description="Largest number of prompt tokens with logprobs in a step.")
    enable_mixed_chunk: bool | None = Field(
        None,
        description="Also decode running requests in prefill steps. Unset: on with a CPU, which then reads the weights once for"
        " both; off with a GPU, whose decode steps are CUDA graphs.",
    )
    enable_radix_cache: bool = Field(True, description="Share the KV of common prefixes between requests.")
    eviction_policy: EvictionPolicy = Field(EvictionPolicy.LRU, description="Order in which cached prefixes are evicted.")
    enable_prefix_index: bool = Field(True, description="Publish cached blocks of 64 tokens to redis_url.")
    schedule_policy: SchedulePolicy = Field(SchedulePolicy.FCFS, description="Order in which waiting requests are admitted.")
    lpm_fallback_threshold: int = Field(
        128, ge=0, description="Number of waiting requests above which schedule_policy lpm behaves like fcfs."
    )
    enable_priority_scheduling: bool = Field(False, description="Admit requests by priority before all other criteria.")
    schedule_low_priority_values_first: bool = Field(False, description="Treat lower priority values as more urgent.")
    priority_preemption_threshold: int = Field(
        0,
        ge=0,
        description="A waiting request may preempt running requests whose priority is less urgent by more than this value.",
    )
    enable_overlap: bool = Field(True, description="Plan step N+1 while step N runs on the device.")
    consecutive_prefill_overlap: bool = Field(
        True,
        description="Launch a prefill step while the previous prefill step runs. If off, it is launched after the previous step's"
        " first tokens are sent.",
    )
    max_sessions: int = Field(1024, ge=0, description="Largest number of open sessions.")
    session_capacity: int = Field(1 << 20, ge=1, description="Largest and default limit of the tokens of all turns of a session.")
    session_ttl_s: float = Field(
        600.0, gt=0, description="Seconds for which a session stays open after its last turn, by default."
    )
    grammar_compile_timeout_s: float = Field(
        10.0, gt=0, description="CPU time in seconds after which the compilation of a grammar fails and the grammar is refused."
    )
    grammar_memory_mib: int = Field(
        512,
        ge=64,
        description="Memory in MiB that the compilation of a grammar may allocate. If it needs more, the grammar is refused.",
    )
    grammar_cache_mib: int = Field(
        256, ge=0, description="Memory for compiled grammars in MiB. Beyond it, the least recently used grammars are dropped."
    )
    grammar_idle_s: float = Field(
        60.0,
        gt=0,
        description="Seconds after its last use at which a compiled grammar is dropped. Nothing is dropped while all compiled"
        " grammars together have at most 16 MiB.",
    )
    grammar_workers: int = Field(
        2, ge=0, le=16, description="Threads that compile grammars, plus one for slow grammars. 0: no structured output."
    )
    grammar_step_ms: float = Field(
        5.0,
        gt=0,
        description="CPU time in ms per token that a grammar's masks may take on average in its trial. In requests, twice"
        " this time is allowed.",
    )
    grammar_burst_ms: float = Field(
        50.0,
        gt=0,
        description="CPU time in ms by which a grammar's trial may exceed grammar_step_ms in total. In requests, twice this time"
        " is allowed. A grammar is refused if its trial exceeds the limit, or if requests exceed it twice.",
    )
    grammar_fill_ms: float = Field(
        20.0,
        gt=0,
        description="CPU time in ms that all grammar masks of a step may take. Time beyond it counts as time of the most"
        " expensive grammar of the step.",
    )
    grammar_mask_threads: int = Field(
        1, ge=1, le=64, description="Threads that fill grammar masks. More than 1 is faster only for large vocabularies."
    )
    speculative_algorithm: Literal["none", "ngram", "draft", "eagle3", "mtp"] = Field(
        "none",
        description="Source of draft tokens, which a step verifies; outputs do not change. ngram: the tokens that followed the"
        " same n-gram earlier in prompt or output; draft: a smaller model with the same vocabulary; eagle3: a head that reads the"
        " model's hidden states; mtp: a layer for multi-token prediction, in the model's checkpoint or in another folder.",
    )
    speculative_draft_model_path: str = Field(
        "",
        description="Folder with the safetensors of the draft model, the eagle3 head or the mtp layer. Empty: the model's folder"
        " name with -draft, -eagle3 or -mtp appended (models/demo-eagle3). If this folder does not exist, mtp uses the layer in"
        " the model's checkpoint; draft and eagle3 refuse to start.",
    )
    speculative_adaptive: bool = Field(
        True,
        description="Choose the number of draft tokens from step times and acceptance. If off, the number is always"
        " speculative_num_steps.",
    )
    speculative_num_steps: int = Field(4, ge=1, le=7, description="Largest number of draft tokens of a request per step.")
    speculative_ngram_external_corpus_path: str = Field(
        "",
        description="UTF-8 file of at most 64 MiB that ngram searches if prompt and output have no match. A .jsonl file has a"
        " JSON string or an object with `text` per line; any other file is one plain text.",
    )
    speculative_ngram_external_corpus_max_tokens: int = Field(
        10_000_000,
        ge=1,
        le=1 << 26,
        description="Largest number of tokens in the file of speculative_ngram_external_corpus_path; a longer file is refused."
        " Each token takes 8 bytes of memory.",
    )
    enable_hierarchical_cache: bool = Field(
        False,
        description="Copy KV from the pool to a tier in host memory, and read it back if this is faster than to recompute it.",
    )
    hicache_ratio: float = Field(
        2.0, gt=0, description="Size of the host tier as a multiple of the KV pool's bytes, windows and states included."
    )
    hicache_size: int = Field(0, ge=0, description="Size of the host tier in GB. 0: hicache_ratio sets the size.")
    hicache_memory_fraction: float = Field(
        0.25,
        gt=0,
        le=0.8,
        description="Largest share of the machine's free memory for the host tier if hicache_ratio sets its size.",
    )
    hicache_salt_quota: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Largest size in GB of one cache salt's KV in the host tier. Beyond it, the salt's least recently used pages"
        " are evicted. 0: no quota.",
    )
    hicache_write_policy: WritePolicy = Field(
        WritePolicy.WRITE_BACK,
        description="When pages are copied to the host tier. write_back: when no request uses them, before they are evicted;"
        " write_through: after they are computed; write_through_selective: after their second cache hit.",
    )
    hicache_storage_backend: Literal["none", "file", "redis"] = Field(
        "none",
        description="Tier below host memory. none: no such tier; file: segment files in a folder, which outlive the worker;"
        " redis: a Redis or Valkey that workers of one model share.",
    )
    hicache_storage_dir: str = Field(
        "", description="Folder of the file tier. Each worker uses the subfolder that is named after its worker_id."
    )
    hicache_storage_size: int = Field(32, ge=1, description="Size of the file tier in GB. The oldest pages are deleted first.")
    hicache_storage_salt_quota: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Largest size in GB of one cache salt's KV in the storage tier. Beyond it, the salt's oldest pages are"
        " deleted. 0: no quota.",
    )
    hicache_storage_url: str = Field(
        "",
        description="redis:// or rediss:// URL of hicache_storage_backend redis. It must not be the Redis of the prefix index,"
        " which pages would fill.",
    )
    hicache_storage_secret_file: str = Field(
        "",
        description="File of at least 32 secret bytes from which the page keys of hicache_storage_backend redis are computed. All"
        " workers that share the Redis need the same file. Other users must not be able to read it.",
    )
    hicache_storage_ttl_s: int = Field(
        86400, ge=1, description="Seconds for which hicache_storage_backend redis stores a page after its last read or write."
    )
    disaggregation_mode: Literal["both", "prefill", "decode"] = Field(
        "both",
        description="prefill: computes prompts and their first tokens for decode workers; decode: reads the KV of prompts from"
        " prefill workers; both: computes whole requests (docs/design/prefill-and-decode.md).",
    )
    disaggregation_host: str = Field(
        "127.0.0.1", description="Listen address of a prefill worker for decode workers that read its KV."
    )
    disaggregation_port: int = Field(0, ge=0, le=65535, description="Port on disaggregation_host. 0: any free port.")
    disaggregation_tls_cert_file: str = Field(
        "",
        description="PEM file with this worker's certificate for KV transfers. Reloaded when it changes. Empty: mtls_cert_file is"
        " used. If both are empty, KV transfers are not encrypted.",
    )
    disaggregation_tls_key_file: str = Field("", description="PEM file with the key of disaggregation_tls_cert_file.")
    disaggregation_tls_ca_file: str = Field(
        "",
        description="PEM file with the authority that signs the workers' certificates for KV transfers. It must sign no other"
        " certificates, because any certificate of this authority may read KV.",
    )
    disaggregation_shm_dir: str = Field(
        "",
        description="Folder for the sockets through which workers on one machine or in one pod read KV in shared memory instead"
        " of over TCP. All these workers need the same folder, which belongs to their user and is closed to other users. Empty:"
        " KV is not read in shared memory.",
    )
    disaggregation_transfer_backend: Literal["tcp", "nixl"] = Field(
        "tcp",
        description="Transport of KV between workers that do not share memory. nixl: NIXL if both workers can load it, otherwise"
        " TCP. NIXL does not encrypt: use it only in a network to which only workers have access"
        " (docs/design/prefill-and-decode.md).",
    )
    disaggregation_hold_s: float = Field(
        10.0,
        gt=0,
        description="Seconds for which a prefill worker reserves a prompt's KV for a decode worker. A decode worker that has"
        " prefetched this KV pins it until the request arrives, at most for the same time.",
    )
    enable_jump_forward: bool = Field(True, description="Append tokens that a grammar determines without sampling them.")
    schedule_conservativeness: float = Field(
        1.0, gt=0, description="Factor on the KV memory that admission reserves for the output of running requests."
    )
    allow_auto_truncate: bool = Field(
        False, description="Cut prompts that exceed the context to their first tokens instead of refusing them."
    )
    enable_return_routed_experts: bool = Field(
        False,
        description="Accept return_routed_experts on /generate, for models with experts. The response then has the experts of"
        " each token.",
    )
    stream_interval: int = Field(1, ge=1, description="Tokens per message of a stream if the request has no stream_interval.")
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="Defaults of temperature, top_p, top_k, min_p and repetition_penalty. model: the values of the model's"
        " generation_config.json, in which do_sample false means temperature 0; openai: the defaults of OpenAI's API.",
    )
    preferred_sampling_params: str = Field(
        "",
        description='JSON object with values that replace those of sampling_defaults, e.g. {"temperature": 0.6}. Empty: no'
        " values.",
    )
    waiting_timeout_s: float = Field(
        0.0, ge=0, description="Seconds for which a request may wait for its first step. 0: no limit."
    )
    running_timeout_s: float = Field(
        0.0, ge=0, description="Seconds for which a request may run, counted from its first step. 0: no limit."
    )
    watchdog_timeout_s: float = Field(
        300.0, gt=0, description="Seconds without progress of the scheduler's loop after which the liveness probe fails."
    )
    retract_interval: int = Field(
        0, ge=0, description="For tests: number of decode steps after which a running request is retracted. 0: never."
    )
    fake_step_s: float = Field(0.01, ge=0, description="Seconds of a step with the fake executor.")

    @field_validator("preferred_sampling_params")
    @classmethod
    def _check_preferred_sampling_params(cls, text: str) -> str:
        parse_preferences(text)
        return text
