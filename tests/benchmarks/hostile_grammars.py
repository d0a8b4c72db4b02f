"""Latency of normal streams while hostile grammars are sent: python -m tests.benchmarks.hostile_grammars

The benchmark starts the whole system. Normal greedy streams run in `--streams` lanes, in four phases per repetition:

1. quiet: the streams run alone;
2. control: a process of the lowest priority writes to memory. The measured slowdown is the one that any busy process causes.
   Grammar compilation causes at least as much;
3. after the end of the control process, another process sends every hostile grammar, one after another;
4. one more process sends all hostile grammars at once.

Each repetition changes the grammars, so that none is cached. The output has inter-token latencies (gaps between chunks in ms) and
their ratio to the quiet phase of the same repetition. After that, the output has one line for each name of a hostile request: all
statuses, the longest time, and the last output or error message. The exit status is 1 if a process died, a normal stream failed,
or a hostile request was neither served nor refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.cli.bench import machine
from rootstock_llm.services.cli.bench.client import Endpoint, open_http, stream
from tests.benchmarks.hostile_bodies import hostile_bodies
from tests.benchmarks.machine import busy_cores
from tests.e2e.system import ROOT, System

STREAM_TOKENS = 400
WARMUP_S = 2.0
ANSWER_S = 90.0
BUSY_SAMPLE_S = 2.0
STRANGER = "while True:\n  block = bytearray(1 << 26)\n  block[::4096] = bytes(1 << 14)"
EXPECTED = (200, 400, 413, 503)
PROMPTS = ("Count from 3 to 9.", "Spell the word lantern.", "What is 17 + 25?", "Repeat: naïve 日本語")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a hostile request."""

    name: str
    status: int  # 0: no response
    seconds: float
    text: str  # first characters of the output or of the error message


@dataclass(frozen=True, slots=True)
class Phase:
    """Measurement of the normal streams in one phase."""

    name: str
    seconds: float
    gaps: NDArray[np.float64]  # between chunks, in ms
    failures: int  # streams that failed

    @property
    def p50(self) -> float:
        return float(np.percentile(self.gaps, 50))

    @property
    def p99(self) -> float:
        return float(np.percentile(self.gaps, 99))


async def attack(url: str, nonce: int, at_once: bool) -> list[Verdict]:
    """Sends every hostile request, in sequence or all at once, and returns the results in order."""
    async with open_http(timeout_s=ANSWER_S) as http:
        calls = [_send(http, url, name, body) for name, body in hostile_bodies(nonce)]
        return list(await asyncio.gather(*calls)) if at_once else [await call for call in calls]


async def _send(http: aiohttp.ClientSession, url: str, name: str, body: bytes) -> Verdict:
    begun = time.perf_counter()
    try:
        async with http.post(f"{url}/v1/completions", data=body) as answer:
            status, text = answer.status, await answer.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        status, text = 0, f"{type(error).__name__}: {error}"
    return Verdict(name, status, time.perf_counter() - begun, _text_of(status, text))


def _text_of(status: int, text: str) -> str:
    """Returns at most 100 characters of the output or error message.

    If the response is JSON, each run of white space in this text becomes one space.
    """
    try:
        answer = json.loads(text)
    except json.JSONDecodeError:
        return text[:100]
    found = answer["choices"][0]["text"] if status == 200 else answer["error"]["message"]
    return " ".join(str(found).split())[:100]


class Lanes:
    """Lanes that each run one normal stream after another."""

    def __init__(self, url: str, count: int) -> None:
        self._endpoint = Endpoint(f"{url}/v1/completions", False, "demo", ignore_eos=True)
        self._count = count
        self._stop = asyncio.Event()

    async def run(self, name: str, until: asyncio.Task[Any]) -> Phase:
        """Runs the streams until the task has ended."""
        until.add_done_callback(lambda _: self._stop.set())
        begun = time.perf_counter()
        gaps: list[float] = []
        async with open_http() as http:
            failures = sum(await asyncio.gather(*(self._lane(http, PROMPTS[i % len(PROMPTS)], gaps) for i in range(self._count))))
        return Phase(name, time.perf_counter() - begun, np.array(gaps) * 1e3, failures)

    async def _lane(self, http: aiohttp.ClientSession, prompt: str, gaps: list[float]) -> int:
        failures = 0
        while not self._stop.is_set():
            outcome = await stream(http, self._endpoint, self._endpoint.body({"prompt": prompt}, STREAM_TOKENS))
            gaps += outcome.itl_s
            failures += outcome.error is not None
        return failures


async def attacker(url: str, nonce: int, at_once: bool) -> list[Verdict]:
    """Runs the attack in its own process, so that it does not delay the measuring process."""
    argv = [
        "-m",
        "tests.benchmarks.hostile_grammars",
        "--attack",
        url,
        "--nonce",
        str(nonce),
        *(["--at-once"] if at_once else []),
    ]
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the attacking process ended with exit status {process.returncode}")
    return [Verdict(**verdict) for verdict in json.loads(output)]


async def quiet(url: str, streams: int, seconds: float) -> Phase:
    return await Lanes(url, streams).run("quiet", asyncio.create_task(asyncio.sleep(seconds)))


@contextmanager
def background_process() -> Iterator[None]:
    """Runs a process of the lowest priority that writes to new memory in a loop."""
    process = subprocess.Popen([sys.executable, "-c", STRANGER], preexec_fn=lambda: os.nice(19))
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def repetition(url: str, streams: int, quiet_s: float, nonce: int) -> tuple[list[Phase], list[Verdict]]:
    phases = [await quiet(url, streams, quiet_s)]
    with background_process():
        control = Lanes(url, streams).run("control", asyncio.create_task(asyncio.sleep(quiet_s)))
        phases.append(await control)
    verdicts: list[Verdict] = []
    for name, at_once in (("one after another", False), ("all at once", True)):
        task = asyncio.create_task(attacker(url, 2 * nonce + at_once, at_once))
        phases.append(await Lanes(url, streams).run(name, task))
        verdicts += task.result()
    return phases, verdicts


def print_phases(streams: int, number: int, phases: Sequence[Phase]) -> float:
    """Prints each phase.

    Returns:
        The largest p99 of inter-token latency in the two hostile phases (`phases[2:]`), divided by the p99 of the quiet phase.
    """
    quiet = phases[0]
    for phase in phases:
        ratio = f"p50 x{phase.p50 / quiet.p50:5.2f}  p99 x{phase.p99 / quiet.p99:5.2f}" if phase is not quiet else ""
        print(
            f"{streams} stream(s), repetition {number}, {phase.name:18} {phase.seconds:5.1f} s  {len(phase.gaps):6} gaps"
            f"  p50 {phase.p50:7.2f}  p99 {phase.p99:7.2f}  max {phase.gaps.max():8.2f}  {ratio}"
            + (f"  {phase.failures} FAILED" if phase.failures else ""),
            flush=True,
        )
    return max(phase.p99 for phase in phases[2:]) / quiet.p99


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    by_name: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_name.setdefault(verdict.name, []).append(verdict)
    for name, of_name in by_name.items():
        statuses = "/".join(str(status) for status in sorted({verdict.status for verdict in of_name}))
        slowest = max(verdict.seconds for verdict in of_name)
        print(f"{name:28} {statuses:8} {slowest:6.2f} s at most  {of_name[-1].text}")


def measure(args: argparse.Namespace, logs: Path) -> int:
    busy = busy_cores(BUSY_SAMPLE_S)
    print(f"{machine.cpu_model()}, {machine.usable_cores()} cores; before: {busy:.2f} cores busy, load {os.getloadavg()[0]:.2f}")
    verdicts: list[Verdict] = []
    worst: list[float] = []
    failures = 0
    with System(logs, log_level="info", worker_flags=args.worker_flags) as system:
        pids = {name: child.pid for name, child in system.children.items()}
        for streams in args.streams:
            asyncio.run(quiet(system.url, streams, WARMUP_S))
            for number in range(args.repetitions):
                phases, got = asyncio.run(repetition(system.url, streams, args.quiet_s, 100 * streams + number))
                worst.append(print_phases(streams, number + 1, phases))
                verdicts += got
                failures += sum(phase.failures for phase in phases)
        died = [name for name, child in system.children.items() if child.exit_code is not None or child.pid != pids[name]]
    print_verdicts(verdicts)
    print(f"larger p99 of the hostile phases / quiet p99, by repetition:  {', '.join(f'{ratio:.2f}' for ratio in worst)}")
    print(f"processes that died: {', '.join(died) or 'none'}")
    return 1 if died or failures or any(verdict.status not in EXPECTED for verdict in verdicts) else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hostile_grammars", description="Latency of streams during hostile grammars.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quiet-s", type=float, default=10.0)
    parser.add_argument("--worker-flags", default="")
    parser.add_argument("--attack", default="", help="Internal: only send the hostile requests to this URL.")
    parser.add_argument("--nonce", type=int, default=0)
    parser.add_argument("--at-once", action="store_true")
    args = parser.parse_args(argv)
    if args.attack:
        print(json.dumps([asdict(verdict) for verdict in asyncio.run(attack(args.attack, args.nonce, args.at_once))]))
        return 0
    with tempfile.TemporaryDirectory() as logs:
        return measure(args, Path(logs))


if __name__ == "__main__":
    sys.exit(main())
