"""Chat templates rendered in processes of their own, so that one that loops or swells is killed and stops nobody else.

The pool owns its processes. A request holds one for the time of its rendering; a process that overran, died or was left in the
middle of an exchange is killed, and the next request starts a fresh one.
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

from services.tokenizer.metrics import TokenizerMetrics
from services.tokenizer.refusal import Refusal, busy, invalid, too_much

LARGE_BYTES = 1 << 18  # of a job or its text: what such a rendering has made of a process's memory ends with the process
WRITE_BYTES = 1 << 16  # at a time: what a pipe does not take at once is copied
NO_TEMPLATE = "this model has no chat template; use /v1/completions, or give the tokenizer a template with --chat-template FILE"
AGAIN_S = 30.0  # after a start that came to nothing, where none has succeeded yet: the template may be at fault, or the machine
START_FACTOR = 4.0  # a start, with the template's compilation, may take as long as so many renderings
ROOT = Path(__file__).resolve().parents[2]  # the folder that holds `services`

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RenderSetup:
    """What every rendering process is told at its start. seconds is the longest time of one rendering."""

    templates: dict[str, str]
    special_tokens: dict[str, str]
    max_chars: int
    max_messages: int
    memory_bytes: int
    seconds: float

    @property
    def start_seconds(self) -> float:
        return self.seconds * START_FACTOR


@dataclass(frozen=True)
class RenderJob:
    messages_json: bytes
    tools_json: bytes
    template_kwargs_json: bytes
    add_generation_prompt: bool
    continue_final_message: bool
    read_variables: tuple[str, ...] = ()  # names that the template has to read

    @property
    def is_large(self) -> bool:
        return len(self.messages_json) + len(self.tools_json) + len(self.template_kwargs_json) > LARGE_BYTES


class BrokenTemplate(Exception):
    """The model's chat template does not compile: the process that was to render it says so."""


class NotStarted(Exception):
    """It has not said anything within its time, or has died: the template takes too much to compile, or the machine is short."""


class _Process:
    """One rendering process. One exchange at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout

    @classmethod
    async def start(cls, setup: RenderSetup) -> _Process:
        """Raises BrokenTemplate, NotStarted."""
        try:
            child = await cls._spawned()
        except OSError as error:
            raise NotStarted(f"no process can be started: {error.strerror}") from None
        try:
            async with asyncio.timeout(setup.start_seconds):
                reply, _ = await child.exchange({**asdict(setup), "start_seconds": setup.start_seconds})
            if reply["error"] is not None:
                raise BrokenTemplate(reply["error"])
        except (EOFError, ConnectionError, TimeoutError):
            await child.end()
            raise NotStarted("compiling it takes too long or too much memory") from None
        except BaseException:
            await child.end()
            raise
        return child

    @classmethod
    async def _spawned(cls) -> _Process:
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.tokenizer.render_child"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # a traceback may quote the prompt
                cwd=ROOT,
                env={"PYTHONPATH": str(ROOT)},  # nothing of this process's environment
                start_new_session=True,  # a terminal's Ctrl-C is for the service
            )
        )

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def exchange(self, line: dict[str, Any], *bodies: bytes) -> tuple[dict[str, Any], bytes]:
        """Raises EOFError or ConnectionError if the process has died."""
        self._stdin.write(json.dumps(line).encode() + b"\n")
        for body in bodies:
            for at in range(0, len(body), WRITE_BYTES):
                self._stdin.write(memoryview(body)[at : at + WRITE_BYTES])
                await self._stdin.drain()
        await self._stdin.drain()
        reply = json.loads(await self._stdout.readuntil(b"\n"))
        return reply, await self._stdout.readexactly(reply.get("size", 0))

    async def end(self) -> None:
        """Kills and reaps it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class RenderPool:
    def __init__(self, setup: RenderSetup, max_processes: int, metrics: TokenizerMetrics) -> None:
        self._setup = setup
        self._slots = asyncio.Semaphore(max_processes)
        self._large_slots = asyncio.Semaphore(max(1, max_processes - 1))  # the last one is for small jobs
        self._metrics = metrics
        self._idle: list[_Process] = []
        self._running: set[asyncio.Task[str]] = set()
        self._fault = "" if setup.templates else NO_TEMPLATE
        self._compiles = False  # it is known to
        self._again_at = 0.0  # as long as it is not: when the next one is started, on the event loop's clock

    async def start(self) -> None:
        """Starts one process, so that the first request does not wait. A broken template refuses chat requests, nothing else."""
        if self._fault:
            return
        try:
            self._idle.append(await self._started())
        except Refusal as refusal:
            logger.error("chat requests are refused: %s", refusal.message)

    async def render(self, job: RenderJob) -> str:
        """The chat as text. Raises Refusal. The rendering for a caller that is cancelled ends by itself where it has begun; a
        large one is killed."""
        self._check()
        begun = asyncio.Event()
        rendering = self._spawn(self._render(job, begun))
        try:
            return await asyncio.shield(rendering)
        except asyncio.CancelledError:
            if job.is_large or not begun.is_set():  # its share of the budget goes with its caller
                rendering.cancel()
            raise

    def _check(self) -> None:
        """Raises Refusal while nothing is to be started."""
        if self._fault and (self._again_at == 0.0 or asyncio.get_running_loop().time() < self._again_at):
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
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also where the caller has gone

    async def _render(self, job: RenderJob, begun: asyncio.Event) -> str:
        """begun: is set once it has its turn."""
        async with contextlib.AsyncExitStack() as stack:
            if job.is_large:
                await stack.enter_async_context(self._large_slots)
            await stack.enter_async_context(self._slots)
            begun.set()
            self._check()  # somebody before may have found out
            process = await self._take()
            with self._metrics.render_seconds.time():
                reply, body = await self._run(process, job)
            if reply.get("ends") or job.is_large or len(body) > LARGE_BYTES:
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
        """So that the next request does not wait for a start."""
        if not self._idle:
            try:
                self._idle.append(await self._started())
            except Refusal as refusal:
                logger.warning("a rendering process did not start: %s", refusal.message)

    async def _take(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
        return await self._started()

    async def _started(self) -> _Process:
        """Raises Refusal: where the template is known to compile, one that says so of now alone."""
        try:
            process = await _Process.start(self._setup)
        except (BrokenTemplate, NotStarted) as error:
            if self._compiles:
                raise busy(f"a rendering process did not start: {error}") from None
            self._fault = f"this model's chat template is broken: {error}"
            passes = isinstance(error, NotStarted)
            self._again_at = asyncio.get_running_loop().time() + AGAIN_S if passes else 0.0
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, self._fault) from None
        self._compiles, self._fault = True, ""
        return process

    async def _run(self, process: _Process, job: RenderJob) -> tuple[dict[str, Any], bytes]:
        bodies = (job.messages_json, job.tools_json, job.template_kwargs_json)
        flags = {name: getattr(job, name) for name in ("add_generation_prompt", "continue_final_message", "read_variables")}
        try:
            async with asyncio.timeout(self._setup.seconds):
                return await process.exchange({"sizes": [len(body) for body in bodies], **flags}, *bodies)
        except TimeoutError:
            raise too_much(await self._killed(process, f"took longer than {self._setup.seconds:g} s")) from None
        except (EOFError, ConnectionError):
            raise too_much(await self._killed(process, "ended its process")) from None
        except BaseException:
            await process.end()
            raise

    async def _killed(self, process: _Process, why: str) -> str:
        await process.end()
        self._metrics.render_kills.inc()
        logger.warning("rendering process killed: the chat template %s", why)
        return f"messages: the chat template {why}"
