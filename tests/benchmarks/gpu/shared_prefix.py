"""Time of requests with a shared prefix, with a cold and a warm prefix cache: python -m tests.benchmarks.gpu.shared_prefix."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.benchmarks.gpu.batches import journal_timing
from tests.benchmarks.gpu.command import Setting, run_command
from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.gpu.models import Wanted, serving_of
from tests.benchmarks.gpu.workloads import fixed, shared_prefix

HOW = (
    "128 requests with a shared prefix of 3,072 tokens, 128 tokens of their own and 64 tokens out; greedy. First run: nothing is"
    " cached. Second run: the prefix is cached. Third run: 128 requests of the same lengths without a shared prefix. Wall time of"
    " each run after a warm-up."
)
MODEL = "qwen3-8b"


def measure(setting: Setting, journal: Journal) -> None:
    rows, prefix, suffix, new_tokens = (4, 40, 6, 4) if setting.toy else (128, 3072, 128, 64)
    with serving_of(Wanted(MODEL, rows, prefix + suffix + new_tokens), setting) as model:
        serving = model.serving
        apart = fixed(rows, prefix + suffix, new_tokens, model.vocab, seed=3)
        serving.run(fixed(rows, prefix + suffix, new_tokens, model.vocab, seed=4))
        serving.forget()
        timings = {}
        for name, workload in (
            ("cold", shared_prefix(rows, prefix, suffix, new_tokens, model.vocab, seed=5)),
            ("warm", shared_prefix(rows, prefix, suffix, new_tokens, model.vocab, seed=5, ending=1)),
            ("nothing shared", apart),
        ):
            if name == "nothing shared":
                serving.forget()
            timings[name] = serving.run(workload)
            journal_timing(journal, "shared prefix", f"{MODEL}, {name}", workload, timings[name])
            journal.figure(f"{MODEL}.{name.replace(' ', '_')}_seconds", timings[name].seconds, "s")
        journal.figure(f"{MODEL}.speedup", timings["nothing shared"].seconds / timings["cold"].seconds, "×")


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(HOW, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
