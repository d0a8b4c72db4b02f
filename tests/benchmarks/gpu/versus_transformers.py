"""Comparison with transformers' continuous batching in one run: python -m tests.benchmarks.gpu.versus_transformers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from tests.benchmarks.gpu.batches import WARM_TOKENS, timed
from tests.benchmarks.gpu.command import Setting, run_command
from tests.benchmarks.gpu.decoding import Decoding, output_of
from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.gpu.models import Wanted, serving_of, shape_of
from tests.benchmarks.gpu.transformers_batching import Batching, TooSlow, attention_of, batching_of, random_model
from tests.benchmarks.gpu.workloads import Workload, fixed, nano

HOW = (
    "Equal shape with random weights, equal prompts and output lengths, all requests submitted at the start, end of sequence"
    " ignored. Ours: this project's scheduler and executor. Theirs: transformers' continuous batching with its default settings."
    " Wall time from the first submit to the last result, one run each after a warm-up of the same lengths."
)
MODEL = "qwen3-0.6b"
COLUMNS = ("workload", "ours s", "theirs s", "ours output tok/s", "theirs output tok/s", "theirs / ours")
PROFILED_STEPS = 10
THEIR_LIMIT_S = 90.0  # time limit of each run of transformers, in seconds


def workloads(setting: Setting, vocab: int, seed: int) -> dict[str, Workload]:
    """Returns the workloads, short ones first, because a long one may exceed the time limit."""
    if setting.toy:
        return {"nano": nano(3, 3, 7, vocab, seed), "fixed": fixed(3, 6, 5, vocab, seed)}
    return {
        "prompts": fixed(64, 1024, 32, vocab, seed),
        "fixed": fixed(64, 512, 256, vocab, seed),
        "nano": nano(256, 100, 1024, vocab, seed),
    }


def measure(setting: Setting, journal: Journal) -> None:
    ours = _ours(setting, journal)
    journal.note(f"transformers runs with the attention of {attention_of()[0]}.")
    shape = shape_of(MODEL, setting)
    theirs = random_model(shape, setting)
    warm = workloads(setting, shape.text_tokens, seed=1)
    for name, workload in workloads(setting, shape.text_tokens, seed=0).items():
        if name not in ours:
            continue
        with journal.apart(f"theirs, {name}"), batching_of(theirs, workload.temperature, setting) as batching:
            short = replace(warm[name], new_tokens=tuple(min(n, WARM_TOKENS) for n in warm[name].new_tokens))
            batching.run(short, THEIR_LIMIT_S)
            _compare(name, workload, ours[name], _their_seconds(batching, name, workload, journal), journal)


def _their_seconds(batching: Batching, name: str, workload: Workload, journal: Journal) -> float:
    """Returns the seconds of a run of transformers, or the limit if the run exceeds it."""
    try:
        return batching.run(workload, THEIR_LIMIT_S)
    except TooSlow as late:
        journal.note(
            f"{name}: transformers exceeded its time limit ({late}). The figures use the limit as its time; it is really slower."
        )
        return THEIR_LIMIT_S


def _compare(name: str, workload: Workload, ours: float, theirs: float, journal: Journal) -> None:
    tokens, speedup = workload.output_tokens, theirs / ours
    journal.row("ours and theirs", COLUMNS, (name, ours, theirs, tokens / ours, tokens / theirs, speedup))
    journal.figure(f"{name}.speedup", speedup, "×")


def _ours(setting: Setting, journal: Journal) -> dict[str, float]:
    """Returns the seconds of this project's run, by workload."""
    probe = workloads(setting, 2, seed=0)
    rows = max(len(workload.prompts) for workload in probe.values())
    context = max(*(workload.longest for workload in probe.values()), 64 + output_of(rows, PROFILED_STEPS + 4))
    found = {}
    with serving_of(Wanted(MODEL, rows, context), setting) as model:
        warm = workloads(setting, model.vocab, seed=1)
        for name, workload in workloads(setting, model.vocab, seed=0).items():
            with journal.apart(f"ours, {name}"):
                found[name] = timed(model, warm[name], workload).seconds
                journal.row("ours", ("workload", "seconds"), (name, found[name]))
        decoding = Decoding(model.serving, min(rows, 64), 8 if setting.toy else 64, PROFILED_STEPS + 4, model.vocab)
        decoding.journal_profile(journal, "ours", PROFILED_STEPS, setting.on_gpu)
        decoding.close()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(HOW, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
