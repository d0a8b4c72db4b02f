"""python -m tests.benchmarks.gateway_load: long prompts per second that a gateway can forward to workers that respond instantly.

Each request body of 220 kB has one prompt as token ids. A response has one token and is not streamed. Gateways, tokenizer,
detokenizer, Redis, workers and the load generator run on this machine. Prints requests/s, latencies, and the CPU time of each
process per request. --parts instead times each stage of a gateway's work on one body. --profile shows the functions of the first
gateway under cProfile.
"""

from __future__ import annotations

import argparse
import array
import os
import pstats
import random
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson
import psutil
import uvloop

from rootstock_llm.protos import tokenizer_pb2, worker_pb2
from rootstock_llm.services.gateway.api.generation_params import check_token_ids
from rootstock_llm.services.local.plan import redis_argv
from rootstock_llm.services.local.ports import HOST, free_ports
from rootstock_llm.services.local.supervisor import Child, Command
from rootstock_llm.services.shared.index.prefix_index import block_hashes, root_hash
from tests.benchmarks.gateway_load_client import Tally, http_request, run_load
from tests.benchmarks.gateway_load_worker import MODEL, VOCAB_SIZE

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"  # the tokenizer decodes the only token of each response
LOGS = ROOT / "build" / "run" / "gateway-load"
PATH = "/v1/completions"
START_S, WARM_UP_S = 60.0, 2.0


def make_body(rng: random.Random, size: int) -> bytes:
    """Returns a request body of at most `size` bytes whose prompt is random token ids."""
    ids: list[int] = []
    text = b'{"model":"%s","max_tokens":1,"temperature":0,"prompt":[' % MODEL.encode()
    left = size - len(text) - 2
    while left >= 7:
        ids.append(rng.randrange(VOCAB_SIZE))
        left -= len(str(ids[-1])) + 1
    return text + ",".join(map(str, ids)).encode() + b"]}"


class Fleet:
    """All processes of the measurement. They end on exit."""

    def __init__(self, gateways: int, workers: int, profile: Path | None) -> None:
        ports = iter(free_ports(5 + 2 * gateways + workers))
        redis, token, token_metrics, detok, detok_metrics = (next(ports) for _ in range(5))
        redis_url = f"redis://{HOST}:{redis}/0"
        commands = [Command("redis", redis_argv(redis))]
        for service, port, metrics in (("tokenizer", token, token_metrics), ("detokenizer", detok, detok_metrics)):
            flags = ["--model", str(DEMO), "--port", str(port), "--metrics-port", str(metrics), "--served-model-name", MODEL]
            commands.append(Command(service, [sys.executable, "-m", f"rootstock_llm.services.{service}", *flags]))
        addresses = []
        for index in range(workers):
            port = next(ports)
            addresses.append(f"{HOST}:{port}")
            flags = ["--name", f"instant-{index}", "--port", str(port), "--redis-url", redis_url]
            commands.append(Command(f"worker-{index}", [sys.executable, "-m", "tests.benchmarks.gateway_load_worker", *flags]))
        peers = ["--workers", ",".join(addresses), "--redis-url", redis_url, "--log-level", "warning"]
        peers += ["--tokenizers", f"{HOST}:{token}", "--detokenizers", f"{HOST}:{detok}"]
        profiler = ["-m", "cProfile", "-o", str(profile)] if profile else []
        self.targets: list[tuple[str, int]] = []
        for index in range(gateways):
            self.targets.append((HOST, next(ports)))
            flags = ["--port", str(self.targets[-1][1]), "--health-port", str(next(ports)), *peers]
            argv = [sys.executable, *(profiler if not index else []), "-m", "rootstock_llm.services.gateway", *flags]
            commands.append(Command(f"gateway-{index}", argv))
        LOGS.mkdir(parents=True, exist_ok=True)
        self.children = [Child(command, LOGS) for command in commands]

    def __enter__(self) -> Fleet:
        for child in self.children:
            child.log.unlink(missing_ok=True)
            child.start()
        for host, port in self.targets:
            self._wait_ready(f"http://{host}:{port}/readiness")
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the gateways before the other processes. An ending gateway writes its profile."""
        for child in reversed(self.children):
            child.signal(signal.SIGTERM)
            deadline = time.monotonic() + 15
            while child.exit_code is None and time.monotonic() < deadline:
                time.sleep(0.02)
            child.kill_group()

    def _wait_ready(self, url: str) -> None:
        deadline = time.monotonic() + START_S
        while not _answers(url):
            for child in self.children:
                if child.exit_code is not None:
                    raise RuntimeError(f"{child.command.name} ended before it was ready:\n{child.last_lines(10)}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{url} was not ready after {START_S:.0f} s")
            time.sleep(0.1)

    def cpu_s(self) -> dict[str, float]:
        """Returns the user plus system time of each process, including the load generator."""
        pids = {child.command.name: child.pid for child in self.children} | {"load": os.getpid()}
        return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def measure(args: argparse.Namespace, profile: Path | None) -> None:
    rng = random.Random(1)
    requests = [http_request(PATH, make_body(rng, args.body_bytes)) for _ in range(args.bodies)]
    with Fleet(args.gateways, args.workers, profile) as fleet:
        warm = uvloop.run(run_load(fleet.targets, requests, args.connections, WARM_UP_S))
        if warm.failed or not warm.latencies_s:
            raise RuntimeError(f"the warm-up request failed: {warm.failed[:1]}")
        for repeat in range(args.repeats):
            before, begun = fleet.cpu_s(), time.perf_counter()
            tally = uvloop.run(run_load(fleet.targets, requests, args.connections, args.seconds))
            took, after = time.perf_counter() - begun, fleet.cpu_s()
            report(args, repeat, tally, took, {name: after[name] - before[name] for name in after})


def report(args: argparse.Namespace, repeat: int, tally: Tally, took: float, cpu_s: dict[str, float]) -> None:
    count = len(tally.latencies_s)
    p50, p99 = np.percentile(np.array(tally.latencies_s) * 1000, (50, 99))
    shape = f"{args.gateways} gateway(s), {args.workers} worker(s), {args.connections} in flight, {args.body_bytes / 1000:.0f} kB"
    print(f"run {repeat + 1}: {count / took:.0f} requests/s   {p50:.1f} / {p99:.1f} ms median / p99   ({shape})")
    print(
        "  ms of CPU per request: "
        + ", ".join(f"{name} {used / count * 1000:.2f}" for name, used in cpu_s.items() if used > 0.01)
    )
    print(f"  cores used: {sum(cpu_s.values()) / took:.2f} of {len(os.sched_getaffinity(0))}")
    if tally.failed:
        print(f"  {len(tally.failed)} failed, the first: {tally.failed[0]!r}")


def time_parts(body_bytes: int) -> None:
    """Prints the time of each stage of a gateway's work on one request, measured separately in this process."""
    body = make_body(random.Random(1), body_bytes)
    ids = orjson.loads(body)["prompt"]
    packed = tokenizer_pb2.TokenIds(ids=ids).ids
    numbers, flat = np.array(ids, dtype=np.uint32), array.array("I", ids)
    submit = worker_pb2.Submit(handle=1, prompt_ids=packed)
    message = worker_pb2.GenerateRequest(submits=[submit])
    wire = message.SerializeToString()
    root = root_hash(MODEL, "", "", "")
    print(f"{len(body)} bytes, {len(ids)} ids; median ms of one call:")
    pieces: list[tuple[str, Callable[[], object]]] = [
        ("parse the JSON (orjson.loads)", lambda: orjson.loads(body)),
        ("check types and range (check_token_ids)", lambda: check_token_ids(ids, VOCAB_SIZE, "prompt")),
        ("  types alone (set(map(type, ids)))", lambda: set(map(type, ids))),
        ("  min and max alone", lambda: (min(ids), max(ids))),
        ("list -> array.array('I') (refuses floats, takes bools)", lambda: array.array("I", ids)),
        ("maximum of that array by numpy", lambda: np.frombuffer(flat, dtype=np.uint32).max()),
        ("list -> numpy uint32", lambda: np.array(ids, dtype=np.uint32)),
        ("list -> protobuf TokenIds", lambda: tokenizer_pb2.TokenIds(ids=ids)),
        ("numpy -> protobuf TokenIds", lambda: tokenizer_pb2.TokenIds(ids=numbers)),
        ("array.array -> protobuf TokenIds", lambda: tokenizer_pb2.TokenIds(ids=flat)),
        ("block hashes of protobuf ids", lambda: block_hashes(root, packed)),
        ("block hashes of a list", lambda: block_hashes(root, ids)),
        ("block hashes of a numpy array", lambda: block_hashes(root, numbers)),  # type: ignore[arg-type]
        ("Submit from protobuf ids", lambda: worker_pb2.Submit(handle=1, prompt_ids=packed)),
        ("Submit from a list", lambda: worker_pb2.Submit(handle=1, prompt_ids=ids)),
        ("ByteSize of the Submit", submit.ByteSize),
        ("append the Submit to a GenerateRequest (a copy)", lambda: worker_pb2.GenerateRequest(submits=[submit])),
        (
            "make the Submit in the GenerateRequest (submits.add)",
            lambda: worker_pb2.GenerateRequest().submits.add(handle=1, prompt_ids=packed),
        ),
        ("serialize the GenerateRequest", message.SerializeToString),
        ("parse the GenerateRequest in the worker", lambda: worker_pb2.GenerateRequest.FromString(wire)),
    ]
    for name, call in pieces:
        print(f"  {_median_ms(call):7.3f}  {name}")


def _median_ms(call: Callable[[], object], times: int = 200) -> float:
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
    return float(np.median(took)) * 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--connections", type=int, default=16, help="requests in flight")
    parser.add_argument("--body-bytes", type=int, default=220_000)
    parser.add_argument("--bodies", type=int, default=64, help="number of different request bodies")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--parts", action="store_true", help="time each stage of a gateway's work in this process instead of running a load"
    )
    parser.add_argument(
        "--profile",
        type=int,
        default=0,
        metavar="LINES",
        help="run the first gateway under cProfile and print this many functions",
    )
    args = parser.parse_args()
    if args.parts:
        time_parts(args.body_bytes)
        return 0
    profile = LOGS / "gateway.prof" if args.profile else None
    measure(args, profile)
    if profile:
        pstats.Stats(str(profile)).sort_stats("tottime").print_stats(args.profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
