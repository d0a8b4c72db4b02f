"""Defines the gateway's settings. See services/shared/settings.py for their sources."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode

from rootstock_llm.services.gateway.discovery.endpoints import check_target
from rootstock_llm.services.gateway.routing.config import RoutingConfig, RoutingPolicy
from rootstock_llm.services.shared.limits import MAX_BATCH_LINES, MAX_BODY_BYTES, MAX_FILE_BYTES
from rootstock_llm.services.shared.settings import ServiceSettings


def _split_commas(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _checked_targets(targets: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(check_target(target) for target in targets)


CommaSeparated = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)]
Targets = Annotated[CommaSeparated, AfterValidator(_checked_targets)]
TARGETS = "Comma-separated: host:port, dns:///name:port (all addresses), k8s:///service.namespace:port (watched endpoints)."
ROUTING = RoutingConfig()


class GatewaySettings(ServiceSettings):
    """Settings of the gateway. By default, /metrics is on the HTTP port."""

    port: int = Field(8000, ge=0, le=65535, description="Port of the HTTP API. 0: any free port.")
    health_port: int = Field(7000, ge=0, le=65535, description="Port of the gRPC health service.")
    tokenizers: Targets = Field(("127.0.0.1:7001",), min_length=1, description=f"Addresses of the tokenizers. {TARGETS}")
    detokenizers: Targets = Field(("127.0.0.1:7002",), min_length=1, description=f"Addresses of the detokenizers. {TARGETS}")
    workers: Targets = Field(("127.0.0.1:7003",), min_length=1, description=f"Addresses of the workers. {TARGETS}")
    dns_refresh_s: float = Field(
        2.0, gt=0, description="Seconds between two look-ups of a dns:/// target, or of a Service that cannot be watched."
    )
    redis_url: str = Field(
        "",
        description="Redis with the prefix index and the gateways' shares of API key limits, e.g. redis://127.0.0.1:6379/0."
        " Empty: routing knows only the requests of this gateway, and each gateway grants a fixed part of a limit.",
    )
    state_redis_url: str = Field(
        "",
        description="Redis with an append-only file that stores responses, conversations, files and batches. It must not be the"
        " Redis of the index. Empty: nothing is stored, and there are no batches and no background responses.",
    )
    state_ttl_s: int = Field(30 * 86_400, ge=1, description="Seconds without use after which the store deletes a record.")
    state_records_per_key: int = Field(
        10_000,
        ge=1,
        description="Largest number of stored responses and conversations per API key. The same limit applies to an API key's"
        " files, and to its batches.",
    )
    state_bytes_per_key: int = Field(256 << 20, ge=1, description="Bytes of stored responses and conversations per API key.")
    state_patience_s: float = Field(
        5.0, ge=0, description="Seconds for which a failed call of the store is retried, e.g. while the store restarts."
    )
    max_file_bytes: int = Field(
        MAX_FILE_BYTES, ge=1, le=MAX_FILE_BYTES, description="Largest file that a client may upload, in bytes."
    )
    max_batch_lines: int = Field(MAX_BATCH_LINES, ge=1, le=MAX_BATCH_LINES, description="Largest number of lines of a batch.")
    file_bytes_per_key: int = Field(
        1 << 30, ge=1, description="Bytes of stored files per API key, including the result files of its batches."
    )
    batch_lines: int = Field(
        16,
        ge=0,
        description="Batch lines that this gateway computes at once while it has no other requests. 0: it runs no batches.",
    )
    batch_lines_each: int = Field(16, ge=1, description="Largest number of lines of one batch that a gateway computes at once.")
    batch_lines_beside: int = Field(
        1,
        ge=0,
        description="Batch lines that this gateway computes at once while it has other requests, and for 5 s after the last one.",
    )
    batch_lease_s: float = Field(
        15.0, ge=3, description="Seconds without a lease renewal after which another gateway continues a batch."
    )
    background_responses: int = Field(
        256,
        ge=0,
        description="Largest number of background responses that run or wait here. 0: this gateway accepts and runs none.",
    )
    background_per_key: int = Field(
        100, ge=1, description="Largest number of unfinished background responses per API key. Further requests get 429."
    )
    background_timeout_s: int = Field(
        3600, ge=1, le=604_800, description="Seconds after which an unfinished background response fails."
    )
    background_replay_s: int = Field(3600, ge=1, description="Seconds for which the events of a finished response can be read.")
    background_lease_s: float = Field(
        5.0, ge=2, description="Seconds without a lease renewal after which another gateway continues a background response."
    )
    model_name: str = Field("", description="Name of the only model for clients. Empty: the name that workers report.")
    models: CommaSeparated = Field(
        (),
        description="Models that are listed and accept requests even before a worker reports them, e.g. when scaled to zero.",
    )
    routing_policy: RoutingPolicy = Field(RoutingPolicy.PREFIX_AWARE, description="Policy that picks the worker for a request.")
    routing_imbalance_abs: float = Field(
        ROUTING.gate_abs,
        ge=0,
        description="Load is imbalanced if a worker has more than n + this number and more than n x --routing-imbalance-rel open"
        " requests. n is the number of open requests of the least loaded worker, which prefix_aware routing then picks.",
    )
    routing_imbalance_rel: float = Field(
        ROUTING.gate_rel,
        ge=1,
        description="Factor for --routing-imbalance-abs. While load is imbalanced, the least loaded worker is picked.",
    )
    routing_load_weight: float = Field(
        ROUTING.load_weight,
        ge=0,
        description="Weight of load in prefix_aware routing. Score: share of the prompt that the cache saves - weight x load /"
        " mean load.",
    )
    speculative_s: float = Field(
        30.0,
        gt=0,
        description="Seconds for which a routed prompt counts as cached at its worker before the worker reports the blocks.",
    )
    max_speculative_blocks: int = Field(
        1 << 18,
        ge=0,
        description="Largest number of 64-token blocks, over all workers, that the gateway counts as cached before a worker"
        " reports them. If there are more, it drops the oldest.",
    )
    worker_queue_slack: float = Field(
        0.25,
        ge=0,
        description="Requests that a worker queues beyond its running slots, as a share of these slots, but at least 2. Other"
        " requests wait in the gateway.",
    )
    worker_silence_s: float = Field(5.0, gt=0, description="Seconds without a message after which a worker counts as lost.")
    unreachable_s: float = Field(
        1.5,
        ge=0,
        description="A worker, tokenizer or detokenizer counts as lost if an expected message is missing for this number of"
        " seconds and its machine does not respond to new connections. 0: no connections are tried.",
    )
    breaker_faults: int = Field(
        5,
        ge=1,
        description="Consecutive faults after which a circuit breaker opens. Its worker then gets no requests.",
    )
    breaker_cooldown_s: float = Field(
        5.0, gt=0, description="Seconds for which the circuit breaker stays open before a trial request."
    )
    hedge_after_s: float = Field(
        0.0, ge=0, description="Seconds without a first token after which a second worker gets a copy of a request. 0: never."
    )
    disaggregation_min_tokens: int = Field(
        512,
        ge=1,
        description="A prefill worker computes a prompt if at least this number of the prompt's tokens are not cached at the"
        " decode worker.",
    )
    enable_priority_scheduling: bool = Field(
        False,
        description="Sorts requests that wait in the gateway by priority. If False, their order does not depend on priority.",
    )
    schedule_low_priority_values_first: bool = Field(False, description="Lower priority values are more urgent.")
    api_keys_file: str = Field(
        "",
        description="File, or folder of *.json, with the accepted API keys and their limits (docs/how-to/keys.md)."
        " Empty: no check.",
    )
    salt_cache_by_key: bool = Field(False, description="API keys do not share cached prefixes with each other.")
    admin_host: str = Field(
        "127.0.0.1", description="Listen address of the operators' HTTP API. Addresses other than loopback need a control token."
    )
    admin_port: int = Field(0, ge=0, le=65535, description="Port of the operators' HTTP API. 0: none.")
    worker_control_addresses: CommaSeparated = Field(
        (),
        description="Addresses of the workers' control services: comma-separated host:port."
        " Empty: the port that each worker reports, on the host of its address.",
    )
    control_token: str = Field(
        "",
        repr=False,
        description="Token for the operators' HTTP API, for the workers' control services and for calls between gateways."
        " Empty: none.",
    )
    control_token_file: str = Field("", description="File with the token, instead of --control-token.")
    peer_host: str = Field("127.0.0.1", description="Listen address of the port for other gateways.")
    peer_port: int = Field(
        0, ge=0, le=65535, description="gRPC port on which other gateways abort requests of this one. 0: none."
    )
    peers: Targets = Field(
        (), description=f"Addresses of the other gateways' peer ports. May include this gateway's own. {TARGETS}"
    )
    control_timeout_s: float = Field(
        60.0, gt=0, description="Seconds that a control operation may take on a worker, including waiting."
    )
    max_concurrent_requests: int = Field(
        2048,
        ge=1,
        description="Largest number of open generation requests. Other requests with a body have a separate limit of the same"
        " size. Further requests get 503.",
    )
    max_waiting_requests: int = Field(
        1024,
        ge=0,
        description="Largest number of choices per model that wait for a worker with free slots. Further choices get 503.",
    )
    queue_timeout_s: float = Field(
        60.0,
        ge=0,
        description="Seconds that a request waits for a worker with free slots, a tokenizer or a detokenizer before it gets 503.",
    )
    tokenize_timeout_s: float = Field(
        10.0, gt=0, description="Seconds for tokenizing one request, including retries, while a tokenizer is connected."
    )
    keep_alive_s: int = Field(
        75,
        ge=1,
        description="Seconds for which an idle connection stays open after a response. Use more than the clients' idle limit.",
    )
    stop_delay_s: float = Field(
        0.0,
        ge=0,
        description="Seconds after SIGTERM, before the grace period, in which /ready fails but requests are accepted. Use the"
        " time that load balancers need to notice.",
    )
    body_timeout_s: float = Field(60.0, gt=0, description="Seconds in which a request's body must arrive, else 408.")
    body_budget_bytes: int = Field(
        MAX_BODY_BYTES,
        ge=1,
        description="Memory budget in bytes for all request bodies above 64 KiB, each from its arrival until it is prepared. At"
        " least --max-body-bytes.",
    )
    body_wait_s: float = Field(10.0, ge=0, description="Seconds that a body waits for memory of --body-budget-bytes, else 503.")
    request_timeout_s: float = Field(
        600.0, gt=0, le=604_800, description="Seconds from a request's arrival to the last byte of the response, else 504."
    )
    sse_comment_s: float = Field(
        0.0,
        ge=0,
        description="Seconds of silence after which a stream gets a comment. The first comment sets the status to 200, so later"
        " errors are events. 0: no comments.",
    )
    retry_after_s: int = Field(
        1,
        ge=1,
        description="Smallest Retry-After of a 503 in seconds. While requests wait, Retry-After is the time that they need at the"
        " recent rate, up to 60.",
    )
    omit_hosted_tools: bool = Field(
        True,
        description="Hosted tools, which this server cannot run, are omitted from chats, Responses and Messages. The header"
        " x-rootstock-omitted-tools names them. Off: a request with a hosted tool gets 400.",
    )
    docs_enabled: bool = Field(True, description="Serve /docs and /openapi.json.")
    playground: bool = Field(
        False,
        description="Serve the playground at /, and report how a request was served if it has the header x-rootstock-report: 1.",
    )
    metrics_on_http: bool = Field(True, description="Serve /metrics on the HTTP port.")
    metrics_host: str = Field("127.0.0.1", description="Listen address of the separate metrics port.")
    metrics_port: int = Field(0, ge=0, le=65535, description="Separate port that serves only /metrics. 0: none.")
    cors_allow_origins: CommaSeparated = Field(
        (), description="Origins whose pages may call the API, comma-separated; * for all. Empty: none."
    )
    access_log: Literal["json", "text", "off"] = Field(
        "json",
        description="Form of the access log: one line for each request, batch line, background response and admin"
        " request that ends. Requests to /health, /ping, /ready, /readiness and /metrics have no line.",
    )
    access_log_file: str = Field("", description="File to which the access log is appended. Empty: standard error.")
    tls_cert_file: str = Field(
        "", description="PEM file with the HTTP port's certificates. Reloaded when it changes. Empty: no TLS."
    )
    tls_key_file: str = Field("", description="PEM file with the private key of --tls-cert-file.")
    max_body_bytes: int = Field(MAX_BODY_BYTES, ge=1, le=MAX_BODY_BYTES, description="Largest body of an HTTP request, in bytes.")

    @property
    def expected_models(self) -> tuple[str, ...]:
        """Names of models that accept requests even before a worker is connected."""
        return (self.model_name,) if self.model_name else tuple(self.models)

    @model_validator(mode="after")
    def _certificate_has_a_key(self) -> GatewaySettings:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("tls_cert_file and tls_key_file must be set together")
        return self

    @model_validator(mode="after")
    def _largest_body_fits(self) -> GatewaySettings:
        if self.body_budget_bytes < self.max_body_bytes:
            raise ValueError(
                f"body_budget_bytes is {self.body_budget_bytes}; it must be at least max_body_bytes, {self.max_body_bytes}"
            )
        return self
