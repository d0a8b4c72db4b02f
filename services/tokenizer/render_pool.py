"""Renders chat templates in separate processes, so that a template that loops or uses too much memory can be killed.

The pool owns its processes. Each process renders one request at a time. If a process takes too long or dies, or if its request
is large and is cancelled, the process is killed, and the next request starts a new process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

import rootstock_llm
from rootstock_llm.protos import tokenizer_pb2 as pb
from rootstock_llm.services.tokenizer.metrics import TokenizerMetrics
from rootstock_llm.services.tokenizer.refusal import Refusal, busy, invalid, too_much

LARGE_BYTES = 1 << 18  # a process is ended after a larger request or output, to return its memory to the operating system
WRITE_BYTES = 1 << 16  # largest write to a pipe; asyncio copies the part of a write that the pipe does not accept immediately
NO_TEMPLATE = "this model has no chat template; use /v1/completions, or give the tokenizer a template with --chat-template FILE"
RETRY_S = 30.0  # seconds from a failed start to the next start, if no process has started successfully before
START_FACTOR = 4.0  # time limit of a start, which compiles the templates, divided by the time limit of one rendering
ROOT = Path(rootstock_llm.__file__).resolve().parents[1]  # the folder that contains rootstock_llm

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RenderSetup:
    """The setup message of every rendering process."""

    templates: dict[str, str]  # name → Jinja source
    special_tokens: dict[str, str]  # template variables, such as bos_token
    max_chars: int  # largest length of a rendered chat
    max_messages: int  # largest number of messages in a chat
    memory_bytes: int  # address space limit of a process
    seconds: float  # time limit of one rendering

    @property
    def start_seconds(self) -> float:
        """Time limit of a process's start."""
        return self.seconds * START_FACTOR


class BrokenTemplate(Exception):
    """The rendering process reports that the model's chat template does not compile."""


class NotStarted(Exception):
    """A rendering process did not become ready within the time limit of a start, or died.

    Compiling the template may take too long or too much memory, or the machine may lack resources.
    """


class _Process:
    """A rendering process. Exchanges must not overlap."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout

    @classmethod
    async def start(cls, setup: RenderSetup) -> _Process:
        """Starts a process and waits until it has compiled the templates. Raises BrokenTemplate or NotStarted."""
        try:
            child = await cls._spawned()
        except OSError as error:
            raise NotStarted(f"the process cannot be started: {error.strerror}") from None
        try:
            async with asyncio.timeout(setup.start_seconds):
                reply, _ = await child.exchange({**asdict(setup), "start_seconds": setup.start_seconds})
            if reply["error"] is not None:
                raise BrokenTemplate(reply["error"])
        except (EOFError, ConnectionError, TimeoutError):
            await child.end()
            raise NotStarted("compiling the template takes too long or too much memory") from None
        except BaseException:
            await child.end()
            raise
        return child

    @classmethod
    async def _spawned(cls) -> _Process:
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rootstock_llm.services.tokenizer.render_child"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # a traceback may quote the prompt
                cwd=ROOT,
                env={"PYTHONPATH": str(ROOT)},  # secrets in this process's environment are not passed on
                # Ctrl-C in a terminal reaches only the service, which ends its processes. Linux divides CPU time between sessions
                # first (autogroups), so a process starts within start_seconds even if other services keep all cores busy.
                start_new_session=True,
            )
        )

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def exchange(self, line: dict[str, Any], *bodies: bytes) -> tuple[dict[str, Any], bytes]:
        """Sends a line and its bodies. Returns the reply and its body. Raises EOFError or ConnectionError if the process dies."""
        self._stdin.write(json.dumps(line).encode() + b"\n")
        for body in bodies:
            for at in range(0, len(body), WRITE_BYTES):
                self._stdin.write(memoryview(body)[at : at + WRITE_BYTES])
                await self._stdin.drain()
        await self._stdin.drain()
        reply = json.loads(await self._stdout.readuntil(b"\n"))
        return reply, await self._stdout.readexactly(reply.get("size", 0))

    async def end(self) -> None:
        """Kills the process and waits for its end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class RenderPool:
    """The rendering processes of the service. Used on one event loop."""

    def __init__(self, setup: RenderSetup, max_processes: int, metrics: TokenizerMetrics) -> None:
        self._setup = setup
        self._slots = asyncio.Semaphore(max_processes)
        self._large_slots = asyncio.Semaphore(max(1, max_processes - 1))  # one process is reserved for small requests
        self._metrics = metrics
        self._idle: list[_Process] = []
        self._running: set[asyncio.Task[str]] = set()
        self._fault = "" if setup.templates else NO_TEMPLATE  # reason for refusing chat requests; empty: they are served
        self._compiles = False  # whether a process has ever compiled the templates
        self._retry_at = 0.0  # event loop time from which a failed start is tried again; 0: the fault is permanent

    async def start(self) -> None:
        """Starts one process, so that the first request does not wait. A broken template makes only chat requests fail."""
        if self._fault:
            return
        try:
            self._idle.append(await self._started())
        except Refusal as refusal:
            logger.error("chat requests are refused: %s", refusal.message)

    async def render(self, request: pb.EncodeChatRequest) -> str:
        """Returns the rendered chat. Raises Refusal.

        If the caller is cancelled while its small request is being rendered, the rendering continues and its process is reused.
        A waiting request is removed. A large request is cancelled and its process killed.
        """
        self._check()
        begun, is_large = asyncio.Event(), request_bytes(request) > LARGE_BYTES
        rendering = self._spawn(self._render(request, is_large, begun))
        try:
            return await asyncio.shield(rendering)
        except asyncio.CancelledError:
            if is_large or not begun.is_set():  # the caller now returns its share of the byte budget, so the work must end
                rendering.cancel()
            raise

    def _check(self) -> None:
        """Raises Refusal if the model has no template or a broken one, or during the pause after a failed start."""
        if self._fault and (self._retry_at == 0.0 or asyncio.get_running_loop().time() < self._retry_at):
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, self._fault)

    async def stop(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for process in self._idle:
            await process.end()
        self._idle.clear()

    def _spawn(self, work: Coroutine[Any, Any, str]) -> asyncio.Task[str]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[str]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved, also if the caller was cancelled

    async def _render(self, request: pb.EncodeChatRequest, is_large: bool, begun: asyncio.Event) -> str:
        """Renders a chat in a free process. Sets `begun` when the request has a slot. Raises Refusal."""
        async with contextlib.AsyncExitStack() as stack:
            if is_large:
                await stack.enter_async_context(self._large_slots)
            await stack.enter_async_context(self._slots)
            begun.set()
            self._check()  # again: while this request waited, another request may have found the template broken
            process = await self._take()
            with self._metrics.render_seconds.time():
                reply, body = await self._run(process, request)
            if reply.get("ends") or is_large or len(body) > LARGE_BYTES:
                await process.end()
                await self._replace()
            else:
                self._idle.append(process)
        if reply["status"] == "invalid":
            raise invalid(reply["message"])
        if reply["status"] == "too_much":
            raise too_much(reply["message"])
        return body.decode()

    async def _replace(self) -> None:
        """Starts a process if none is idle, so that the next request does not wait for a start."""
        if not self._idle:
            try:
                self._idle.append(await self._started())
            except Refusal as refusal:
                logger.warning("could not start a rendering process: %s", refusal.message)

    async def _take(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
        return await self._started()

    async def _started(self) -> _Process:
        """Starts a process. Raises Refusal, which is temporary (busy) if the templates have compiled before."""
        try:
            process = await _Process.start(self._setup)
        except (BrokenTemplate, NotStarted) as error:
            if self._compiles:
                raise busy(f"a rendering process did not start: {error}") from None
            self._fault = f"this model's chat template is broken: {error}"
            is_temporary = isinstance(error, NotStarted)
            self._retry_at = asyncio.get_running_loop().time() + RETRY_S if is_temporary else 0.0
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, self._fault) from None
        self._compiles, self._fault = True, ""
        return process

    async def _run(self, process: _Process, request: pb.EncodeChatRequest) -> tuple[dict[str, Any], bytes]:
        bodies = (request.messages_json, request.tools_json, request.template_kwargs_json)
        continues = request.continue_final_message
        header = {
            "sizes": [len(body) for body in bodies],
            "add_generation_prompt": request.add_generation_prompt
            if request.HasField("add_generation_prompt")
            else not continues,
            "continue_final_message": continues,
            "read_variables": list(request.read_variables),
        }
        try:
            async with asyncio.timeout(self._setup.seconds):
                return await process.exchange(header, *bodies)
        except TimeoutError:
            raise too_much(await self._killed(process, f"took longer than {self._setup.seconds:g} s")) from None
        except (EOFError, ConnectionError):
            raise too_much(await self._killed(process, "made its rendering process end")) from None
        except BaseException:
            await process.end()
            raise

    async def _killed(self, process: _Process, why: str) -> str:
        await process.end()
        self._metrics.render_kills.inc()
        logger.warning("killed a rendering process: the chat template %s", why)
        return f"messages: the chat template {why}"


def request_bytes(request: pb.EncodeChatRequest) -> int:
    """Returns the size of the request's JSON texts."""
    return len(request.messages_json) + len(request.tools_json) + len(request.template_kwargs_json)
