"""Speed of Rootstock and of other engines on CPU cores: python -m tests.benchmarks.engines (make bench-peers)

Each engine is installed, with pinned versions, into its own environment in --folder. All engines get the same checkpoint with
random weights, converted if the engine needs it, the same prompts of token ids, the same cores and KV memory for the same number
of tokens. Sampling is greedy, and no end token ends a request.

Each round starts one engine after the other, in an order that changes from round to round. Before each workload, the engine gets
a warm-up request. Rootstock runs as a server with an HTTP client on the same cores. The other engines run inside a driver
process, without HTTP and without text. vLLM recommends tcmalloc, which its driver loads if Debian's libtcmalloc-minimal4 is
installed. The output has the median and the range over the rounds of:

- tokens per second: output tokens, and for the workload with shared prefixes also prompt tokens;
- resident memory of all processes of the engine, including its KV;
- the ratio of Rootstock's rate to the best rate of another engine with weights of equal bits.

If a request gets a wrong number of tokens, its workload has failed. An engine that cannot be installed or started is listed with
the reason. With the defaults, the rounds take about 90 minutes on two cores.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rootstock_llm.services.cli.bench import machine, report
from rootstock_llm.services.worker.settings import WorkerSettings
from tests.benchmarks.compare_transformers import BUILD, BUSY_LIMIT, BUSY_SAMPLE_S, MeasurementFailed, ensure_model, keep_to_cores
from tests.benchmarks.engines.catalogue import ENGINES, ROOTSTOCK, Variant, plan, variants
from tests.benchmarks.engines.environment import Absent, converted, install
from tests.benchmarks.engines.results import Measurement, Results
from tests.benchmarks.engines.running_engine import RunFailed, Running, Setup, running
from tests.benchmarks.engines.workloads import SMOKE_WORKLOADS, WORKLOADS, Workload, jobs
from tests.benchmarks.machine import busy_cores
from tests.benchmarks.server_process import ROOT

SMOKE_SHAPE = "tiny-wide"


def prepare(args: argparse.Namespace) -> tuple[dict[Variant, Setup], dict[Variant, str]]:
    """Installs the engines and converts the checkpoint. Returns the setups of usable variants, and the reasons of absent ones."""
    setups, absent = {}, {}
    for variant in variants(args.engines, args.bits):
        log = args.folder / "logs" / f"{variant.engine}-{variant.bits}.log"
        try:
            python, model = locate(variant, args)
            setups[variant] = Setup(variant, python, model, args.cores, log)
        except Absent as error:
            absent[variant] = str(error)
            print(f"{variant.label} is absent: {error}", file=sys.stderr)
    return setups, absent


def locate(variant: Variant, args: argparse.Namespace) -> tuple[Path, Path]:
    """Returns the interpreter and the model folder of a variant. Raises Absent if it cannot be used."""
    if variant.engine == ROOTSTOCK:
        if variant.bits != 16 and "quantization" not in WorkerSettings.model_fields:
            raise Absent("the worker has no setting `quantization`")
        return Path(sys.executable), args.model
    python = install(variant.engine, args.folder, shlex.split(args.pip_flags))
    return python, converted(variant, python, args.model, args.folder)


def measure(setup: Setup, number: int, workloads: dict[str, Workload], args: argparse.Namespace) -> Iterator[Measurement]:
    """Starts an engine and yields a measurement of each workload that it can run. Raises Absent if the engine does not start."""
    busy = busy_cores(BUSY_SAMPLE_S)
    if busy > BUSY_LIMIT:
        print(f"other processes use {busy:.1f} cores, so this round is unreliable", file=sys.stderr)
    chosen = {name: workload for name, workload in workloads.items() if setup.variant.can_run(workload.in_flight)}
    if not chosen:
        return
    with running(setup, list(chosen.values())) as engine:
        for name, workload in chosen.items():
            rate, failure, memory = timed(engine, workload, args, (args.seed, number, workload.in_flight))
            one = Measurement(number, setup.variant, name, rate, failure, memory, busy)
            print(f"round {number}, {setup.variant.label}, {name}: {failure or f'{rate:.1f} tokens/s'}", file=sys.stderr)
            yield one


def timed(engine: Running, workload: Workload, args: argparse.Namespace, seed: tuple[int, ...]) -> tuple[float | None, str, int]:
    """Returns the rate of a workload, the reason of its failure, and the resident bytes."""
    warm_up, job = jobs(workload, args.model, seed)
    try:
        engine.run(warm_up)
        return workload.tokens / engine.run(job), "", engine.memory()
    except RunFailed as error:
        return None, str(error), 0


def measure_all(args: argparse.Namespace) -> Results:
    setups, absent = prepare(args)
    source = SMOKE_WORKLOADS if args.smoke else WORKLOADS
    workloads = {name: source[name] for name in args.workloads}
    found: list[Measurement] = []
    for number, variant in plan(list(setups), args.rounds):
        if variant in absent:
            continue
        try:
            for one in measure(setups[variant], number, workloads, args):
                found.append(one)
                report.append_lines(args.output_file, [as_data(args, one)])
        except Absent as error:
            absent[variant] = str(error)
            print(f"{variant.label} is absent: {error}", file=sys.stderr)
    return Results(found, absent)


def as_data(args: argparse.Namespace, one: Measurement) -> dict[str, Any]:
    parameters = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    return {"kind": "engines", "parameters": parameters, "machine": machine.describe(), **asdict(one)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.engines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--bits", type=int, nargs="+", choices=[16, 8, 4], default=[16, 8, 4], help="bits per weight")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, help="default 3, or 1 with --smoke")
    parser.add_argument("--cores", type=int, default=2, help="number of cores for all processes, and of threads of each engine")
    parser.add_argument("--shape", help=f"see make_model; default qwen3-0.6b, or {SMOKE_SHAPE} with --smoke")
    parser.add_argument("--model", type=Path, help=f"folder of the checkpoint, made if missing; default {BUILD}/SHAPE")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "engines", help="environments, conversions and logs")
    parser.add_argument("--pip-flags", default="", help="further flags of pip install, such as an index of torch without CUDA")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="few short requests on a tiny model, to check the drivers")
    parser.add_argument(
        "--output-file", type=Path, default=BUILD / "engines.jsonl", help="file to which a JSON line is appended per measurement"
    )
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (1 if args.smoke else 3)
    args.shape = args.shape or (SMOKE_SHAPE if args.smoke else "qwen3-0.6b")
    args.model, args.folder = (args.model or BUILD / args.shape).resolve(), args.folder.resolve()
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exit from the with blocks stops the engine
    try:
        keep_to_cores(args.cores)
    except MeasurementFailed as error:
        print(f"engines: {error}", file=sys.stderr)
        return 1
    ensure_model(args.model, args.shape)
    results = measure_all(args)
    print(results.tables())
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
