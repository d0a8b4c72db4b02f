"""Starts all processes, waits until they are ready, sends the first request, and restarts processes that end.

Supervision begins with the first process (services/local/supervisor.py): a process that ends is restarted, in every phase.
All processes are ready when each has been found ready since the last start of any of them.
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
from rootstock_llm.services.local.demo import BrokenOff, Endpoint, Kind, NoAnswer
from rootstock_llm.services.local.ends import Memory, num_memory_kills, why_it_ended
from rootstock_llm.services.local.plan import Part, address, log_folder, served_name
from rootstock_llm.services.local.ports import HOST
from rootstock_llm.services.local.settings import LocalSettings
from rootstock_llm.services.local.start_view import StartView
from rootstock_llm.services.local.supervisor import Child, Supervisor
from rootstock_llm.services.shared.hf_tokenizer import has_chat_template
from rootstock_llm.services.shared.rpc import grpc_server

POLL_S = 0.1
ASKED_AT_MOST = 3  # attempts of the first request if a process ends during it
CONTROL_TOKEN = "ROOTSTOCK_CONTROL_TOKEN"


class StartFailed(RuntimeError):
    """The system is not ready in time. The message names the process and its log."""


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
        self._held: list[str] | None = None  # reports that are delayed while a completion is printed; None: print at once
        self.supervisor = Supervisor(log_folder(settings), self._why, self._report)

    def _why(self, child: Child, code: int) -> str:
        is_worker = any(part.service == "worker" for part in self._parts if part.command is child.command)
        memory = self._memory if is_worker else replace(self._memory, model_bytes=0)
        return why_it_ended(child.command.name, code, child.output(), child.log, memory, num_memory_kills())

    def _report(self, text: str) -> None:
        if self._held is None:
            self._view.line(f"  {text}")
        else:
            self._held.append(text)

    def _end_line(self) -> None:
        held, self._held = self._held or [], None
        for text in held:
            self._report(text)

    async def run(self) -> None:
        """Runs until it is cancelled. Raises ProcessFailed or StartFailed if the start fails."""
        children = [self.supervisor.start(part.command) for part in self._parts]
        keeping = asyncio.create_task(self.supervisor.keep_running())
        starting = asyncio.create_task(self._begin(children))
        try:
            await asyncio.wait((keeping, starting), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            await keeping
        finally:
            self._view.clear()
            for task in (keeping, starting):
                task.cancel()
            await asyncio.gather(keeping, starting, return_exceptions=True)

    async def _begin(self, children: list[Child]) -> None:
        await self._ready_in_time(children)
        self.supervisor.is_started = True
        kind = self._kind(children)
        endpoint = self._endpoints()[0]
        if self._settings.demo:
            await self._ask(endpoint, kind, children)
        print(self._announcement(endpoint, kind), flush=True)

    async def _ready_in_time(self, children: list[Child]) -> None:
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._all_ready(children)
        except TimeoutError:
            late = next((child for child in children if not child.is_ready), children[-1])
            raise StartFailed(
                f"{late.command.name} was not ready within {self._settings.start_timeout_s:g} s. Its log is {late.log}."
                " A longer limit: RUN_FLAGS='--start-timeout-s 3600'."
            ) from None

    async def _all_ready(self, children: list[Child]) -> None:
        """Waits for each process in turn until it is ready. Repeats this if a process was restarted meanwhile."""
        starts = -1
        while starts != self.supervisor.starts:
            starts = self.supervisor.starts
            for part, child in zip(self._parts, children, strict=True):
                known = child.is_ready
                await self._until_ready(part, child)
                if not known:
                    seconds = time.monotonic() - self._begun
                    self._view.line(f"  {part.command.name:<13} ready after {seconds:4.1f} s   pid {child.pid}")

    async def _until_ready(self, part: Part, child: Child) -> None:
        """Returns whether the process is ready: polls its health service, the Redis, or the gateway's readiness."""
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
            return await _answers_ping(part.redis)
        return await _is_serving(health, part.service) and (not part.url or await asyncio.to_thread(self._has_peers, part))

    def _has_peers(self, part: Part) -> bool:
        """Returns whether a gateway is connected to all services that it needs."""
        connection = _endpoint(part).connection(timeout=1)
        try:
            connection.request("GET", "/readiness")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    async def _ask(self, endpoint: Endpoint, kind: Kind, children: list[Child]) -> None:
        """Sends the first request and prints prompt and completion. A refusal is printed, too, and is no reason to stop."""
        key = os.environ.get(demo.KEY_VARIABLE, "")
        if endpoint.needs_key and not key:
            print(f"\n  (no first question: the gateway asks for API keys. Set {demo.KEY_VARIABLE} to a key.)")
            return
        print(f"\n  {demo.first_question(kind)}")
        for left in reversed(range(ASKED_AT_MOST)):
            print("  ", end="", flush=True)
            self._held = []
            try:
                await asyncio.to_thread(demo.ask, endpoint, kind, served_name(self._settings), key, _write)
            except (NoAnswer, BrokenOff) as error:
                print(f"(no answer: {error})")
                self._end_line()
                if isinstance(error, NoAnswer) or not left:
                    return
                await self._ready_in_time(children)
            else:
                print()
                self._end_line()
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
    given = part.settings
    url = f"http://{address(given.admin_host)}:{given.admin_port}/get_load"
    if given.control_token_file:
        return f'curl -H "authorization: Bearer $(cat {shlex.quote(given.control_token_file)})" {url}'
    return f'curl -H "authorization: Bearer ${CONTROL_TOKEN}" {url}' if given.control_token else url


async def _answers_ping(port: int) -> bool:
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
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=1)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _generates(log: str) -> bool:
    """Returns whether the worker generates text, according to the record "model ready" in its log."""
    for line in log.splitlines():
        if '"model ready"' in line:
            return bool(json.loads(line).get("generates", True))
    return True
