"""Output tokens per second against transformers.generate: python -m tests.benchmarks.compare_transformers

Both sides use random bf16 weights, the same distinct prompts and the same cores, one side at a time. The server shares the cores
with the client. For every round and concurrency c, the benchmark starts the server, sends a warm-up request, sends c requests at
once, and stops the server. Then transformers runs the same c prompts as a batch in a child process. Start, load and warm-up are
not measured. With `--against executor`, the child process runs the worker's executor alone, without scheduler and server. The
ratio is then the share of the executor's speed that the whole system keeps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from rootstock_llm.services.cli.bench import machine, report
from rootstock_llm.services.cli.bench.client import Endpoint, Outcome, first_model, open_http, stream
from tests.benchmarks.intervals import interval
from tests.benchmarks.machine import busy_cores
from tests.benchmarks.server_process import ROOT, ROOTSTOCK, ServerFailed, running_server

BUILD = ROOT / "build" / "bench"
REFERENCES = ("transformers", "executor")
CHILD_TIMEOUT_S = 3600.0
WARMUP_STREAM = 999
BUSY_SAMPLE_S = 1.0  # seconds over which the CPU use of other processes is measured
BUSY_LIMIT = 0.2  # if other processes use more cores than this, a round's ratio is unreliable


class MeasurementFailed(Exception):
    """Raised if the server or the reference fails or returns a wrong number of tokens, so the measurement has no result."""


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts of one measurement, for the server and for the reference."""

    model: Path
    prompts: list[list[int]]
    output_len: int

    @property
    def tokens(self) -> int:
        return len(self.prompts) * self.output_len


@dataclass(frozen=True, slots=True)
class Pair:
    """Results of both sides for one concurrency in one round."""

    concurrency: int
    round: int
    rootstock: float  # output tokens per second
    reference: float  # output tokens per second of transformers or of the executor
    busy_cores: float = 0.0  # cores used by other processes just before the measurement

    @property
    def ratio(self) -> float:
        return self.rootstock / self.reference


def ensure_model(folder: Path, shape: str) -> None:
    if not (folder / "config.json").is_file():
        command = [sys.executable, "-m", "tests.benchmarks.make_model", str(folder), "--shape", shape]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)


def draw_prompts(model: Path, count: int, length: int, seed: Sequence[int]) -> list[list[int]]:
    """Draws random ids from the first nine tenths of the vocabulary, because the last ids are special tokens."""
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    prompts: list[list[int]] = np.random.default_rng(seed).integers(0, vocab * 9 // 10, size=(count, length)).tolist()
    return prompts


def measure_server(job: Job, template: str, warmup: list[int], log: Path) -> float:
    with running_server(template, job.model, log) as url:
        return uvloop.run(burst(url, job, warmup))


async def burst(url: str, job: Job, warmup: list[int]) -> float:
    """Sends all prompts at once, after an unmeasured request, and returns the output tokens per second."""
    async with open_http(timeout_s=CHILD_TIMEOUT_S) as http:
        endpoint = Endpoint(f"{url}/v1/completions", False, await first_model(http, url), ignore_eos=True)
        check(await stream(http, endpoint, endpoint.body({"prompt": warmup}, job.output_len)), job.output_len)
        bodies = [endpoint.body({"prompt": prompt}, job.output_len) for prompt in job.prompts]
        start = time.perf_counter()
        outcomes = await asyncio.gather(*(stream(http, endpoint, body) for body in bodies))
        seconds = time.perf_counter() - start
    for outcome in outcomes:
        check(outcome, job.output_len)
    return job.tokens / seconds


def check(outcome: Outcome, output_len: int) -> None:
    if outcome.error is not None:
        raise MeasurementFailed(f"a request failed: {outcome.error}: {outcome.error_detail}")
    if outcome.completion_tokens != output_len:
        raise MeasurementFailed(f"a request returned {outcome.completion_tokens} tokens, not {output_len}")


def measure_reference(job: Job, against: str, threads: int, log: Path) -> float:
    command = [sys.executable, "-m", f"tests.benchmarks.{against}_generate"]
    text = json.dumps({"model": str(job.model), "prompts": job.prompts, "output_len": job.output_len, "threads": threads})
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as errors:
        pipes: dict[str, Any] = {"input": text, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
        done = subprocess.run(command, cwd=ROOT, timeout=CHILD_TIMEOUT_S, check=False, **pipes)
    if done.returncode != 0:
        raise MeasurementFailed(f"{against} ended with status {done.returncode}; see {log}")
    result = json.loads(done.stdout)
    if result["tokens"] != job.tokens:
        raise MeasurementFailed(f"{against} returned {result['tokens']} tokens, not {job.tokens}")
    return float(result["tokens"] / result["seconds"])


def measure_pair(args: argparse.Namespace, concurrency: int, number: int) -> Pair:
    prompts = draw_prompts(args.model, concurrency, args.input_len, (args.seed, number, concurrency))
    (warmup,) = draw_prompts(args.model, 1, args.input_len, (args.seed, number, concurrency, WARMUP_STREAM))
    job, name = Job(args.model, prompts, args.output_len), f"c{concurrency}-r{number}.log"
    logs = args.output_file.resolve().parent / "logs"
    busy = busy_cores(BUSY_SAMPLE_S)
    if busy > BUSY_LIMIT:
        print(f"other processes use {busy:.1f} cores, so the ratio of this round is unreliable", file=sys.stderr)
    server = measure_server(job, args.server_command, warmup, logs / f"server-{name}")
    reference = measure_reference(job, args.against, args.cores, logs / f"{args.against}-{name}")
    pair = Pair(concurrency, number, server, reference, busy)
    print(
        f"round {number}, {concurrency} in flight: {server:.1f} and {reference:.1f} tok/s, ratio {pair.ratio:.2f}",
        file=sys.stderr,
    )
    return pair


def table(pairs: Sequence[Pair], against: str = "transformers") -> str:
    """Returns a Markdown table of medians over the rounds: both rates, and their ratio with its 95 % interval."""
    lines = [f"| in flight | rootstock tok/s | {against} tok/s | ratio | 95 % interval |", "|---:|---:|---:|---:|---:|"]
    for concurrency in dict.fromkeys(p.concurrency for p in pairs):
        of = [p for p in pairs if p.concurrency == concurrency]
        ratios = [p.ratio for p in of]
        numbers = (statistics.median(p.rootstock for p in of), statistics.median(p.reference for p in of))
        least, most = interval(ratios)
        cells = [str(concurrency), *(f"{n:.1f}" for n in numbers), f"{statistics.median(ratios):.2f}"]
        lines.append("| " + " | ".join([*cells, f"{least:.2f} to {most:.2f}"]) + " |")
    return "\n".join(lines)


def as_data(args: argparse.Namespace, pairs: Sequence[Pair]) -> dict[str, Any]:
    parameters = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    rounds = [asdict(p) | {"ratio": p.ratio} for p in pairs]
    return {"kind": "compare_transformers", "parameters": parameters, "machine": machine.describe(), "rounds": rounds}


def keep_to_cores(count: int) -> None:
    """Pins this process and all its children to the first `count` usable cores."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        raise MeasurementFailed(f"--cores is {count}; this process can use {len(cores)}. Ask for fewer.")
    os.sched_setaffinity(0, cores[:count])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", choices=REFERENCES, default=REFERENCES[0])
    parser.add_argument("--shape", default="qwen3-0.6b", help="see make_model")
    parser.add_argument("--model", type=Path, help=f"folder of the checkpoint, made if missing; default {BUILD}/SHAPE")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cores", type=int, default=2, help="number of cores for all processes; also the number of the reference's threads"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--server-command", default=ROOTSTOCK, help="server, with {python}, {model} and {port}; default: %(default)s"
    )
    parser.add_argument(
        "--output-file",
        type=Path,
        default=BUILD / "compare_transformers.jsonl",
        help="file to which a JSON line is appended; the logs are written to the same folder",
    )
    args = parser.parse_args(argv)
    args.model = (args.model or BUILD / args.shape).resolve()
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exit from the with blocks stops the server
    try:
        keep_to_cores(args.cores)
        ensure_model(args.model, args.shape)
        pairs = [measure_pair(args, c, number) for number in range(args.rounds) for c in args.concurrency]
    except (MeasurementFailed, ServerFailed) as error:
        print(f"compare_transformers: {error}", file=sys.stderr)
        return 1
    data = as_data(args, pairs)
    print(table(pairs, args.against))
    print(json.dumps(data))
    report.append_lines(args.output_file, [data])
    return 0


if __name__ == "__main__":
    sys.exit(main())
