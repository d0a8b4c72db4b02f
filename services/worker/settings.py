"""The worker's settings: every flag and environment variable that it reads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from services.shared.settings import ServiceSettings
from services.worker.core.contracts.config import UNCHUNKED, EvictionPolicy, SchedulePolicy
from services.worker.core.contracts.transfers import WritePolicy
from services.worker.identity.sampling_defaults import parse_preferences

BY_DEVICE = 0  # of max_running_requests: see services/worker/device_limits.py


class WorkerSettings(ServiceSettings):
    port: int = Field(7003, ge=0, le=65535, description="gRPC port: generation and health.")
    metrics_host: str = Field("127.0.0.1", description="Address that the metrics port listens on.")
    metrics_port: int = Field(9103, ge=0, le=65535, description="HTTP port of /metrics.")
    control_host: str = Field(
        "127.0.0.1", description="Address that the control service listens on; others than loopback need a token."
    )
    control_port: int = Field(0, ge=0, le=65535, description="gRPC port of the control service, for operators; 0: none.")
    control_token: str = Field(
        "", repr=False, description="Token that every call to the control service must carry; empty: none."
    )
    control_token_file: str = Field("", description="File that holds the control service's token, instead of control_token.")
    profile_dir: str = Field("build/profiles", description="Folder for the traces of StartProfile.")
    model: str = Field("models/demo", description="Folder of the model in Hugging Face layout (safetensors).")
    served_model_name: str = Field("", description="Name that clients use; by default the model folder's own name.")
    chat_template: str = Field(
        "", description="File of the chat template that the tokenizers were given; the marks in it become tokens of grammars."
    )
    worker_id: str = Field("", description="Name of this worker in logs and metrics; by default host name and port.")
    redis_url: str = Field("", description="Redis that holds the prefix index, e.g. redis://127.0.0.1:6379/0; empty: none.")
    pod_name: str = Field("", description="This worker's pod, whose deletion cost follows its load; empty: none.")
    pod_namespace: str = Field("", description="That pod's namespace.")
    executor: Literal["auto", "cpu", "cuda", "fake"] = Field(
        "auto", description="What runs the steps; auto: cuda where there is a GPU, else cpu. `fake` needs no model weights."
    )
    device: str = Field("cuda:0", description="The GPU of executor cuda, as torch names it.")
    attention_backend: Literal["auto", "flashinfer", "triton", "torch"] = Field(
        "auto", description="Attention on a GPU; auto: flashinfer where it is installed and can, else triton."
    )
    cuda_graphs: bool = Field(True, description="Capture decode steps as CUDA graphs at start.")
    cuda_graph_max_rows: int = Field(256, ge=1, le=4096, description="Rows of the largest captured step.")
    load_threads: int = Field(8, ge=1, le=64, description="Threads that read weights to a GPU.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Of weights and KV; auto: the checkpoint's."
    )
    deterministic: bool = Field(
        False,
        description="A request's tokens and logprobs are the same bits whatever else runs, however its prompt is cut, cached or"
        " computed again. Models of our own decoder; on a CPU float32 and bfloat16.",
    )
    num_threads: int = Field(0, ge=0, description="Compute threads; 0: one per core that this process may use.")
    context_len: int = Field(0, ge=0, description="Tokens of prompt and output together; 0: what the model's config says.")
    page_size: int = Field(16, ge=1, le=256, description="Tokens per page of KV.")
    mem_fraction_static: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="CPU: share of the free memory that the KV pool takes. GPU: share of the device that everything on it takes,"
        " the pool what the rest leaves. 0: 0.5 and 0.9.",
    )
    max_total_tokens: int = Field(0, ge=0, description="KV pool in tokens; 0: from mem_fraction_static.")
    max_running_requests: int = Field(
        BY_DEVICE, ge=0, le=4096, description="Requests that run at once; 0: 64 on a CPU, 64 to 256 by the memory of a GPU."
    )
    max_queued_requests: int = Field(
        2048, ge=0, description="Requests that wait at once; one more is refused. 0: every request is refused."
    )
    max_prefill_tokens: int = Field(16384, ge=1, description="Prompt tokens of one step.")
    chunked_prefill_size: int | None = Field(
        None,
        ge=UNCHUNKED,
        description="Tokens after which a prompt is cut into chunks; 0 and -1: never. Unset: 2048 on a CPU, 2048 to 16384 by the"
        " memory of a GPU.",
    )
    adaptive_chunk_rows: int = Field(256, ge=0, description="Decode rows at which chunks are half as long; 0: never shorter.")
    adaptive_chunk_s: float = Field(
        0.25,
        ge=0,
        le=3600,
        description="Seconds that a row that decodes is to wait for its next token at most: chunks of prompts are as short as"
        " that needs, by what steps have taken lately; 0: no matter how long.",
    )
    max_extend_steps: int = Field(
        2, ge=0, description="Prefill steps in a row while decode rows wait; 0: any number in their time."
    )
    prefill_max_requests: int = Field(0, ge=0, description="Prompts of one prefill step; 0: any number.")
    max_prompt_logprob_tokens: int = Field(4096, ge=256, description="Prompt tokens of one step whose logprobs are computed.")
    enable_mixed_chunk: bool = Field(False, description="Decode rows ride along in prefill steps.")
    enable_radix_cache: bool = Field(True, description="Share the KV of common prefixes.")
    eviction_policy: EvictionPolicy = Field(EvictionPolicy.LRU, description="Which cached prefix is given up first.")
    enable_prefix_index: bool = Field(True, description="Tell Redis, if there is one, which blocks of 64 tokens are cached here.")
    schedule_policy: SchedulePolicy = Field(SchedulePolicy.FCFS, description="The order in which waiting requests begin.")
    lpm_fallback_threshold: int = Field(128, ge=0, description="Waiting requests above which lpm serves as fcfs does.")
    enable_priority_scheduling: bool = Field(False, description="Serve requests by their priority first.")
    schedule_low_priority_values_first: bool = Field(False, description="Lower values are more urgent.")
    priority_preemption_threshold: int = Field(
        0, ge=0, description="A waiting request displaces running ones whose priority is worse by more than this."
    )
    enable_overlap: bool = Field(True, description="Plan step N+1 while step N computes.")
    consecutive_prefill_overlap: bool = Field(
        True, description="Overlap prefill steps too; off: the first token of one goes out before the next is launched."
    )
    max_sessions: int = Field(1024, ge=0, description="Sessions that may be open at once.")
    session_capacity: int = Field(1 << 20, ge=1, description="Tokens of a session over all its turns, if it names no limit.")
    session_ttl_s: float = Field(600.0, gt=0, description="Seconds after its last turn that a session stays open.")
    grammar_compile_timeout_s: float = Field(10.0, gt=0, description="CPU time in seconds that compiling a grammar may take.")
    grammar_memory_mib: int = Field(512, ge=64, description="Memory that compiling a grammar may take, in MiB.")
    grammar_cache_mib: int = Field(256, ge=0, description="Compiled grammars that are kept, in MiB.")
    grammar_idle_s: float = Field(
        60.0, gt=0, description="Of compiled grammars without use for so long only the last 16 MiB stay, in seconds."
    )
    grammar_workers: int = Field(2, ge=0, le=16, description="Grammars compiled at once; 0: no structured output.")
    grammar_step_ms: float = Field(5.0, gt=0, description="CPU time in ms that a token's grammar mask may take on average.")
    grammar_burst_ms: float = Field(
        50.0,
        gt=0,
        description="CPU time in ms that a grammar may take beyond that in all; the second time it does, it is refused.",
    )
    grammar_fill_ms: float = Field(20.0, gt=0, description="CPU time in ms that one step's grammar masks may take in all.")
    grammar_mask_threads: int = Field(1, ge=1, le=64, description="Threads that fill masks; more pay on large vocabularies.")
    speculative_algorithm: Literal["none", "ngram", "draft", "eagle3", "mtp"] = Field(
        "none",
        description="What guesses the next tokens, which a step then verifies; the text stays the same. ngram: what followed the"
        " last tokens before, in prompt or output; draft: a smaller model of the same vocabulary; eagle3: a head that reads the"
        " model's states; mtp: the checkpoint's own layer for that, or another folder's.",
    )
    speculative_draft_model_path: str = Field(
        "",
        description="Folder of the smaller model of draft, of the head of eagle3, or of mtp's layer if that is not the model's;"
        " none: the one beside the model's with the algorithm behind its name (models/demo-eagle3), if there is one."
        " Safetensors alone are loaded.",
    )
    speculative_adaptive: bool = Field(
        True, description="Guess as many tokens as pay, by what steps cost and what guesses come to; off: always the most."
    )
    speculative_num_steps: int = Field(4, ge=1, le=7, description="Tokens that are guessed at once, at most.")
    speculative_ngram_external_corpus_path: str = Field(
        "",
        description="File of texts in which ngram looks where a request's own say nothing: .jsonl, a JSON string in each line or"
        " an object with a text; any other name, plain text. UTF-8, at most 64 MiB.",
    )
    speculative_ngram_external_corpus_max_tokens: int = Field(
        10_000_000,
        ge=1,
        le=1 << 26,
        description="Tokens that it may have: each takes 8 bytes of memory. A file with more is refused.",
    )
    enable_hierarchical_cache: bool = Field(
        False, description="Keep KV that leaves the pool in host memory, and read it back where that is sooner than computing it."
    )
    hicache_ratio: float = Field(2.0, gt=0, description="Pages of the host tier for each page of the pool.")
    hicache_size: int = Field(0, ge=0, description="Size of the host tier in GB, in place of hicache_ratio; 0: by the ratio.")
    hicache_memory_fraction: float = Field(
        0.25, gt=0, le=0.8, description="Share of the machine's free memory that the host tier takes at most by hicache_ratio."
    )
    hicache_salt_quota: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="GB of the host tier that the KV of one cache salt may take, past which its own coldest goes; 0: no quota.",
    )
    hicache_write_policy: WritePolicy = Field(
        WritePolicy.WRITE_BACK,
        description="What is copied to the tiers below. write_back: what nobody uses any more, the coldest first, ahead of its"
        " eviction; write_through: all, as it is computed; write_through_selective: what is hit again.",
    )
    hicache_storage_backend: Literal["none", "file", "redis"] = Field(
        "none",
        description="The tier below the host's: none; file: segment files in a folder, which outlive the worker; redis: a Redis"
        " or Valkey that workers of one model share.",
    )
    hicache_storage_dir: str = Field(
        "", description="Folder of the file tier, in which each worker has its own, by its worker_id."
    )
    hicache_storage_size: int = Field(32, ge=1, description="GB that the file tier may take; the oldest go first.")
    hicache_storage_salt_quota: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="GB of the storage that the KV of one cache salt may take, past which its own oldest goes; 0: no quota.",
    )
    hicache_storage_url: str = Field(
        "", description="redis:// or rediss:// URL of the shared storage: never that of the prefix index, which it would fill."
    )
    hicache_storage_secret_file: str = Field(
        "",
        description="File of 32 bytes or more that makes the keys of a shared storage: the same for all that share it, and nobody"
        " else's.",
    )
    hicache_storage_ttl_s: int = Field(
        86400, ge=1, description="Seconds after which a page of a shared storage goes that nobody has written or read."
    )
    disaggregation_mode: Literal["both", "prefill", "decode"] = Field(
        "both",
        description="prefill: computes prompts, up to their first token, for workers that decode; decode: reads from these what"
        " they have computed; both: computes whole answers (docs/design/prefill-and-decode.md).",
    )
    disaggregation_host: str = Field("127.0.0.1", description="Address at which a prefill worker's KV is read.")
    disaggregation_port: int = Field(0, ge=0, le=65535, description="Its port; 0 takes a free one.")
    disaggregation_tls_cert_file: str = Field(
        "",
        description="PEM file of this worker's certificate, shown where KV is read; followed as it changes."
        " Empty: as mtls_cert_file says, and no TLS without that.",
    )
    disaggregation_tls_key_file: str = Field("", description="PEM file of its key.")
    disaggregation_tls_ca_file: str = Field(
        "", description="PEM file of the authority that has signed the other workers' certificates, and nobody else's."
    )
    disaggregation_shm_dir: str = Field(
        "",
        description="Folder, this user's alone, of sockets by which workers on one machine, or in one pod, read KV through shared"
        " memory instead of TCP: the same on both sides. Empty: never.",
    )
    disaggregation_transfer_backend: Literal["tcp", "nixl"] = Field(
        "tcp",
        description="How KV goes to workers with which no memory is shared. nixl: through NIXL, where it can be loaded on both"
        " sides and the network between them is the workers' alone; else, and by tcp, over TCP"
        " (docs/design/prefill-and-decode.md).",
    )
    disaggregation_hold_s: float = Field(
        10.0,
        gt=0,
        description="Seconds for which a prefill worker keeps a prompt's KV that nobody comes for, and a decode worker what it "
        "has read of a prompt of which nothing more is heard.",
    )
    enable_jump_forward: bool = Field(True, description="Take over text that a grammar leaves no choice about, unsampled.")
    schedule_conservativeness: float = Field(1.0, gt=0, description="Factor on the KV reserved for running requests' output.")
    allow_auto_truncate: bool = Field(
        False, description="Cut prompts that exceed the context to its first tokens, instead of refusing them."
    )
    stream_interval: int = Field(1, ge=1, description="Tokens between two messages of a stream that does not say itself.")
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="Defaults of temperature, top_p, top_k, min_p and repetition_penalty: those of the model's"
        " generation_config.json, where do_sample false means temperature 0, or the API's.",
    )
    preferred_sampling_params: str = Field(
        "", description='Defaults that go before those: a JSON object of the same five, e.g. {"temperature": 0.6}. Empty: none.'
    )
    waiting_timeout_s: float = Field(0.0, ge=0, description="Seconds a request may wait for its first step; 0: no limit.")
    running_timeout_s: float = Field(0.0, ge=0, description="Seconds a request may run from its first step; 0: no limit.")
    watchdog_timeout_s: float = Field(300.0, gt=0, description="Seconds without progress after which liveness turns off.")
    retract_interval: int = Field(0, ge=0, description="Test hook: retract a request every so many decode steps; 0: never.")
    fake_step_s: float = Field(0.01, ge=0, description="Seconds of a step of the fake executor.")

    @field_validator("preferred_sampling_params")
    @classmethod
    def _preferences_hold(cls, text: str) -> str:
        parse_preferences(text)
        return text
