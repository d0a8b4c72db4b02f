"""python -m tests.benchmarks.gateway_cpu [OTHER]: CPU time of the gateway process per short chat.

With --stream, the chats are streamed. The worker sends one token per step and computes nothing. Tokenizer and detokenizer run
with the demo model. OTHER is another checkout's folder with its own .venv. With OTHER, a gateway of each checkout uses the same
services, and the gateways are measured in turns. Prints user plus system time per request by round. --profile shows the functions
of this checkout under cProfile, which about doubles the CPU time.
"""

from __future__ import annotations

import argparse
import pstats
import signal
import statistics
import sys
import time
from pathlib import Path

import orjson
import psutil
import uvloop

from rootstock_llm.services.local.plan import redis_argv
from rootstock_llm.services.local.ports import HOST, free_ports
from rootstock_llm.services.local.supervisor import Child, Command
from tests.benchmarks.gateway_load import DEMO, ROOT, START_S, _answers
from tests.benchmarks.gateway_load_client import http_request, run_requests
from tests.benchmarks.gateway_load_worker import MODEL, STEP_S
from tests.benchmarks.server_process import module_of

LOGS = ROOT / "build" / "run" / "gateway-cpu"
QUESTION = "Which three rivers are the longest in Europe, and through which countries do they flow?"


def chat(stream: bool) -> bytes:
    messages = [{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": QUESTION}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0.7, "stream": stream}
    return http_request("/v1/chat/completions", orjson.dumps(body))


class Gateways:
    """Runs one gateway per checkout and the services that all gateways share. All processes end on exit.

    Args:
        checkouts: folder of each checkout by name.
        tokens: output tokens per response.
        profile: file for the cProfile data of this checkout's gateway; None for no profile.
        step_s: seconds between two tokens of a response.
        more: further flags of the gateways.
    """

    def __init__(
        self,
        checkouts: dict[str, Path],
        tokens: int,
        profile: Path | None = None,
        step_s: float = STEP_S,
        more: tuple[str, ...] = (),
    ) -> None:
        ports = iter(free_ports(6 + 2 * len(checkouts)))
        redis, token, token_metrics, detok, detok_metrics, worker = (next(ports) for _ in range(6))
        redis_url = f"redis://{HOST}:{redis}/0"
        commands = [Command("redis", redis_argv(redis))]
        for service, port, metrics in (("tokenizer", token, token_metrics), ("detokenizer", detok, detok_metrics)):
            flags = ["--model", str(DEMO), "--port", str(port), "--metrics-port", str(metrics), "--served-model-name", MODEL]
            commands.append(Command(service, [sys.executable, "-m", f"rootstock_llm.services.{service}", *flags]))
        flags = ["--port", str(worker), "--redis-url", redis_url, "--tokens", str(tokens)]
        flags += ["--step-s", str(step_s)]
        commands.append(Command("worker", [sys.executable, "-m", "tests.benchmarks.gateway_load_worker", *flags]))
        peers = ["--workers", f"{HOST}:{worker}", "--redis-url", redis_url, "--log-level", "warning"]
        peers += ["--tokenizers", f"{HOST}:{token}", "--detokenizers", f"{HOST}:{detok}", *more]
        self.ports: dict[str, int] = {}
        self._children = [Child(command, LOGS) for command in commands]
        self._gateways: dict[str, Child] = {}
        for name, checkout in checkouts.items():
            self.ports[name] = next(ports)
            flags = ["--port", str(self.ports[name]), "--health-port", str(next(ports)), *peers]
            profiler = ["-m", "cProfile", "-o", str(profile)] if profile and checkout == ROOT else []
            argv = [
                "env",
                "-C",
                str(checkout),
                f"{checkout}/.venv/bin/python",
                *profiler,
                "-m",
                module_of(checkout, "gateway"),
                *flags,
            ]
            self._gateways[name] = Child(Command(f"gateway-{name}", argv), LOGS)

    def __enter__(self) -> Gateways:
        LOGS.mkdir(parents=True, exist_ok=True)
        for child in (*self._children, *self._gateways.values()):
            child.log.unlink(missing_ok=True)
            child.start()
        for name, port in self.ports.items():
            deadline = time.monotonic() + START_S
            while not _answers(f"http://{HOST}:{port}/readiness"):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the {name} gateway is not ready:\n{self._gateways[name].last_lines(10)}")
                time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the gateways before the other processes. An ending gateway writes its profile."""
        for child in (*self._gateways.values(), *reversed(self._children)):
            child.signal(signal.SIGTERM)
            deadline = time.monotonic() + 15
            while child.exit_code is None and time.monotonic() < deadline:
                time.sleep(0.02)
            child.kill_group()

    def process(self, name: str) -> psutil.Process:
        return psutil.Process(self._gateways[name].pid)

    def cpu_ms(self, name: str, request: bytes, count: int, connections: int) -> float:
        """Sends `count` requests to a gateway and returns its CPU time per request in ms."""
        times = self.process(name).cpu_times
        before = sum(times()[:2])
        tally = uvloop.run(run_requests((HOST, self.ports[name]), request, count, connections))
        used = sum(times()[:2]) - before
        if tally.failed:
            raise RuntimeError(f"{len(tally.failed)} requests failed; the first with {tally.failed[0]!r}")
        return used / count * 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="folder of the other checkout, with its own .venv")
    parser.add_argument("--requests", type=int, default=5000, help="requests to each gateway, summed over all rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=16, help="requests in flight")
    parser.add_argument("--tokens", type=int, default=8, help="output tokens per response")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument(
        "--profile",
        type=int,
        default=0,
        metavar="LINES",
        help="run this checkout's gateway under cProfile and print this many functions",
    )
    args = parser.parse_args()
    checkouts = {"this": ROOT} | ({"other": args.other.resolve()} if args.other else {})
    profile = LOGS / "gateway.prof" if args.profile else None
    request, count = chat(args.stream), args.requests // args.rounds
    found: dict[str, list[float]] = {name: [] for name in checkouts}
    with Gateways(checkouts, args.tokens, profile) as gateways:
        for name in checkouts:
            gateways.cpu_ms(name, request, 300, args.connections)
        for round_ in range(args.rounds):
            for name in list(checkouts)[:: 1 if round_ % 2 else -1]:
                found[name].append(gateways.cpu_ms(name, request, count, args.connections))
    for name, values in found.items():
        rounds = ", ".join(f"{value:.3f}" for value in values)
        print(f"{name}: {statistics.mean(values):.3f} ms of CPU per request over {count * args.rounds} ({rounds})")
    if profile:
        pstats.Stats(str(profile)).sort_stats("tottime").print_stats(args.profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
