"""Gateways and fake services on real sockets, on one event loop in a separate thread."""

from __future__ import annotations

import asyncio
import faulthandler
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import orjson
import uvloop
from openai import DefaultHttpxClient, OpenAI

from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.gateway.gateway import Gateway
from rootstock_llm.services.gateway.http import http_server
from rootstock_llm.services.gateway.remote.worker_link import WorkerLink
from rootstock_llm.services.local.ports import free_ports
from tests.services.gateway.fakes import MODEL, FakeDetokenizer, FakeTokenizer, FakeWorker, Host

T = TypeVar("T")
WAIT_S = 60.0
MIN_CHECKS = 5  # see wait_until()
POLL_S = 10.0  # seconds that one readiness request may take


def wait_until(condition: Callable[[], bool], what: str = "condition", wait_s: float = WAIT_S) -> None:
    """Checks the condition until it holds. Fails after `wait_s`, but not before MIN_CHECKS checks.

    The machine may suspend this process for minutes, so that few checks happen within `wait_s`.
    """
    deadline, checks = time.monotonic() + wait_s, 0
    while not condition():
        checks += 1
        assert time.monotonic() < deadline or checks < MIN_CHECKS, f"did not happen: {what}"
        time.sleep(0.005)


class System:
    def __init__(
        self,
        workers: int = 1,
        detokenizers: int = 1,
        tokenizers: int = 1,
        down: tuple[str, ...] = (),
        configure: Callable[[list[FakeWorker]], None] = lambda workers: None,
        gateways: int = 1,
        keys: Sequence[str | dict[str, Any]] = (),
        formats: tuple[str, str] = ("", ""),
        reasoning_marks: Sequence[int] = (),
        **settings: Any,
    ) -> None:
        """Stores the parameters. The services start in __enter__.

        Args:
            workers: number of fake workers.
            detokenizers: number of fake detokenizers.
            tokenizers: number of fake tokenizers.
            down: services that are not started: "worker", "tokenizer", "detokenizer".
            configure: changes the workers before their start.
            gateways: number of gateways. If there are several, each gateway gets the addresses of all gateways, its own included.
            keys: entries of the API key file; a string is both name and API key.
            formats: formats of tool calls and of reasoning, which the tokenizers report.
            reasoning_marks: ids of the marks around reasoning.
            settings: further fields of GatewaySettings.
        """
        self._folder = tempfile.TemporaryDirectory()
        self.key_file = Path(self._folder.name, "keys.json")
        if keys:
            self.write_keys(*keys)
            settings["api_keys_file"] = str(self.key_file)
        self._num_gateways = gateways
        self._configure = configure
        self._formats = formats
        self._reasoning_marks = reasoning_marks
        self._sizes = (workers, detokenizers, tokenizers)
        self._down = down
        self.clients: list[RawClient] = []
        # Fakes send their load only once, so the silence limit is long. A test of silence sets a lower limit.
        waits = {"queue_timeout_s": 10.0, "worker_silence_s": 60.0}
        self._overrides = {**waits, "grace_s": 0.2, **settings}
        # One connection per request; verify=False avoids loading certificates.
        self._http = httpx.Client(timeout=WAIT_S, limits=httpx.Limits(max_keepalive_connections=0), verify=False)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> System:
        self._thread.start()
        self.call(self._start())
        if not self._down:
            for gateway in range(self._num_gateways):
                wait_until(lambda: self._is_ready(gateway), "readiness")  # noqa: B023
            wait_until(lambda: all(link.info is not None for link in self.links), "the connections of all workers")
        return self

    def _is_ready(self, gateway: int) -> bool:
        """Returns whether the gateway responds that it is ready. A request that times out counts as not ready.

        If a gateway has ended, raises its exception. Its listener stays open until the event loop ends, so a request would only
        time out.
        """
        if self.serving.done():
            self.serving.result()
        try:
            return self.get("/readiness", gateway, timeout=POLL_S).status_code == 200
        except httpx.TimeoutException:
            faulthandler.dump_traceback(sys.__stderr__)
            return False

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.vanish()
        self._http.close()
        self.call(self._stop())
        self._folder.cleanup()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)

    async def _start(self) -> None:
        workers, detokenizers, tokenizers = self._sizes
        self.workers = [Host(FakeWorker(f"worker-{i}")) for i in range(workers)]
        self._configure([host.servicer for host in self.workers])
        self.detokenizers = [Host(FakeDetokenizer()) for _ in range(detokenizers)]
        self.tokenizers = [Host(FakeTokenizer()) for _ in range(tokenizers)]
        for host in self.tokenizers:
            host.servicer.info.tool_format, host.servicer.info.reasoning_format = self._formats
            host.servicer.info.reasoning_marks.extend(self._reasoning_marks)
        for service, hosts in (("worker", self.workers), ("detokenizer", self.detokenizers), ("tokenizer", self.tokenizers)):
            for host in hosts:
                await (host.reserve() if service in self._down else host.start())
        peers = free_ports(self._num_gateways) if self._num_gateways > 1 else []
        known = {"peers": ",".join(f"127.0.0.1:{port}" for port in peers)}
        config = GatewaySettings(
            port=0,
            health_port=0,
            workers=",".join(host.address for host in self.workers),
            detokenizers=",".join(host.address for host in self.detokenizers),
            tokenizers=",".join(host.address for host in self.tokenizers),
            **(known | self._overrides),
        )
        self.ports: list[int] = []
        self.gateways: list[Gateway] = []
        self.stop = asyncio.Event()
        runs = []
        for peer_port in peers or [0]:
            listener = http_server.bind("127.0.0.1", 0)
            self.ports.append(listener.getsockname()[1])
            self.gateways.append(Gateway(config.model_copy(update={"peer_port": peer_port})))
            runs.append(self.gateways[-1].run(listener, self.stop))
        self.serving = asyncio.gather(*runs)

    async def _stop(self) -> None:
        self.stop.set()
        await self.serving
        for host in (*self.workers, *self.detokenizers, *self.tokenizers):
            await host.stop()

    def write_keys(self, *keys: str | dict[str, Any]) -> None:
        """Replaces the API key file in one step, as Kubernetes does."""
        entries = [{"name": key, "key": key} if isinstance(key, str) else key for key in keys]
        fresh = self.key_file.with_suffix(".new")
        fresh.write_bytes(orjson.dumps({"keys": entries}))
        fresh.rename(self.key_file)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the system's loop and waits for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def do(self, action: Callable[[], Any]) -> None:
        """Runs a plain function on the system's loop."""

        async def run() -> None:
            action()

        self.call(run())

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def gateway(self) -> Gateway:
        return self.gateways[0]

    @property
    def links(self) -> list[WorkerLink]:
        """Links of the first gateway to the workers, in the order of the workers."""
        return [self.gateway.dispatcher.fleet.links[host.address] for host in self.workers]

    @property
    def num_waiting(self) -> int:
        return sum(self.gateway.dispatcher.waiting_by_model().values())

    def allow(self, steps: int | None) -> None:
        """Allows every worker this number of additional steps; None for any number."""
        self.do(lambda: [host.servicer.allow(steps) for host in self.workers])

    def submits(self) -> list[int]:
        """Returns the number of submits that each worker has received."""
        return [len(host.servicer.submits) for host in self.workers]

    def running(self) -> list[int]:
        return [len(host.servicer.running) for host in self.workers]

    @property
    def worker(self) -> FakeWorker:
        return self.workers[0].servicer

    @property
    def detokenizer(self) -> FakeDetokenizer:
        return self.detokenizers[0].servicer

    @property
    def tokenizer(self) -> FakeTokenizer:
        return self.tokenizers[0].servicer

    def has_tokens(self, count: int) -> bool:
        """Whether at least one choice is open and the gateway has received exactly `count` tokens of each open choice.

        Tests wait for this before they stop a worker or a client, so that no token is in transit at this moment.
        """
        choices = list(self.gateway.dispatcher._placements)
        return bool(choices) and all(len(choice.output_ids) == count for choice in choices)

    def url(self, path: str, gateway: int = 0) -> str:
        return f"http://127.0.0.1:{self.ports[gateway]}{path}"

    def get(self, path: str, gateway: int = 0, **kwargs: Any) -> httpx.Response:
        return self._http.get(self.url(path, gateway), **kwargs)

    def post(self, path: str, body: Any, gateway: int = 0, **kwargs: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        return self._http.post(self.url(path, gateway), content=content, **kwargs)

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        return self._http.request(method, self.url(path), **kwargs)

    def chat(self, **body: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **body})

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": "Hi", **body})

    def openai(self, **kwargs: Any) -> OpenAI:
        plain = {"base_url": self.url("/v1"), "api_key": "none", "max_retries": 0, "timeout": WAIT_S}
        return OpenAI(**{**plain, "http_client": DefaultHttpxClient(verify=False), **kwargs})

    def metric(self, name: str, **labels: str) -> float:
        """Returns a sample of /metrics, or 0 if it does not exist yet."""
        for line in self.get("/metrics").text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == name and all(f'{key}="{label}"' in sample for key, label in labels.items()):
                return float(value)
        return 0.0

    def total(self, name: str) -> float:
        """Returns the sum of all samples of a metric, over its labels."""
        lines = (line.rpartition(" ") for line in self.get("/metrics").text.splitlines())
        return sum(float(value) for sample, _, value in lines if sample.partition("{")[0] == name)


class RawClient:
    """A plain socket that can stop reading, or close, at any moment."""

    def __init__(self, system: System, path: str, body: dict[str, Any], key: str = "") -> None:
        """Connects and sends a request, with an API key if `key` is not empty."""
        content = orjson.dumps({"model": MODEL, **body})
        authorization = f"authorization: Bearer {key}\r\n" if key else ""
        self._socket = socket.create_connection(("127.0.0.1", system.port), timeout=WAIT_S)
        head = f"POST {path} HTTP/1.1\r\nhost: test\r\n{authorization}content-length: {len(content)}\r\n\r\n"
        self._socket.sendall(head.encode() + content)
        self.received = b""
        system.clients.append(self)  # stays connected until vanish() or the end of the system

    def read_until(self, text: bytes) -> None:
        while text not in self.received:
            data = self._socket.recv(65536)
            assert data, f"closed before {text!r}: {self.received!r}"
            self.received += data

    def read_to_end_of_stream(self) -> bytes:
        self.read_until(b"\r\n0\r\n\r\n")
        return self.received

    def vanish(self) -> None:
        self._socket.close()


def events(text: str) -> list[Any]:
    """Returns the JSON values of a stream's events. Asserts that the last event is [DONE], and omits it."""
    lines = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    return [orjson.loads(line) for line in lines[:-1]]


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], **fields}
