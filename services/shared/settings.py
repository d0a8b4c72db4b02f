"""Settings of a service: one frozen class per process, filled from flags, then environment, then defaults.

A service subclasses ServiceSettings directly; services never inherit from one another. Every field has a type, a default, a
unit and a help text in its Field. `--field-name VALUE` on the command line; ROOTSTOCK_FIELD_NAME in the environment.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX = "ROOTSTOCK_"
WRONG_SETTINGS = 2  # exit status if settings, or the files that they name, are refused: another start would refuse them again
S = TypeVar("S", bound=BaseSettings)


class TlsSettings(BaseSettings):
    """Of TLS between services: of each of them, and of who calls their control services."""

    mtls_cert_file: str = Field(
        "",
        description="PEM file of the certificate that this process shows the other services (docs/kubernetes/security.md),"
        " followed as it changes. Empty: what they say to each other is in the clear.",
    )
    mtls_key_file: str = Field("", description="PEM file of its key.")
    mtls_ca_file: str = Field("", description="PEM file of the authorities that sign the services' certificates, and no others.")
    mtls_token_file: str = Field(
        "", description="File with a token that all services share beside their certificates, one a line; the first one is sent."
    )

    @model_validator(mode="after")
    def _files_go_together(self) -> Self:
        files = {name: getattr(self, name) for name in ("mtls_cert_file", "mtls_key_file", "mtls_ca_file")}
        missing = [name for name, path in files.items() if not path]
        if missing and (len(missing) < len(files) or self.mtls_token_file):
            raise ValueError(f"{', '.join(files)} go together, and mtls_token_file needs them: missing {', '.join(missing)}")
        return self


class ServiceSettings(TlsSettings):
    """What every service has. Defaults bind loopback."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        protected_namespaces=(),
    )

    host: str = Field("127.0.0.1", description="Address that the service's port listens on.")
    health_port: int = Field(
        0, ge=0, le=65535, description="Port of a gRPC health service alone, in the clear, for probes; 0: none beside the port's."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level that is logged.")
    grace_s: float = Field(10.0, ge=0, description="Seconds that work in flight gets after SIGTERM.")
    otlp_endpoint: str = Field(
        "",
        pattern=r"^((https?://)?[^\s/]+:\d+)?$",
        description="OTLP/gRPC collector that spans go to: host:port, https:// before it for TLS. Empty: no tracing.",
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of requests that are traced where their client's trace context does not say."
    )


def load(cls: type[S], prog: str, argv: list[str] | None = None) -> S:
    """The settings of a process. Exits with status 2 and one line per wrong field, or prints --help and exits 0."""
    return load_given(cls, prog, {"_cli_parse_args": sys.argv[1:] if argv is None else argv, "_cli_prog_name": prog})


def load_given(cls: type[S], prog: str, values: Mapping[str, Any]) -> S:
    """Returns these values, and else those of the environment. Exits with status 2 and one line per wrong field."""
    try:
        return cls(**values)
    except ValidationError as error:
        for sentence in _wrong_fields(error):
            print(f"{prog}: {sentence}", file=sys.stderr)
        raise SystemExit(WRONG_SETTINGS) from None


def of_values(cls: type[S], values: Mapping[str, Any]) -> S:
    """These values, and else the class's defaults: neither flags nor the environment are read. Raises ValueError naming each
    wrong field."""
    settings = cls.__new__(cls)
    try:
        BaseModel.__init__(settings, **values)  # BaseSettings' own reads the environment
    except ValidationError as error:
        raise ValueError("; ".join(_wrong_fields(error))) from None
    return settings


def _wrong_fields(error: ValidationError) -> list[str]:
    """One sentence for each. A fault of several fields together names them itself."""
    found = [(".".join(map(str, item["loc"])), str(item["msg"]).removeprefix("Value error, ")) for item in error.errors()]
    return [f"{name}: {fault}" if name else fault for name, fault in found]
