"""Settings of the local launcher, which `rootstock serve` and `make run` pass on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from rootstock_llm.services.shared.settings import CONFIG_HELP


class LocalSettings(BaseSettings):
    """Settings from which the launcher makes the flags of each service.

    `rootstock serve MODEL` sets --model.
    """

    model_config = SettingsConfigDict(
        env_prefix="ROOTSTOCK_LOCAL_", frozen=True, extra="forbid", cli_kebab_case=True, cli_implicit_flags=True
    )

    config: str = Field("", description=CONFIG_HELP)
    model: str = Field("models/demo", description="Model folder in Hugging Face layout, or a hub id.")
    chat_template: str = Field("", description="File of a Jinja chat template that replaces the model's own. Empty: the model's.")
    served_model_name: str = Field(
        "", description="Name that clients use for the model; empty: the folder's own name, or the whole hub id."
    )
    port: int = Field(8000, ge=1, le=65535, description="HTTP port of the first gateway; all other ports are free ones.")
    admin_port: int = Field(
        0, ge=0, le=65535, description="HTTP port for operators (docs/reference/control.md), on loopback; 0: none."
    )
    workers: int = Field(1, ge=1, le=64, description="Number of worker processes.")
    prefill_workers: int = Field(
        0,
        ge=0,
        le=32,
        description="Number of prefill workers, which compute prompts for decode workers. Above 0, workers is ignored.",
    )
    decode_workers: int = Field(
        0,
        ge=0,
        le=32,
        description="Number of decode workers, which continue from the KV of prefill workers. Needed with prefill_workers.",
    )
    gateways: int = Field(1, ge=1, le=16, description="Number of gateway processes, each with an HTTP port of its own.")
    tokenizers: int = Field(1, ge=1, le=16, description="Number of tokenizer processes.")
    detokenizers: int = Field(1, ge=1, le=16, description="Number of detokenizer processes.")
    redis_server: str = Field("", description="Program of a Redis or Valkey server, a path or a name; empty: the bundled Valkey.")
    playground: bool = Field(True, description="The gateways serve the playground at /.")
    demo: bool = Field(True, description="Ask one question when all is ready and print the streamed answer.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", description="Type of the workers' weights and KV.")
    num_threads: int = Field(0, ge=0, description="Compute threads of each worker; 0: the cores shared among the workers.")
    max_total_tokens: int = Field(0, ge=0, description="KV pool of each worker in tokens; 0: from mem_fraction_static.")
    worker_flags: str = Field("", description="More flags for the workers, as one string, e.g. '--enable-mixed-chunk'.")
    gateway_flags: str = Field("", description="More flags for the gateways, as one string.")
    state_dir: str = Field(
        "build/state",
        description="Folder of the state store, with a subfolder for each gateway port. Empty: responses, conversations and"
        " batches are not stored.",
    )
    log_dir: str = Field("build/run", description="Folder for the processes' logs; one folder below it for each gateway port.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level in the processes' logs."
    )
    start_timeout_s: float = Field(600.0, gt=0, description="Seconds until every process must be ready.")

    @model_validator(mode="after")
    def _roles_go_together(self) -> LocalSettings:
        if bool(self.prefill_workers) != bool(self.decode_workers):
            raise ValueError("prefill_workers and decode_workers go together: set both to at least 1")
        return self

    @property
    def worker_roles(self) -> list[str]:
        """The --disaggregation-mode of each worker process."""
        return ["prefill"] * self.prefill_workers + ["decode"] * self.decode_workers or ["both"] * self.workers
