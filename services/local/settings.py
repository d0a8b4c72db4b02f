"""Settings of the local launcher, which `rootstock serve` and `make run` start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from rootstock_llm.services.shared.settings import CONFIG_HELP


class LocalSettings(BaseSettings):
    """Settings of the launcher, from which it derives the flags of each service.

    `rootstock serve MODEL` sets --model.
    """

    model_config = SettingsConfigDict(
        env_prefix="ROOTSTOCK_LOCAL_", frozen=True, extra="forbid", cli_kebab_case=True, cli_implicit_flags=True
    )

    config: str = Field("", description=CONFIG_HELP)
    model: str = Field("models/demo", description="Model folder in Hugging Face layout, or a hub id.")
    chat_template: str = Field(
        "", description="File with a Jinja chat template that replaces the model's. Empty: the model's template."
    )
    served_model_name: str = Field(
        "", description="Name that clients use for the model. Empty: the name of its folder, or the hub id."
    )
    port: int = Field(
        8000, ge=1, le=65535, description="HTTP port of the first gateway. For all other ports, free ports are chosen."
    )
    admin_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="HTTP port of the operators' API (docs/reference/control.md), on loopback. 0: no operators' API.",
    )
    workers: int = Field(1, ge=1, le=64, description="Number of worker processes.")
    prefill_workers: int = Field(
        0,
        ge=0,
        le=32,
        description="Number of prefill workers, which compute prompts for decode workers. If it is above 0, `workers` is"
        " ignored.",
    )
    decode_workers: int = Field(
        0,
        ge=0,
        le=32,
        description="Number of decode workers, which read the KV of prefill workers. Must be set together with prefill_workers.",
    )
    gateways: int = Field(1, ge=1, le=16, description="Number of gateway processes. Each has a separate HTTP port.")
    tokenizers: int = Field(1, ge=1, le=16, description="Number of tokenizer processes.")
    detokenizers: int = Field(1, ge=1, le=16, description="Number of detokenizer processes.")
    redis_server: str = Field("", description="Path or name of a Redis or Valkey server program. Empty: the bundled Valkey.")
    playground: bool = Field(True, description="Serve the playground at / of the gateways.")
    demo: bool = Field(True, description="When all processes are ready, send one request and print its completion.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", description="Type of the workers' weights and KV.")
    num_threads: int = Field(
        0, ge=0, description="Compute threads of each worker. 0: the cores divided by the number of workers."
    )
    max_total_tokens: int = Field(
        0, ge=0, description="Size of each worker's KV pool in tokens. 0: the worker's mem_fraction_static sets the size."
    )
    worker_flags: str = Field("", description="Further flags of the workers, as one string, e.g. '--enable-mixed-chunk'.")
    gateway_flags: str = Field("", description="Further flags of the gateways, as one string.")
    state_dir: str = Field(
        "build/state",
        description="Folder of the state store, with a subfolder for each gateway port. Empty: responses, conversations and"
        " batches are not stored.",
    )
    log_dir: str = Field("build/run", description="Folder for the processes' logs, with a subfolder per gateway port.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of the lines in the processes' logs."
    )
    start_timeout_s: float = Field(
        600.0, gt=0, description="Seconds within which every process must be ready; otherwise the start fails."
    )

    @model_validator(mode="after")
    def _roles_go_together(self) -> LocalSettings:
        if bool(self.prefill_workers) != bool(self.decode_workers):
            raise ValueError("prefill_workers and decode_workers must be set together, both to at least 1")
        return self

    @property
    def worker_roles(self) -> list[str]:
        """The --disaggregation-mode of each worker process."""
        return ["prefill"] * self.prefill_workers + ["decode"] * self.decode_workers or ["both"] * self.workers
