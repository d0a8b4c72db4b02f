"""python -m tests.benchmarks.front [ATTACK ...] [--minutes M]: effect of hostile clients on the gateway and on other clients.

The whole system runs with the demo model and two API keys. Chats with one key arrive at a steady rate, each with a request to
/health. The other key attacks. For each attack, the output has:

- the responses to the attack, and the number of chats and requests to /health that failed;
- p99 of the chats' time to the first token, of their total time and of /health, in quiet seconds just before the attack and
  during the attack;
- the growth of each service's memory since just before the attack: at its peak, and a few seconds after the attack. The worker's
  KV pool is fully written before the first attack.

With --minutes, all attacks run at the same time, repeatedly, for this time. The growth of memory then has a limit two minutes
after the attacks and, except for the worker, another limit at its peak. The exit status is 1 if a chat or a request to /health
fails, memory exceeds a limit, or the machine is too slow even in quiet seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import psutil

from rootstock_llm.services.cli.bench import machine
from rootstock_llm.services.cli.bench.client import Endpoint, open_http, stream
from tests.benchmarks.front_attacks import ANSWER_S, ATTACKS
from tests.e2e.system import ROOT, System

SERVICES = ("gateway", "tokenizer", "detokenizer", "worker-0")
EVERY_S = 0.5  # seconds between the starts of two chats
TOKENS = 8  # output tokens of a chat
QUIET_S = 10.0  # seconds of chats without an attack
SETTLE_S, LATER_S = 5.0, 120.0  # seconds from the end of an attack, and of all attacks, to the measurement of memory
SAMPLE_S = 0.2
KV_TOKENS = 1 << 17  # tokens of the worker's KV pool; the prompts of one attack `batch` have more tokens and fill the whole pool
PEAK_MIB, AFTER_MIB = 300, 50  # limits of the growth of a service's memory: at its peak, and LATER_S after the attacks
PROBER, STRANGER = "prober", "stranger"


class Memory:
    """Samples the memory of each service's processes in a thread, in MiB: private memory plus proportional shares (PSS)."""

    def __init__(self, system: System) -> None:
        self._pids = {name: system.children[name].pid for name in SERVICES}
        self._stop = threading.Event()
        self.peak: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def now(self) -> dict[str, float]:
        return {name: self._pss_mib(pid) for name, pid in self._pids.items()}

    def begin(self) -> None:
        """Restarts the recording of the peak."""
        self.peak = self.now()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            for name, held in self.now().items():
                self.peak[name] = max(self.peak.get(name, 0.0), held)

    def _pss_mib(self, pid: int) -> float:
        process = psutil.Process(pid)
        return sum(_pss(each.pid) for each in (process, *process.children(recursive=True))) / 1024


def _pss(pid: int) -> int:
    """Returns the PSS in KiB; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


@dataclass(slots=True)
class Seen:
    """Results of the probe's chats and health requests."""

    ttft: list[float] = field(default_factory=list)  # seconds from a chat's request to its first token
    e2e: list[float] = field(default_factory=list)  # seconds from a chat's request to its end
    health: list[float] = field(default_factory=list)  # seconds of a GET /health
    failed: Counter[str] = field(default_factory=Counter)  # failed requests by error

    def p99(self) -> list[float]:
        """Returns the p99, in ms, of the chats' time to the first token, of the chats' total time, and of /health."""
        return [float(np.percentile(times, 99)) * 1e3 for times in (self.ttft, self.e2e, self.health)]


async def probe(url: str, until: asyncio.Future[None] | asyncio.Task[dict[str, int]]) -> Seen:
    """Starts chats and health requests at a steady rate until `until` is done. Then waits until all of them have ended."""
    seen = Seen()
    endpoint = Endpoint(f"{url}/v1/chat/completions", True, "demo", ignore_eos=True)
    async with open_http(PROBER, ANSWER_S) as http, aiohttp.ClientSession() as plain:
        chats: list[asyncio.Task[None]] = []
        while not until.done():
            chats.append(asyncio.create_task(_chat(http, endpoint, len(chats), seen)))
            chats.append(asyncio.create_task(_health(plain, url, seen)))
            await asyncio.sleep(EVERY_S)
        await asyncio.gather(*chats)
    return seen


async def _chat(http: aiohttp.ClientSession, endpoint: Endpoint, number: int, seen: Seen) -> None:
    prompt = {"messages": [{"role": "user", "content": f"Count from {number} to 9."}]}
    outcome = await stream(http, endpoint, endpoint.body(prompt, TOKENS))
    if outcome.error is not None or outcome.ttft_s is None:
        seen.failed[f"{outcome.error}: {outcome.error_detail}"] += 1
        return
    seen.ttft.append(outcome.ttft_s)
    seen.e2e.append(outcome.e2e_s)


async def _health(http: aiohttp.ClientSession, url: str, seen: Seen) -> None:
    begun = time.perf_counter()
    try:
        async with http.get(f"{url}/health", timeout=aiohttp.ClientTimeout(ANSWER_S)) as answer:
            if answer.status != 200:
                seen.failed[f"/health {answer.status}"] += 1
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.failed[f"/health {type(error).__name__}"] += 1
    seen.health.append(time.perf_counter() - begun)


async def attack(port: int, name: str) -> dict[str, int]:
    """Runs an attack in a child process and returns the number of responses by kind."""
    argv = ["-m", "tests.benchmarks.front_attacks", name, str(port), STRANGER]
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the attack {name} ended with exit status {process.returncode}")
    answers: dict[str, int] = orjson.loads(output)
    return answers


async def quiet(url: str) -> Seen:
    until: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(QUIET_S, until.set_result, None)
    return await probe(url, until)


async def one_row(system: System, memory: Memory, name: str) -> bool:
    """Runs an attack and prints its row. Returns whether no chat and no request to /health failed."""
    before, idle = await quiet(system.url), memory.now()
    memory.begin()
    begun = time.monotonic()
    task = asyncio.create_task(attack(system.port, name))
    beside = await probe(system.url, task)
    took = time.monotonic() - begun
    await asyncio.sleep(SETTLE_S)
    after = memory.now()
    answers = ", ".join(f"{count} × {result}" for result, count in sorted(task.result().items()))
    times = " | ".join(f"{was:.0f} → {now:.0f}" for was, now in zip(before.p99(), beside.p99(), strict=True))
    held = " | ".join(
        f"+{memory.peak[service] - idle[service]:.0f}, {after[service] - idle[service]:+.0f}" for service in SERVICES
    )
    print(f"| {name} | {answers} | {took:.0f} | {times} | {beside.failed.total()} | {held} |", flush=True)
    for result, count in beside.failed.items():
        print(f"failed: {count} × {result}", file=sys.stderr)
    return not beside.failed


async def all_at_once(system: System, memory: Memory, names: Sequence[str], minutes: float) -> bool:
    """Runs all attacks repeatedly and prints the memory of each service.

    Returns:
        True if no chat and no request to /health failed, and memory exceeded no limit.
    """
    before, idle = await quiet(system.url), memory.now()
    memory.begin()
    answers: dict[str, Counter[str]] = {name: Counter() for name in names}
    until = time.monotonic() + minutes * 60

    async def again_and_again(name: str) -> None:
        while time.monotonic() < until:
            answers[name].update(await attack(system.port, name))

    async def everything() -> dict[str, int]:
        await asyncio.gather(*map(again_and_again, names))
        return {}

    beside = await probe(system.url, asyncio.create_task(everything()))
    await asyncio.sleep(LATER_S)
    after, fine = memory.now(), not beside.failed
    print("| service | idle MiB | at most | two minutes later |\n| --- | ---: | ---: | ---: |")
    for service in SERVICES:
        most, left = memory.peak[service] - idle[service], after[service] - idle[service]
        fine = fine and left <= AFTER_MIB and (most <= PEAK_MIB or service == "worker-0")
        print(f"| {service} | {idle[service]:.0f} | +{most:.0f} | {left:+.0f} |")
    for name, counts in answers.items():
        print(f"{name}: " + ", ".join(f"{count} × {result}" for result, count in sorted(counts.items())))
    times = ", ".join(f"{was:.0f} → {now:.0f}" for was, now in zip(before.p99(), beside.p99(), strict=True))
    print(f"other clients: {len(beside.e2e)} chats, {dict(beside.failed)} failed; p99 of TTFT, total, /health in ms: {times}")
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"attacks to run: {', '.join(ATTACKS)}; all by default")
    parser.add_argument(
        "--minutes", type=float, default=0, help="minutes for which all attacks run at once; 0: one after the other"
    )
    args = parser.parse_args()
    names = args.attacks or list(ATTACKS)
    if unknown := set(names) - ATTACKS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    print(f"{machine.cpu_model()}, {machine.usable_cores()} cores; before: load {os.getloadavg()[0]:.2f}\n")
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        keys.write_text(json.dumps({"keys": [{"name": name, "key": name} for name in (PROBER, STRANGER)]}))
        with (
            System(
                Path(folder), gateway_flags=f"--api-keys-file {keys}", log_level="warning", max_total_tokens=KV_TOKENS
            ) as system,
            Memory(system) as memory,
        ):
            # This writes the whole KV pool, so that the pool's memory is resident and does not count as growth later.
            written, still = asyncio.run(attack(system.port, "batch")), asyncio.run(quiet(system.url))
            if "200" not in written or still.failed or still.p99()[1] > QUIET_S * 1e3:
                slow = f"chats without an attack: p99 {still.p99()[1]:.0f} ms, failed {dict(still.failed)}"
                sys.exit(f"the machine is too slow. Responses to a batch: {written}; {slow}")
            if args.minutes:
                return int(not asyncio.run(all_at_once(system, memory, names, args.minutes)))
            columns = [
                "attack",
                "answers",
                "s",
                *(f"p99 {what}, ms" for what in ("TTFT", "whole", "/health")),
                "failed",
                *SERVICES,
            ]
            print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
            held = [asyncio.run(one_row(system, memory, name)) for name in names]
            return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
