"""python -m rootstock_llm.services.local.reference: prints docs/reference/configuration.md from the settings classes."""

from __future__ import annotations

from pydantic_settings import BaseSettings

from rootstock_llm.services.detokenizer.settings import DetokenizerSettings
from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.local.settings import LocalSettings
from rootstock_llm.services.tokenizer.settings import TokenizerSettings
from rootstock_llm.services.worker.settings import WorkerSettings

SERVICES: dict[str, type[BaseSettings]] = {
    "gateway": GatewaySettings,
    "tokenizer": TokenizerSettings,
    "detokenizer": DetokenizerSettings,
    "worker": WorkerSettings,
    "local": LocalSettings,
}
HEAD = """# Configuration

This page lists every setting of every process. `make docs` writes it from the classes that read the settings. A flag overrides
the environment variable. The variable overrides the file of `--config`, and the file overrides the default.
`.venv/bin/python -m rootstock_llm.services.NAME --help` prints the same list.

The file of `--config` is a flat YAML mapping. A key is the name of a setting, as `max-body-bytes` or `max_body_bytes`. A value is
read as text, like that of an environment variable, so that `1.10` stays `1.10`. If a setting takes values that are separated by
commas, the file may have a list. Each process has a separate file. If a key is not a setting of the process, the process refuses
the file and names the most similar setting.

<!-- output: example -->
```yaml
# gateway.yaml, for `.venv/bin/python -m rootstock_llm.services.gateway --config gateway.yaml`
port: 8000
workers: [10.0.0.5:7003, 10.0.0.6:7003]
max-concurrent-requests: 512
access-log: json
```

If the file contains a token, make it readable only for the user of the process (mode 0400). Values of the file are never logged.
"""


def render() -> str:
    return HEAD + "".join(_section(name, cls) for name, cls in SERVICES.items())


def _section(name: str, cls: type[BaseSettings]) -> str:
    prefix = cls.model_config.get("env_prefix", "")
    lines = [
        f"\n## python -m rootstock_llm.services.{name}\n",
        "| flag | environment | default | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for field, info in cls.model_fields.items():
        default = "required" if info.is_required() else "" if info.default in ("", None) else f"`{info.default}`"
        lines.append(f"| `--{field.replace('_', '-')}` | `{prefix}{field.upper()}` | {default} | {info.description} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")
