"""The settings of a service: a frozen class that is filled from flags, then the environment, then a file, then defaults.

A service subclasses ServiceSettings directly. Each field has a type, a help text with the unit, and a default unless the field is
required. A field is set by `--field-name VALUE` on the command line, by ROOTSTOCK_FIELD_NAME in the environment, or by
`field-name: VALUE` or `field_name: VALUE` in the file that `--config` names.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, CliSettingsSource, EnvSettingsSource, SettingsConfigDict

from rootstock_llm.services.shared.flag_parser import FlagParser, nearest

ENV_PREFIX = "ROOTSTOCK_"
WRONG_SETTINGS = 2  # exit status if settings, or the files that they name, are wrong; a restart would not help
CONFIG = "config"  # name of the field with the settings file
CONFIG_HELP = "YAML file with settings by name (log-level or log_level). Flags and the environment win over it. Empty: no file."
NULL = "tag:yaml.org,2002:null"
S = TypeVar("S", bound=BaseSettings)


class TlsSettings(BaseSettings):
    """Settings of TLS between services. Programs that call a control service have these settings, too."""

    mtls_cert_file: str = Field(
        "",
        description="PEM file with the certificate of this process for TLS between services. Reloaded when it changes. Empty:"
        " connections between services are not encrypted (docs/how-to/kubernetes/security.md).",
    )
    mtls_key_file: str = Field("", description="PEM file with the key of --mtls-cert-file.")
    mtls_ca_file: str = Field(
        "", description="PEM file with the authorities that sign the services' certificates. Other certificates are refused."
    )
    mtls_token_file: str = Field(
        "",
        description="File with tokens for calls between services, one per line. A call must carry one of them in addition to a"
        " certificate; this process sends the first. Empty: no tokens.",
    )

    @model_validator(mode="after")
    def _files_go_together(self) -> Self:
        files = {name: getattr(self, name) for name in ("mtls_cert_file", "mtls_key_file", "mtls_ca_file")}
        missing = [name for name, path in files.items() if not path]
        if missing and (len(missing) < len(files) or self.mtls_token_file):
            raise ValueError(
                f"{', '.join(files)} must all be set if one of them or mtls_token_file is set; missing: {', '.join(missing)}"
            )
        return self


class ServiceSettings(TlsSettings):
    """Settings of every service. By default, ports listen on loopback only."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,  # so that `bool | None` also gets two flags
        cli_avoid_json=True,
        protected_namespaces=(),
    )

    config: str = Field("", description=CONFIG_HELP)
    host: str = Field("127.0.0.1", description="Listen address of the service's port.")
    health_port: int = Field(
        0, ge=0, le=65535, description="Port of a separate gRPC health service for probes, without TLS. 0: no separate port."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of the log lines that are written."
    )
    grace_s: float = Field(10.0, ge=0, description="Seconds after SIGTERM for which running requests may continue.")
    otlp_endpoint: str = Field(
        "",
        pattern=r"^((https?://)?[^\s/]+:\d+)?$",
        description="Address of the OTLP/gRPC collector for spans: host:port, or https://host:port for TLS. Empty: no tracing.",
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of the requests without a trace context that are traced, 0 to 1."
    )


class WrongConfig(ValueError):
    """The file of --config cannot be used. The message is one sentence without the file's values."""


def load(cls: type[S], prog: str, argv: list[str] | None = None) -> S:
    """Returns the settings of a process.

    Exits with status 2 and one line per wrong field if settings are wrong. Prints the help and exits with status 0 on --help.
    """
    values: dict[str, Any] = {"_cli_settings_source": _flags(cls, prog, sys.argv[1:] if argv is None else argv)}
    path = ""
    if CONFIG in cls.model_fields:
        given = {**EnvSettingsSource(cls)(), **values["_cli_settings_source"]()}
        path = str(given.get(CONFIG) or "")
        try:
            from_file = config_values(Path(path), cls) if path else {}
        except WrongConfig as error:
            print(f"{prog}: {error}", file=sys.stderr)
            raise SystemExit(WRONG_SETTINGS) from None
        values |= {name: value for name, value in from_file.items() if name not in given}
    return load_given(cls, prog, values, path)


def load_given(cls: type[S], prog: str, values: Mapping[str, Any], path: str = "") -> S:
    """Returns settings with these values. Other fields get their values from the environment.

    Exits with status 2 and one line per wrong field if settings are wrong.

    Args:
        path: the settings file from which the values come, for messages; "" if there is no file.
    """
    try:
        return cls(**values)
    except ValidationError as error:
        for sentence in _wrong_fields(error, values if path else (), path):
            print(f"{prog}: {sentence}", file=sys.stderr)
        raise SystemExit(WRONG_SETTINGS) from None


def _flags(cls: type[BaseSettings], prog: str, argv: list[str]) -> CliSettingsSource[Any]:
    """Returns the settings of a command line. Exits with status 2 and one line if it is wrong."""
    parser = FlagParser(
        prog,
        description=inspect.cleandoc(cls.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return CliSettingsSource(cls, cli_prog_name=prog, cli_parse_args=argv, root_parser=parser)


def config_values(path: Path, cls: type[BaseSettings]) -> dict[str, Any]:
    """Returns the settings in a YAML file by field. A value is text, as in the environment, or a list of texts.

    Raises:
        WrongConfig: the file is not readable or not a flat mapping, or has an unknown or a repeated key.
    """
    values: dict[str, Any] = {}
    for key, value in _config_nodes(path):
        if not isinstance(key, yaml.ScalarNode):
            raise WrongConfig(f"--{CONFIG} {path} has a key at line {_line(key)} that is not the name of a setting.")
        name = key.value.replace("-", "_")
        if name == CONFIG or name not in cls.model_fields:
            raise WrongConfig(f"--{CONFIG} {path}: {key.value} is not a setting of this program; {_remedy(key.value, cls)}")
        if name in values:
            raise WrongConfig(f"--{CONFIG} {path} has {key.value} twice; remove one.")
        values[name] = _config_value(value, f"--{CONFIG} {path}: {key.value}")
    return values


def _config_nodes(path: Path) -> list[tuple[yaml.Node, yaml.Node]]:
    """Returns the top-level keys and values of a YAML file. Raises WrongConfig."""
    try:
        root = yaml.compose(path.read_text("utf-8-sig"), yaml.SafeLoader)
    except OSError as error:
        raise WrongConfig(f"--{CONFIG} {path} is not readable: {str(error.strerror).lower()}.") from None
    except UnicodeDecodeError:
        raise WrongConfig(f"--{CONFIG} {path} is not UTF-8 text.") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)  # only the position: the parser's message may quote a secret value
        position = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise WrongConfig(f"--{CONFIG} {path} is not YAML{position}; quote values that begin with a special character.") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise WrongConfig(f"--{CONFIG} {path} is not a mapping; write `name: value`, one per line.")
    return list(root.value)


def _config_value(node: yaml.Node, key: str) -> str | list[str]:
    if isinstance(node, yaml.ScalarNode):
        return _text(node)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return [_text(item) for item in node.value]
    raise WrongConfig(f"{key} has nested values; write text, a number, true, false, or a list of texts.")


def _text(node: yaml.ScalarNode) -> str:
    """Returns the value's text as in the file. `1.10` stays "1.10", `no` stays "no", and `null` becomes ""."""
    return "" if node.tag == NULL else str(node.value)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _remedy(key: str, cls: type[BaseSettings]) -> str:
    """Returns a sentence that suggests the nearest setting, with hyphens if the key has hyphens."""
    like = nearest(key, set(cls.model_fields) - {CONFIG})
    if not like:
        return "--help lists the settings."
    return f"did you mean {like.replace('_', '-') if '-' in key else like}?"


def of_values(cls: type[S], values: Mapping[str, Any]) -> S:
    """Returns settings with these values. Other fields get their defaults; flags and the environment are ignored.

    Raises:
        ValueError: a value is wrong. The message names each wrong field.
    """
    settings = cls.__new__(cls)
    try:
        BaseModel.__init__(settings, **values)  # BaseSettings.__init__ would read the environment
    except ValidationError as error:
        raise ValueError("; ".join(_wrong_fields(error))) from None
    return settings


def _wrong_fields(error: ValidationError, by_file: Collection[str] = (), path: str = "") -> list[str]:
    """Returns a message for each fault. If a fault concerns several fields, its message already names them.

    Args:
        by_file: fields whose values come from the file at `path`.
    """
    sentences = []
    for item in error.errors():
        name, fault = ".".join(map(str, item["loc"])), str(item["msg"]).removeprefix("Value error, ")
        origin = f" in --{CONFIG} {path}" if item["loc"] and item["loc"][0] in by_file else ""
        sentences.append(f"{name}{origin}: {fault}" if name else fault)
    return sentences


def served_name(folder: str | Path, name: str = "") -> str:
    """Returns the model name for clients: `name`, or if `name` is empty, the folder's last component, without resolving links."""
    return name or os.path.basename(os.path.abspath(folder))
