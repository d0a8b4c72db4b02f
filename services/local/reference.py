"""python -m services.local.reference: docs/configuration.md, written from the settings classes themselves."""

from __future__ import annotations

from pydantic_settings import BaseSettings

from services.detokenizer.settings import DetokenizerSettings
from services.gateway.config.settings import GatewaySettings
from services.local.settings import LocalSettings
from services.tokenizer.settings import TokenizerSettings
from services.worker.settings import WorkerSettings

SERVICES: dict[str, type[BaseSettings]] = {
    "gateway": GatewaySettings,
    "tokenizer": TokenizerSettings,
    "detokenizer": DetokenizerSettings,
    "worker": WorkerSettings,
    "local": LocalSettings,
}
HEAD = """# Configuration

Every setting of every process, written by `make docs` from the classes that read them. A flag wins over the environment,
the environment over the default. `.venv/bin/python -m services.NAME --help` says the same.
"""


def render() -> str:
    return HEAD + "".join(_section(name, cls) for name, cls in SERVICES.items())


def _section(name: str, cls: type[BaseSettings]) -> str:
    prefix = cls.model_config.get("env_prefix", "")
    lines = [f"\n## python -m services.{name}\n", "| flag | environment | default | meaning |", "| --- | --- | --- | --- |"]
    for field, info in cls.model_fields.items():
        default = "required" if info.is_required() else "" if info.default in ("", None) else f"`{info.default}`"
        lines.append(f"| `--{field.replace('_', '-')}` | `{prefix}{field.upper()}` | {default} | {info.description} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")
