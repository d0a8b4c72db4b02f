"""nano-vllm's workload on the 0.6B shape, 256 requests of 100 to 1,024 tokens in and out: python -m tests.benchmarks.gpu.nano."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.benchmarks.gpu.batches import journal_timing, timed
from tests.benchmarks.gpu.command import Setting, run_command
from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.gpu.models import Wanted, serving_of
from tests.benchmarks.gpu.workloads import nano

HOW = (
    "nano-vllm's workload: seed 0, temperature 0.6, end of sequence ignored, all requests submitted at the start. Wall time from"
    " the first submit to the last token on the host, one run after a warm-up."
)
MODEL = "qwen3-0.6b"


def measure(setting: Setting, journal: Journal) -> None:
    rows, shortest, longest = (5, 3, 9) if setting.toy else (256, 100, 1024)
    with serving_of(Wanted(MODEL, rows, 2 * longest), setting) as model:
        workload = nano(rows, shortest, longest, model.vocab)
        timing = timed(model, nano(rows, shortest, longest, model.vocab, seed=1), workload)
        journal_timing(journal, "nano workload", MODEL, workload, timing)
        journal.figure(f"{MODEL}.output_tokens_per_s", timing.tokens_per_s, "tok/s")


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(HOW, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
