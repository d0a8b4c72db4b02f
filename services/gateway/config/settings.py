"""The gateway's settings: one frozen object, filled from flags, then environment, then these defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode

from services.gateway.discovery.targets import check_target
from services.gateway.routing.config import RoutingConfig, RoutingPolicy
from services.shared.limits import MAX_BATCH_LINES, MAX_BODY_BYTES, MAX_FILE_BYTES
from services.shared.settings import ServiceSettings


def _split_commas(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _checked_targets(targets: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(check_target(target) for target in targets)


CommaSeparated = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)]
Targets = Annotated[CommaSeparated, AfterValidator(_checked_targets)]
TARGETS = "Comma separated: host:port, dns:///name:port (all addresses of the name), k8s:///service.namespace:port (by watch)."
ROUTING = RoutingConfig()


class GatewaySettings(ServiceSettings):
    """Metrics are on the HTTP port, at /metrics, unless settings say otherwise."""

    port: int = Field(8000, ge=0, le=65535, description="Port of the HTTP API. 0 takes a free one.")
    health_port: int = Field(7000, ge=0, le=65535, description="Port of the gRPC health service.")
    tokenizers: Targets = Field(("127.0.0.1:7001",), min_length=1, description=f"Where tokenizers are. {TARGETS}")
    detokenizers: Targets = Field(("127.0.0.1:7002",), min_length=1, description=f"Where detokenizers are. {TARGETS}")
    workers: Targets = Field(("127.0.0.1:7003",), min_length=1, description=f"Where workers are. {TARGETS}")
    dns_refresh_s: float = Field(
        2.0, gt=0, description="Seconds between two look-ups of a dns:/// target, or of a Service that cannot be watched."
    )
    redis_url: str = Field(
        "",
        description="Redis with the prefix index and the gateways' shares of API keys' limits, e.g. redis://127.0.0.1:6379/0."
        " Empty: own picks count alone, and each gateway keeps to its part of a limit.",
    )
    state_redis_url: str = Field(
        "",
        description="Redis with append-only file that keeps responses, conversations, files and batches, never the one with the"
        " index. Empty: nothing is kept, and there are no batches, and no responses in the background.",
    )
    state_ttl_s: int = Field(30 * 86_400, ge=1, description="Seconds for which it keeps what nobody uses.")
    state_records_per_key: int = Field(
        10_000, ge=1, description="Responses and conversations that an API key may have kept; files; batches."
    )
    state_bytes_per_key: int = Field(256 << 20, ge=1, description="Bytes that its responses and conversations may have.")
    state_patience_s: float = Field(
        5.0, ge=0, description="Seconds for which a call of it is tried again, as while it is restarted."
    )
    max_file_bytes: int = Field(
        MAX_FILE_BYTES, ge=1, le=MAX_FILE_BYTES, description="Largest file that is uploaded for a batch, in bytes."
    )
    max_batch_lines: int = Field(MAX_BATCH_LINES, ge=1, le=MAX_BATCH_LINES, description="Lines that a batch's file may have.")
    file_bytes_per_key: int = Field(
        1 << 30, ge=1, description="Bytes that an API key may have kept in files, those of its batches' results among them."
    )
    batch_lines: int = Field(
        16,
        ge=0,
        description="Lines of batches that this gateway has answered at once while it has no other requests; 0: it runs none.",
    )
    batch_lines_each: int = Field(16, ge=1, description="Lines of one batch among them.")
    batch_lines_beside: int = Field(
        1, ge=0, description="Lines of batches at once while it has other requests, and for five seconds after them."
    )
    batch_lease_s: float = Field(
        15.0, ge=3, description="Seconds without a sign of the gateway that runs a batch after which another one goes on with it."
    )
    background_responses: int = Field(
        256, ge=0, description="Responses in the background that this gateway has at work or waiting; 0: it takes none."
    )
    background_per_key: int = Field(
        100, ge=1, description="Responses in the background of an API key that are not over; one more gets 429."
    )
    background_timeout_s: int = Field(
        3600, ge=1, le=604_800, description="Seconds in which a response in the background is over, or has failed."
    )
    background_replay_s: int = Field(3600, ge=1, description="Seconds for which its events can be read again, once it is over.")
    background_lease_s: float = Field(
        5.0, ge=2, description="Seconds without a sign of the gateway that has it after which another one goes on with it."
    )
    model_name: str = Field("", description="Name that clients know the one model by. Empty: what its workers say.")
    models: CommaSeparated = Field(
        (),
        description="Models that are listed, whose requests wait also before any worker has named them, as from zero workers.",
    )
    routing_policy: RoutingPolicy = Field(RoutingPolicy.PREFIX_AWARE, description="How a worker is picked for a request.")
    routing_imbalance_abs: float = Field(
        ROUTING.gate_abs,
        ge=0,
        description="Workers are out of balance when their open requests differ by more than this and by the factor below.",
    )
    routing_imbalance_rel: float = Field(
        ROUTING.gate_rel, ge=1, description="That factor; out of balance, the idlest worker is picked."
    )
    routing_load_weight: float = Field(
        ROUTING.load_weight, ge=0, description="What relative load counts against a cached prefix in prefix_aware routing."
    )
    speculative_s: float = Field(
        30.0, gt=0, description="Seconds for which a prompt counts as cached where it was sent, until the worker says so."
    )
    max_speculative_blocks: int = Field(1 << 18, ge=0, description="Blocks of 64 tokens that may count so at once.")
    worker_queue_slack: float = Field(
        0.25,
        ge=0,
        description="Requests that a worker gets beyond those that it can run, as a share of these, two at least; more wait.",
    )
    worker_silence_s: float = Field(5.0, gt=0, description="Seconds without a word after which a worker is taken for lost.")
    unreachable_s: float = Field(
        1.5,
        ge=0,
        description="Seconds without a word that is waited for, and without a connection to its machine, after which a worker, a"
        " tokenizer or a detokenizer is taken for lost. 0: connections are not tried.",
    )
    breaker_faults: int = Field(5, ge=1, description="Faults of a worker in a row after which it is left alone for a while.")
    breaker_cooldown_s: float = Field(5.0, gt=0, description="Seconds of that while; then one request tries.")
    hedge_after_s: float = Field(
        0.0, ge=0, description="Seconds without a token after which a second worker gets a copy of a request; 0: never."
    )
    disaggregation_min_tokens: int = Field(
        512,
        ge=1,
        description="Tokens of a prompt beyond those that its decode worker has cached, from which a prefill worker computes it.",
    )
    enable_priority_scheduling: bool = Field(False, description="Requests that wait here go by their priority first.")
    schedule_low_priority_values_first: bool = Field(False, description="Lower values are more urgent.")
    api_keys_file: str = Field(
        "",
        description="File, or folder of *.json, with the accepted API keys and their limits (docs/how-to/keys.md)."
        " Empty: no check.",
    )
    salt_cache_by_key: bool = Field(False, description="No API key shares cached prefixes with another.")
    admin_host: str = Field(
        "127.0.0.1", description="Address that the operators' HTTP API listens on; others than loopback need control_token."
    )
    admin_port: int = Field(0, ge=0, le=65535, description="Port of the operators' HTTP API; 0: none.")
    worker_control_addresses: CommaSeparated = Field(
        (),
        description="Addresses of the workers' control services: comma separated host:port."
        " Empty: as each worker says, on the host that it is reached at.",
    )
    control_token: str = Field(
        "",
        repr=False,
        description="Token of the operators' HTTP API, of the workers' control services and of gateways among each other;"
        " empty: none.",
    )
    control_token_file: str = Field("", description="File that holds the operators' token, instead of control_token.")
    peer_host: str = Field("127.0.0.1", description="Address that the port for other gateways listens on.")
    peer_port: int = Field(0, ge=0, le=65535, description="gRPC port on which other gateways ask this one to abort; 0: none.")
    peers: Targets = Field(
        (), description=f"Where the other gateways' peer ports are; this one's own may be among them. {TARGETS}"
    )
    control_timeout_s: float = Field(60.0, gt=0, description="Seconds that an operation may take on a worker, waiting included.")
    max_concurrent_requests: int = Field(
        2048, ge=1, description="Generation requests in flight, and as many others with a body; one more gets 503."
    )
    max_waiting_requests: int = Field(
        1024, ge=0, description="Choices of one model that may wait for a worker with room; one more gets 503."
    )
    queue_timeout_s: float = Field(
        60.0, ge=0, description="Seconds that a request waits for a worker with room, a tokenizer or a detokenizer, then 503."
    )
    tokenize_timeout_s: float = Field(
        10.0, gt=0, description="Seconds that tokenizing one request may take, retries included, while a tokenizer is there."
    )
    keep_alive_s: int = Field(
        75,
        ge=1,
        description="Seconds that a connection is kept after an answer: longer than clients keep one.",
    )
    stop_delay_s: float = Field(
        0.0,
        ge=0,
        description="Seconds after SIGTERM in which /ready fails and requests are still taken, before the grace period: as long"
        " as balancers in front take to notice.",
    )
    body_timeout_s: float = Field(60.0, gt=0, description="Seconds in which a request's body must have arrived, then 408.")
    body_budget_bytes: int = Field(
        MAX_BODY_BYTES,
        ge=1,
        description="Bytes that all bodies above 64 KiB may hold at once until they are prepared; max_body_bytes at least.",
    )
    body_wait_s: float = Field(10.0, ge=0, description="Seconds that a body waits, unread, for room among those bytes, then 503.")
    request_timeout_s: float = Field(
        600.0, gt=0, le=604_800, description="Seconds from a request's arrival to its last byte, then 504."
    )
    sse_comment_s: float = Field(
        0.0,
        ge=0,
        description="Seconds of silence after which a stream gets a comment. The first one fixes its status at 200: what fails"
        " after it is an event. 0: none.",
    )
    retry_after_s: int = Field(
        1,
        ge=1,
        description="Least Retry-After of a 503, in seconds; while requests wait, what they need at the pace of late, up to 60.",
    )
    omit_hosted_tools: bool = Field(
        True,
        description="Hosted tools, which this server cannot run, are left out of chats, Responses and Messages, and the header"
        " x-rootstock-omitted-tools names them. Off: a request with one gets 400.",
    )
    docs_enabled: bool = Field(True, description="/docs and /openapi.json are served.")
    playground: bool = Field(
        False, description="The playground is served at /, and answers say what became of their request (x-rootstock-report)."
    )
    metrics_on_http: bool = Field(True, description="/metrics is served on the HTTP port.")
    metrics_host: str = Field("127.0.0.1", description="Address that the port for metrics alone listens on.")
    metrics_port: int = Field(0, ge=0, le=65535, description="Port that serves /metrics alone; 0: none.")
    cors_allow_origins: CommaSeparated = Field(
        (), description="Origins whose pages may call the API, comma separated, * for all. Empty: none."
    )
    access_log: Literal["json", "text", "off"] = Field(
        "json",
        description="Form of the access log: one line for each request, batch line, background response and admin"
        " request that ends. Health checks and scrapes have no line.",
    )
    access_log_file: str = Field("", description="File to which the access log is appended. Empty: standard error.")
    tls_cert_file: str = Field("", description="PEM file of the HTTP port's certificates, followed as it changes; empty: no TLS.")
    tls_key_file: str = Field("", description="PEM file of their key.")
    max_body_bytes: int = Field(MAX_BODY_BYTES, ge=1, le=MAX_BODY_BYTES, description="Largest body of an HTTP request, in bytes.")

    @property
    def expected_models(self) -> tuple[str, ...]:
        """Names of models that are served even while no worker is there."""
        return (self.model_name,) if self.model_name else tuple(self.models)

    @model_validator(mode="after")
    def _certificate_has_a_key(self) -> GatewaySettings:
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("tls_cert_file and tls_key_file go together")
        return self

    @model_validator(mode="after")
    def _largest_body_fits(self) -> GatewaySettings:
        if self.body_budget_bytes < self.max_body_bytes:
            raise ValueError("body_budget_bytes must be at least max_body_bytes")
        return self
