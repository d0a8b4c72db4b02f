"""Effect of time-bounded prompt chunks on streams: python -m tests.benchmarks.chunk_pace [--adaptive-chunk-s S] ...

Two whole systems run on this machine, each with one worker of two threads: one with --adaptive-chunk-s (bounded), and one without
it (unbounded). Only one system at a time gets the load (streams_and_prompts.py), which has two parts that run at the same time.
Several lanes each run streams with short prompts, one after another. A separate lane sends long prompts one at a time.

The output has median ratios, bounded over unbounded, with 95 % intervals, for the streams' inter-token latency (p50, p99) and the
prompts' time to the first token.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rootstock_llm.services.worker.settings import WorkerSettings
from tests.benchmarks.streams_and_prompts import add_flags, compare, print_ratios
from tests.e2e.system import System

DEFAULT_S = float(WorkerSettings.model_fields["adaptive_chunk_s"].default)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--adaptive-chunk-s",
        type=float,
        default=DEFAULT_S,
        metavar="S",
        help=f"most seconds between decode steps; default {DEFAULT_S}",
    )
    add_flags(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:

        def system(name: str, within_s: float) -> System:
            flags = f"--adaptive-chunk-s {within_s}"
            return System(
                Path(folder, name), workers=1, num_threads=2, worker_flags=flags, log_level="info", max_total_tokens=32768
            )

        with system("bounded", args.adaptive_chunk_s) as bounded, system("not", 0.0) as unbounded:
            ratios = compare({"bounded": bounded, "not": unbounded}, args)
    print_ratios(ratios, "bounded / not")


if __name__ == "__main__":
    main()
