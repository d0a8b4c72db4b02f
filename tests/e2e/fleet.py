"""A fleet of real processes: several of each service, and Redis. A test can kill, stop or restart each process.

Services reach Redis through a proxy that can add delay. Tests can cut the connection to the worker `far_worker`, which runs in a
network namespace if this process may create one, and otherwise behind a proxy.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import psutil
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from rootstock_llm.services.local.plan import Part, num_ports, parts, state_folder
from rootstock_llm.services.local.ports import HOST, free_ports
from rootstock_llm.services.local.settings import LocalSettings
from rootstock_llm.services.local.supervisor import Child
from tests.e2e import fleet_namespace
from tests.e2e.fleet_namespace import Namespace
from tests.e2e.fleet_proxy import TcpProxy
from tests.e2e.system import DEMO, START_S, wait_until

SIZES = {"gateways": 2, "tokenizers": 2, "detokenizers": 2, "workers": 4}
SETTINGS = {
    **SIZES,
    "dtype": "float32",  # in float32, a request's tokens do not depend on the other requests of a step
    "num_threads": 1,
    "max_total_tokens": 12_288,
    "log_level": "info",
    "gateway_flags": "--grace-s 60",  # after SIGTERM, a gateway has time to finish its streams
}
MODEL = "demo"


class Fleet:
    """A context manager that starts all processes of a fleet and ends them on exit.

    Args:
        down: names of processes that are not started on entry.
        settings: settings of LocalSettings; they override SETTINGS.
    """

    def __init__(self, log_dir: Path, down: tuple[str, ...] = (), **settings: Any) -> None:
        port, redis_target, far_port, *ports = free_ports(3 + 96)
        values = {"model": str(DEMO), "port": port, "state_dir": str(log_dir / "state"), **SETTINGS, **settings}
        local = LocalSettings(_cli_parse_args=False, **values)  # type: ignore[call-arg]
        started = parts(local, values["model"], ports[: num_ports(local)])
        self.parts: dict[str, Part] = {part.command.name: part for part in started}
        self.urls = {name: part.url for name, part in self.parts.items() if part.url}
        self.workers = [name for name in self.parts if name.startswith("worker")]
        self.far_worker = self.workers[-1]
        self._far_host = HOST
        self._down = down
        self._open = contextlib.ExitStack()
        self._namespace = Namespace() if fleet_namespace.is_permitted() else None
        self._add_redis_proxy(ports[0], redis_target)
        self._isolate_far_worker(ports[0], far_port)
        log_dir.mkdir(parents=True, exist_ok=True)
        state_folder(local).mkdir(parents=True, exist_ok=True)
        self.children = {name: Child(part.command, log_dir) for name, part in self.parts.items()}

    def _add_redis_proxy(self, port: int, target: int) -> None:
        """Moves Redis to the port `target`, and adds a proxy on `port`, to which all services connect."""
        argv = self.parts["redis"].command.argv
        argv[argv.index("--port") + 1] = str(target)
        hosts = (HOST, self._namespace.near) if self._namespace else (HOST,)
        self.redis_proxy = TcpProxy(port, target, hosts)
        self.redis = redis.Redis(HOST, target, socket_timeout=5)

    def _isolate_far_worker(self, redis_port: int, far_port: int) -> None:
        """Puts the last worker into a network namespace or behind a proxy, and adds flags for the new addresses.

        The added flags override earlier ones, because a service uses the last value of a flag.
        """
        part = self.parts[self.far_worker]
        argv, port = part.command.argv, part.health
        self._far_proxy = None if self._namespace else TcpProxy(far_port, port)
        if self._namespace:
            self._far_host = self._namespace.far
            redis_url = f"redis://{self._namespace.near}:{redis_port}/0"
            argv += ["--host", self._far_host, "--metrics-host", self._far_host, "--redis-url", redis_url]
            argv[:] = self._namespace.argv(argv)
        else:
            port = far_port
        near = [f"{HOST}:{self.parts[name].health}" for name in self.workers[:-1]]
        for name in self.urls:
            self.parts[name].command.argv.extend(["--workers", ",".join([*near, f"{self._far_host}:{port}"])])

    # Start and end

    def __enter__(self) -> Fleet:
        try:
            if self._namespace:
                self._open.enter_context(self._namespace)
            self._open.callback(self._end_all)
            self._open.enter_context(self.redis_proxy)
            if self._far_proxy:
                self._open.enter_context(self._far_proxy)
            for name in self.children:
                if name not in self._down:
                    self.start(name)
            if not self._down:
                self.wait_ready()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    def _end_all(self) -> None:
        for child in self.children.values():
            child.signal(signal.SIGCONT)
            child.signal(signal.SIGKILL if "gateway" in child.command.name else signal.SIGTERM)
        deadline = time.monotonic() + 6
        while time.monotonic() < deadline and any(self.is_alive(name) for name in self.children):
            time.sleep(0.05)
        for child in self.children.values():
            child.kill_group()
        wait_until(lambda: not any(self.is_alive(name) for name in self.children), 60, "the end of every process")

    def restore(self) -> None:
        """Ends all faults that a test has caused: delay, partition, stopped and ended processes, and Redis' memory limit."""
        self.redis_proxy.delay_s = 0.0
        self.redis_proxy.release()
        self.join()
        for name, child in self.children.items():
            if not self.is_alive(name):
                self.start(name)
            child.signal(signal.SIGCONT)
        self.wait_ready()
        self.redis.config_set("maxmemory", 0)

    # One process

    def is_alive(self, name: str) -> bool:
        return self.children[name].running

    def start(self, name: str) -> None:
        self.children[name].start()

    def kill(self, name: str) -> None:
        """Sends SIGKILL and waits until the process has ended."""
        self.children[name].signal(signal.SIGKILL)
        wait_until(lambda: not self.is_alive(name), 60, f"{name} to end after SIGKILL")

    def term(self, name: str, within_s: float = 90.0) -> None:
        """Sends SIGTERM and waits until the process has ended."""
        self.children[name].signal(signal.SIGTERM)
        wait_until(lambda: not self.is_alive(name), within_s, f"{name} to end after SIGTERM")

    def stop(self, name: str) -> None:
        """Sends SIGSTOP: the process's sockets stay open and send nothing."""
        self.children[name].signal(signal.SIGSTOP)

    def cont(self, name: str) -> None:
        self.children[name].signal(signal.SIGCONT)

    def cut(self) -> None:
        """Partitions far_worker: no byte reaches it or comes from it, and its connections stay open."""
        if self._namespace:
            self._namespace.cut()
        elif self._far_proxy:
            self._far_proxy.hold()

    def join(self) -> None:
        """Ends the partition and waits until far_worker is reachable.

        This can take seconds, because the kernel caches failed look-ups of the worker's link address.
        """
        if self._namespace:
            self._namespace.join()
            wait_until(lambda: self._is_reachable(self.far_worker), START_S, f"{self.far_worker} to be reachable")
        elif self._far_proxy:
            self._far_proxy.release()

    # Readiness

    def is_ready(self, name: str) -> bool:
        if name == "redis":
            try:
                return bool(self.redis.ping())
            except redis.exceptions.RedisError:
                return False
        part = self.parts[name]
        if name == "state":
            return self.children[name].exit_code is None
        request = health_pb2.HealthCheckRequest(service=part.service)
        with grpc.insecure_channel(f"{self._host(name)}:{part.health}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
            except grpc.RpcError:
                return False
        serving = bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        return serving and (name not in self.urls or self._has_peers(name))

    def _is_reachable(self, name: str) -> bool:
        """Returns whether a connection attempt is accepted or refused. Only a partitioned process does neither."""
        with socket.socket() as connection:
            connection.settimeout(1)
            error = connection.connect_ex((self._host(name), self.parts[name].health))
        return error in (0, errno.ECONNREFUSED)

    def _has_peers(self, gateway: str) -> bool:
        try:
            with urllib.request.urlopen(f"{self.urls[gateway]}/readiness", timeout=2) as response:
                return int(response.status) == 200
        except OSError:
            return False

    def is_listening(self, gateway: str) -> bool:
        """Whether the gateway's HTTP port responds, even with an error status."""
        try:
            with urllib.request.urlopen(f"{self.urls[gateway]}/health", timeout=5) as response:
                return int(response.status) == 200
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def wait_ready(self, *names: str) -> None:
        """Waits until the named processes are ready. Without names, waits for all processes."""
        for name in names or self.children:
            wait_until(lambda name=name: self._is_up(name), START_S, f"{name} to be ready")  # type: ignore[misc]

    def _is_up(self, name: str) -> bool:
        assert self.is_alive(name), f"{name} has ended: {self.children[name].last_lines(20)}"
        return self.is_ready(name)

    def _host(self, name: str) -> str:
        return self._far_host if name == self.far_worker else HOST

    # Metrics, memory and logs

    def metric(self, name: str, metric: str, **labels: str) -> float:
        """Returns the sum of a process's samples of a metric with these labels; 0 if there is no such sample."""
        return sum(value for sample, found, value in self._samples(name) if sample == metric and labels.items() <= found.items())

    def _samples(self, name: str) -> list[tuple[str, dict[str, str], float]]:
        url = self.parts[name].metrics_url.replace(HOST, self._host(name))
        with urllib.request.urlopen(url, timeout=5) as response:
            families = text_string_to_metric_families(response.read().decode())
            return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]

    def busy(self) -> dict[str, float]:
        """Returns the non-zero gauges of requests and KV tokens in use, by process and metric; empty if the fleet is idle.

        A process that has ended, or that refuses connections, counts as idle.
        """
        watched = [(name, "rootstock_gateway_requests_in_flight") for name in self.urls]
        watched += [(name, "rootstock_detokenizer_open_requests") for name in self.parts if name.startswith("detokenizer")]
        for name in self.workers:
            watched += [(name, f"sglang:{metric}") for metric in ("num_used_tokens", "num_running_reqs", "num_queue_reqs")]
        in_use: dict[str, float] = {}
        for name, metric in watched:
            try:
                in_use[f"{name} {metric}"] = self.metric(name, metric) if self.is_alive(name) else 0.0
            except urllib.error.URLError as error:
                if not isinstance(error.reason, ConnectionRefusedError):
                    raise
        return {what: value for what, value in in_use.items() if value}

    def wait_quiet(self, within_s: float) -> float:
        """Waits until the fleet is idle and returns the seconds that it took. A failure names the gauges that are not 0."""
        begun = time.monotonic()
        while held := self.busy():
            assert time.monotonic() - begun < within_s, f"the fleet is not idle after {within_s} s; gauges: {held}"
            time.sleep(0.02)
        return time.monotonic() - begun

    def resident_mb(self, name: str) -> float:
        """Returns the resident memory in MiB of the process and its children."""
        return sum(process.memory_info().rss for process in self._processes(name)) / 2**20

    def num_fds(self, name: str) -> int:
        return sum(process.num_fds() for process in self._processes(name)[:1])

    def _processes(self, name: str) -> list[psutil.Process]:
        process = psutil.Process(self.children[name].pid)
        return [process, *process.children(recursive=True)]

    def log(self, name: str) -> str:
        return self.children[name].log.read_text(errors="replace")
