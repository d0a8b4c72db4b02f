"""The worker's settings: every flag and environment variable that it reads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.shared.settings import ServiceSettings


class WorkerSettings(ServiceSettings):
    port: int = Field(7003, ge=0, le=65535, description="gRPC port: generation and health.")
    metrics_host: str = Field("127.0.0.1", description="Address that the metrics port listens on.")
    metrics_port: int = Field(9103, ge=0, le=65535, description="HTTP port of /metrics.")
    model: str = Field("models/demo", description="Folder of the model in Hugging Face layout (safetensors).")
    served_model_name: str = Field("", description="Name that clients use; by default the model folder's own name.")
    worker_id: str = Field("", description="Name of this worker in logs and metrics; by default host name and port.")
    redis_url: str = Field("", description="Redis that holds this worker's lease, e.g. redis://127.0.0.1:6379/0; empty: none.")
    executor: Literal["cpu", "fake"] = Field("cpu", description="What runs the steps; `fake` needs no model weights.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Of weights and KV; auto: the checkpoint's."
    )
    num_threads: int = Field(0, ge=0, description="Compute threads; 0: one per core that this process may use.")
    context_len: int = Field(0, ge=0, description="Tokens of prompt and output together; 0: what the model's config says.")
    page_size: int = Field(16, ge=1, le=256, description="Tokens per page of KV.")
    mem_fraction_static: float = Field(0.5, gt=0, lt=1, description="Share of the free memory that the KV pool takes.")
    max_total_tokens: int = Field(0, ge=0, description="KV pool in tokens; 0: from mem_fraction_static.")
    max_running_requests: int = Field(64, ge=1, le=4096, description="Requests that run at once.")
    max_queued_requests: int = Field(2048, ge=1, description="Requests that wait at once; one more is refused.")
    max_prefill_tokens: int = Field(16384, ge=1, description="Prompt tokens of one step.")
    chunked_prefill_size: int = Field(2048, ge=0, description="Tokens after which a prompt is cut into chunks; 0: never.")
    enable_mixed_chunk: bool = Field(False, description="Decode rows ride along in prefill steps.")
    enable_radix_cache: bool = Field(True, description="Share the KV of common prefixes.")
    enable_overlap: bool = Field(True, description="Plan step N+1 while step N computes.")
    schedule_conservativeness: float = Field(1.0, gt=0, description="Factor on the KV reserved for running requests' output.")
    allow_auto_truncate: bool = Field(False, description="Cut prompts that exceed the context, instead of refusing them.")
    waiting_timeout_s: float = Field(0.0, ge=0, description="Seconds a request may wait for its first step; 0: no limit.")
    running_timeout_s: float = Field(0.0, ge=0, description="Seconds a request may run from its first step; 0: no limit.")
    watchdog_timeout_s: float = Field(300.0, gt=0, description="Seconds without progress after which liveness turns off.")
    retract_interval: int = Field(0, ge=0, description="Test hook: retract a request every so many decode steps; 0: never.")
    fake_step_s: float = Field(0.01, ge=0, description="Seconds of a step of the fake executor.")
