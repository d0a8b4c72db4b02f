"""python -m services.local: the whole system as processes on this machine. What `make run` starts."""

from __future__ import annotations

import asyncio
import http.client
import logging
import sys
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.local import demo
from services.local.model_source import model_folder
from services.local.plan import Part, access_log, num_ports, parts, served_name, state_folder
from services.local.ports import HOST, free_ports, is_taken
from services.local.settings import LocalSettings
from services.local.start_view import StartView
from services.local.supervisor import Child, Supervisor
from services.shared.hf_tokenizer import has_chat_template
from services.shared.rpc import grpc_server
from services.shared.settings import load


class StartFailed(RuntimeError):
    """A process ended, or was not ready in time; the message holds the end of its log."""


async def run(settings: LocalSettings) -> int:
    """Starts everything, waits for readiness, asks the demo question, stays until a signal, leaves no process behind."""
    if is_taken(settings.port):
        print(f"port {settings.port} is taken (another `make run`?); choose another one: make run PORT={settings.port + 1}")
        return 1
    model_path = model_folder(settings.model)
    try:
        ports = free_ports(num_ports(settings), {settings.port, settings.admin_port})
    except RuntimeError as error:
        print(f"cannot serve: {error}", file=sys.stderr)
        return 1
    chats = bool(settings.chat_template) or has_chat_template(model_path)
    started = parts(settings, model_path, ports)
    if settings.state_dir:
        state_folder(settings).mkdir(parents=True, exist_ok=True)
    supervisor = Supervisor(Path(settings.log_dir) / str(settings.port))
    stop = asyncio.create_task(grpc_server.stop_signal().wait())
    serving = asyncio.create_task(_serve(settings, supervisor, started, chats))
    await asyncio.wait((stop, serving), return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    (failure,) = await asyncio.gather(serving, return_exceptions=True)
    begun = time.monotonic()
    await supervisor.stop()
    print(f"\nstopped {len(supervisor.children)} processes in {time.monotonic() - begun:.1f} s")
    if isinstance(failure, asyncio.CancelledError):
        return 0
    print(f"cannot serve: {str(failure) or 'not every process was ready in time'}", file=sys.stderr)
    return 1


async def _serve(settings: LocalSettings, supervisor: Supervisor, started: list[Part], chats: bool) -> None:
    """chats: whether the model has a chat template."""
    begun, view = time.monotonic(), StartView(sys.stdout)
    children = [supervisor.start(part.command) for part in started]
    async with asyncio.timeout(settings.start_timeout_s):
        for part, child in zip(started, children, strict=True):
            await _until_ready(part, child, view)
            view.line(f"  {part.command.name:<13} ready after {time.monotonic() - begun:4.1f} s   pid {child.pid}")
    keeping = asyncio.create_task(supervisor.keep_running())
    try:
        if settings.demo:
            question = demo.QUESTION if chats else demo.PROMPT
            print(f"\n  {question}\n  ", end="", flush=True)
            await _ask(settings, question, chats)
        _print_urls(settings, started, chats)
        await keeping
    finally:
        keeping.cancel()


async def _ask(settings: LocalSettings, question: str, chats: bool) -> None:
    """Prints the answer, or the reason why there is none. The system goes on either way: the model may be slow."""
    try:
        await asyncio.to_thread(demo.ask, settings.port, served_name(settings), question, chats)
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"(no answer: {error})")


async def _until_ready(part: Part, child: Child, view: StartView) -> None:
    """Polls the process's health service. A process that ends before it is ready fails the start."""
    async with grpc_server.channel(f"{HOST}:{part.health}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            if child.exit_code is not None:
                view.clear()
                raise StartFailed(f"{part.command.name} ended with code {child.exit_code}:\n{child.last_lines(8)}")
            if (not part.health or await _is_serving(health, part.service)) and await asyncio.to_thread(_has_peers, part):
                return
            view.waiting(part.command.name, child.log)
            await asyncio.sleep(0.1)


async def _is_serving(health: health_pb2_grpc.HealthStub, service: str) -> bool:
    try:
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=1)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _has_peers(part: Part) -> bool:
    """Whether a gateway is connected to everything that it needs; True for all others."""
    if not part.url:
        return True
    connection = http.client.HTTPConnection(part.url.removeprefix("http://"), timeout=1)
    try:
        connection.request("GET", "/readiness")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _print_urls(settings: LocalSettings, started: list[Part], chats: bool) -> None:
    urls = [part.url for part in started if part.url]
    print("\n" + "".join(f"  API          {url}/v1\n" for url in urls) + f"  OpenAPI page {urls[0]}/docs")
    if settings.playground:
        print(f"  playground   {urls[0]}/")
    for part in started:
        if part.metrics_url:
            print(f"  metrics      {part.metrics_url}   ({part.command.name})")
    print(f"  logs         {Path(settings.log_dir) / str(settings.port)}/*.log")
    print(f"  requests     {access_log(settings)}")
    asked = '"messages": [{"role": "user", "content": "Count from 3 to 9."}]' if chats else f'"prompt": "{demo.PROMPT}"'
    body = f'{{"model": "{served_name(settings)}", {asked}, "temperature": 0}}'
    path = "chat/completions" if chats else "completions"
    print(
        f"\n  curl {urls[0]}/v1/{path} -H 'content-type: application/json' -d '{body}'\n\n  Ctrl-C stops everything.",
        flush=True,
    )


def main() -> int:
    settings = load(LocalSettings, "python -m services.local")
    logging.basicConfig(level="WARNING", format="  %(message)s")
    try:
        return asyncio.run(run(settings))
    except ValueError as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
