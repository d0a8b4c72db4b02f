"""Starts all processes, waits until they are ready, sends the first request, and restarts processes that end.

The supervisor (services/local/supervisor.py) restarts a process that ends, also during the start. The system is ready when the
launcher has found every process ready, and no process was restarted in the meantime.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rootstock_llm.services.local import demo
from rootstock_llm.services.local.demo import Endpoint, Kind, RequestFailed, RequestRefused
from rootstock_llm.services.local.ends import Memory, num_memory_kills, why_it_ended
from rootstock_llm.services.local.plan import Part, address, log_folder, served_name
from rootstock_llm.services.local.ports import HOST
from rootstock_llm.services.local.settings import LocalSettings
from rootstock_llm.services.local.start_view import StartView
from rootstock_llm.services.local.supervisor import Child, Supervisor
from rootstock_llm.services.shared.hf_tokenizer import has_chat_template
from rootstock_llm.services.shared.rpc import grpc_server

POLL_S = 0.1  # seconds between two readiness checks of a process
MAX_ATTEMPTS = 3  # attempts of the first request; it is repeated if the connection ends or a service is unavailable
CONTROL_TOKEN = "ROOTSTOCK_CONTROL_TOKEN"


class StartFailed(RuntimeError):
    """A process was not ready within start_timeout_s. The message names the process and its log."""


class Start:
    """The start of one system.

    Args:
        model_path: The model's folder.
        started: The processes, in the order in which they are started.
        memory: Memory of the machine before the first process.
    """

    def __init__(self, settings: LocalSettings, model_path: Path, started: Sequence[Part], memory: Memory) -> None:
        self._settings, self._model_path, self._parts, self._memory = settings, model_path, started, memory
        self._view = StartView(sys.stdout)
        self._begun = time.monotonic()
        # Reports that wait until a completion has been printed. None: reports are printed immediately.
        self._delayed: list[str] | None = None
        self.supervisor = Supervisor(log_folder(settings), self._explain_end, self._report)

    def _explain_end(self, child: Child, code: int) -> str:
        is_worker = any(part.service == "worker" for part in self._parts if part.command is child.command)
        memory = self._memory if is_worker else replace(self._memory, model_bytes=0)
        return why_it_ended(child.command.name, code, child.output(), child.log, memory, num_memory_kills())

    def _report(self, text: str) -> None:
        if self._delayed is None:
            self._view.line(f"  {text}")
        else:
            self._delayed.append(text)

    def _print_delayed(self) -> None:
        delayed, self._delayed = self._delayed or [], None
        for text in delayed:
            self._report(text)

    async def run(self) -> None:
        """Runs until it is cancelled. Raises ProcessFailed or StartFailed if the start fails."""
        children = [self.supervisor.start(part.command) for part in self._parts]
        supervision = asyncio.create_task(self.supervisor.keep_running())
        starting = asyncio.create_task(self._begin(children))
        try:
            await asyncio.wait((supervision, starting), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            await supervision
        finally:
            self._view.clear()
            for task in (supervision, starting):
                task.cancel()
            await asyncio.gather(supervision, starting, return_exceptions=True)

    async def _begin(self, children: list[Child]) -> None:
        await self._ready_in_time(children)
        self.supervisor.is_started = True
        kind = self._kind(children)
        endpoint = self._endpoints()[0]
        if self._settings.demo:
            await self._send_first_request(endpoint, kind, children)
        print(self._announcement(endpoint, kind), flush=True)

    async def _ready_in_time(self, children: list[Child]) -> None:
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._all_ready(children)
        except TimeoutError:
            late = next((child for child in children if not child.is_ready), children[-1])
            raise StartFailed(
                f"{late.command.name} was not ready within {self._settings.start_timeout_s:g} s. Its log is {late.log}."
                " Set a longer limit: RUN_FLAGS='--start-timeout-s 3600'."
            ) from None

    async def _all_ready(self, children: list[Child]) -> None:
        """Waits for each process in turn until it is ready. Starts over if a process was restarted during the wait."""
        starts = -1
        while starts != self.supervisor.starts:
            starts = self.supervisor.starts
            for part, child in zip(self._parts, children, strict=True):
                was_ready = child.is_ready
                await self._until_ready(part, child)
                if not was_ready:
                    seconds = time.monotonic() - self._begun
                    self._view.line(f"  {part.command.name:<13} ready after {seconds:4.1f} s   pid {child.pid}")

    async def _until_ready(self, part: Part, child: Child) -> None:
        """Waits until the process is ready. Polls PING of a Redis, and the health service of any other process.

        For a gateway, /readiness must succeed, too.
        """
        host = HOST if part.settings is None else address(part.settings.host)
        async with grpc_server.channel(f"{host}:{part.health}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while not (child.running and await self._is_ready(part, health) and child.running):
                self._view.waiting(part.command.name, child.log)
                await asyncio.sleep(POLL_S)
        self._view.waiting(part.command.name, child.log)
        child.became_ready()

    async def _is_ready(self, part: Part, health: health_pb2_grpc.HealthStub) -> bool:
        if part.redis:
            return await _responds_to_ping(part.redis)
        return await _is_serving(health, part.service) and (not part.url or await asyncio.to_thread(self._is_gateway_ready, part))

    def _is_gateway_ready(self, part: Part) -> bool:
        """Returns whether a gateway is connected to all services that it needs."""
        connection = _endpoint(part).connection(timeout=1)
        try:
            connection.request("GET", "/readiness")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    async def _send_first_request(self, endpoint: Endpoint, kind: Kind, children: list[Child]) -> None:
        """Sends the first request and prints its prompt and completion. If the request fails, prints the reason and continues."""
        key = os.environ.get(demo.KEY_VARIABLE, "")
        if endpoint.needs_key and not key:
            print(f"\n  (no first request: the gateway requires an API key. Set {demo.KEY_VARIABLE} to a key.)")
            return
        print(f"\n  {demo.first_question(kind)}")
        for left in reversed(range(MAX_ATTEMPTS)):
            print("  ", end="", flush=True)
            self._delayed = []
            try:
                await asyncio.to_thread(demo.ask, endpoint, kind, served_name(self._settings), key, _write)
            except (RequestRefused, RequestFailed) as error:
                print(f"(no response: {error})")
                self._print_delayed()
                if isinstance(error, RequestRefused) or not left:
                    return
                await self._ready_in_time(children)
            else:
                print()
                self._print_delayed()
                return

    def _kind(self, children: list[Child]) -> Kind:
        """Returns which kind of request the model serves."""
        workers = [child for part, child in zip(self._parts, children, strict=True) if part.service == "worker"]
        if not all(_generates(child.output()) for child in workers):
            return "embedding"
        has_template = bool(self._settings.chat_template) or has_chat_template(self._model_path)
        return "chat" if has_template else "completion"

    def _endpoints(self) -> list[Endpoint]:
        return [_endpoint(part) for part in self._parts if part.url]

    def _announcement(self, endpoint: Endpoint, kind: Kind) -> str:
        """Returns the text after the start: addresses of the system, and a curl command to try."""
        gateways = [part for part in self._parts if part.url]
        first = gateways[0].settings
        assert first is not None, "a gateway has settings"
        lines = [("API", f"{part.url}/v1   (base URL of OpenAI's clients)") for part in gateways]
        lines += [("OpenAPI page", f"{endpoint.url}/docs")] if first.docs_enabled else []
        lines += [("playground", f"{endpoint.url}/")] if first.playground else []
        lines += [("admin API", _admin(part)) for part in gateways if part.settings and part.settings.admin_port]
        lines += [("metrics", f"{part.metrics_url}   ({part.command.name})") for part in self._parts if part.metrics_url]
        lines += [("logs", f"{shlex.quote(str(log_folder(self._settings)))}/*.log")]
        lines += [("requests", shlex.quote(first.access_log_file))] if first.access_log != "off" else []
        table = "".join(f"\n  {name:<12} {value}" for name, value in lines)
        first_line = f"\n  # with {demo.KEY_VARIABLE} set to an API key of {first.api_keys_file}" if endpoint.needs_key else ""
        return f"{table}\n{first_line}\n  {demo.curl(endpoint, kind, served_name(self._settings))}\n\n  Ctrl-C stops everything."


def _write(piece: str) -> None:
    print(piece, end="", flush=True)


def _endpoint(part: Part) -> Endpoint:
    assert part.settings is not None, "a gateway has settings"
    return Endpoint(part.url, part.settings.tls_cert_file, bool(part.settings.api_keys_file))


def _admin(part: Part) -> str:
    """Returns the URL of a read-only operation of the operators' API. If it needs a token, returns a curl command instead."""
    assert part.settings is not None, "a gateway has settings"
    gateway = part.settings
    url = f"http://{address(gateway.admin_host)}:{gateway.admin_port}/get_load"
    if gateway.control_token_file:
        return f'curl -H "authorization: Bearer $(cat {shlex.quote(gateway.control_token_file)})" {url}'
    return f'curl -H "authorization: Bearer ${CONTROL_TOKEN}" {url}' if gateway.control_token else url


async def _responds_to_ping(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return (await reader.readline()).startswith(b"+PONG")
    except OSError:
        return False
    finally:
        writer.close()


async def _is_serving(health: health_pb2_grpc.HealthStub, service: str) -> bool:
    try:
        response = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=1)
    except grpc.aio.AioRpcError:
        return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def _generates(log: str) -> bool:
    """Returns whether the worker generates text, according to the record "model ready" in its log."""
    for line in log.splitlines():
        if '"model ready"' in line:
            return bool(json.loads(line).get("generates", True))
    return True
