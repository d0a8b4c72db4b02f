"""Runs an engine for one round: Rootstock through its server and an HTTP client, another engine through its driver.

A driver is a child process that exchanges lines of JSON with the benchmark over stdin and stdout:

    benchmark -> driver   {"model", "bits", "threads", "max_len", "max_in_flight", "kv_tokens"}
    driver -> benchmark   {"ready": true}
    benchmark -> driver   {"prompts", "output_len", "in_flight"}
    driver -> benchmark   {"seconds", "lengths"}    any number of times
    end of stdin          the driver ends
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from rootstock_llm.services.cli.bench.client import Endpoint, first_model, open_http
from rootstock_llm.services.cli.bench.load import Player, closed_loop
from rootstock_llm.services.cli.bench.workload import Session, Turn
from tests.benchmarks.engines.catalogue import ENGINES, ROOTSTOCK, Variant
from tests.benchmarks.engines.environment import DRIVERS, Absent, environ, tail
from tests.benchmarks.engines.workloads import KV_TOKENS, Job, Workload
from tests.benchmarks.server_process import ROOTSTOCK as SERVER
from tests.benchmarks.server_process import ServerFailed, running_server

# Flags of the worker by bits per weight.
WORKER_FLAGS = {16: "", 8: "--quantization int8 --quantize-head", 4: "--quantization int4 --quantize-head"}
REQUEST_TIMEOUT_S = 3600.0
DRIVER_STOP_S = 30.0


class RunFailed(Exception):
    """Raised if an engine that had started fails in a workload, or a request gets a wrong number of tokens."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Values that all workloads of one engine process share."""

    variant: Variant
    python: Path  # interpreter of the engine's environment; that of this process for Rootstock
    model: Path  # folder of the checkpoint or of its conversion
    threads: int
    log: Path


@dataclass(frozen=True, slots=True)
class Running:
    """A started engine."""

    run: Callable[[Job], float]  # returns the seconds from the first request to the last token, or raises RunFailed
    memory: Callable[[], int]  # returns the resident bytes of all processes of the engine


@contextmanager
def running(setup: Setup, workloads: Sequence[Workload]) -> Iterator[Running]:
    """Yields a started engine, and ends all its processes on exit.

    Raises:
        Absent: the engine did not start.
    """
    with (server if setup.variant.engine == ROOTSTOCK else driver)(setup, workloads) as engine:
        yield engine


def check_lengths(lengths: Sequence[int], job: Job) -> None:
    """Checks that each prompt of a job got exactly the job's number of output tokens.

    Raises:
        RunFailed: A request is missing or got another number of tokens.
    """
    if len(lengths) != len(job.prompts):
        raise RunFailed(f"{len(lengths)} of {len(job.prompts)} requests ended")
    if wrong := [length for length in lengths if length != job.output_len]:
        raise RunFailed(
            f"{len(wrong)} of {len(lengths)} requests have a wrong number of tokens, such as {wrong[0]}, not {job.output_len}"
        )


def server_template(bits: int) -> str:
    return f"{SERVER} --max-total-tokens {KV_TOKENS} --worker-flags='{WORKER_FLAGS[bits]}'"


@contextmanager
def server(setup: Setup, workloads: Sequence[Workload], template: str = "") -> Iterator[Running]:
    """Starts Rootstock's server, or the one of the command template."""
    try:
        with running_server(template or server_template(setup.variant.bits), setup.model, setup.log) as url:
            yield Running(lambda job: uvloop.run(load(url, job)), lambda: resident(psutil.Process().children(recursive=True)))
    except ServerFailed as error:
        raise Absent(" ".join(str(error).split())) from None


async def load(url: str, job: Job) -> float:
    sessions = [Session(0, None, (Turn(tuple(prompt), job.output_len),)) for prompt in job.prompts]
    async with open_http(timeout_s=REQUEST_TIMEOUT_S) as http:
        player = Player(http, Endpoint(f"{url}/v1/completions", False, await first_model(http, url), ignore_eos=True))
        begun = time.perf_counter()
        await closed_loop(sessions, job.in_flight, player.play)
        seconds = time.perf_counter() - begun
    for outcome in player.outcomes:
        if outcome.error is not None:
            raise RunFailed(f"a request failed: {outcome.error}: {outcome.error_detail}")
    check_lengths([outcome.completion_tokens for outcome in player.outcomes], job)
    return seconds


@contextmanager
def driver(setup: Setup, workloads: Sequence[Workload], script: Path | None = None) -> Iterator[Running]:
    """Starts the driver of an engine, or `script`."""
    command = [str(setup.python), "-u", str(script or DRIVERS / ENGINES[setup.variant.engine].driver)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    setup.log.parent.mkdir(parents=True, exist_ok=True)
    with setup.log.open("w") as errors:
        env = environ(OMP_NUM_THREADS=str(setup.threads), LD_PRELOAD=preloaded(setup))
        process: subprocess.Popen[str] = subprocess.Popen(command, stderr=errors, env=env, cwd=setup.log.parent, **pipes)
        try:
            if "ready" not in exchange(process, setup, start_line(setup, workloads)):
                raise Absent(f"the engine did not start: {tail(setup.log)}")
            yield Running(lambda job: drive(process, setup, job), lambda: resident(tree(process.pid)))
        finally:
            stop(process)


def preloaded(setup: Setup) -> str:
    """Returns the value of LD_PRELOAD for an engine's driver. A library that is not installed is left out."""
    places, patterns = (setup.python.parent.parent, Path("/usr/lib")), ENGINES[setup.variant.engine].preloaded
    found = [library for pattern in patterns for place in places for library in place.glob(pattern)]
    return ":".join(map(str, found))


def start_line(setup: Setup, workloads: Sequence[Workload]) -> dict[str, Any]:
    lengths = [workload.input_len + workload.output_len for workload in workloads]
    limits = {"max_len": max(lengths), "max_in_flight": max(workload.in_flight for workload in workloads), "kv_tokens": KV_TOKENS}
    return {"model": str(setup.model), "bits": setup.variant.bits, "threads": setup.threads, **limits}


def exchange(process: subprocess.Popen[str], setup: Setup, line: dict[str, Any]) -> dict[str, Any]:
    """Sends a line to the driver and returns its reply, which is empty if the driver has ended."""
    assert process.stdin is not None and process.stdout is not None, "a driver has pipes"
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(line) + "\n")
        process.stdin.flush()
    reply = process.stdout.readline()
    return json.loads(reply) if reply else {}


def drive(process: subprocess.Popen[str], setup: Setup, job: Job) -> float:
    reply = exchange(process, setup, asdict(job))
    if not reply:
        raise RunFailed(f"the driver ended: {tail(setup.log)}")
    check_lengths(reply["lengths"], job)
    return float(reply["seconds"])


def stop(process: subprocess.Popen[str]) -> None:
    """Closes the driver's stdin and waits. Then kills its process group, which contains only the driver and its children."""
    assert process.stdin is not None and process.stdout is not None, "a driver has pipes"
    with suppress(BrokenPipeError):
        process.stdin.close()
    deadline = time.monotonic() + DRIVER_STOP_S
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def resident(processes: Sequence[psutil.Process]) -> int:
    """Returns the proportional set size of the processes in bytes, in which memory that they share counts once."""
    total = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total
