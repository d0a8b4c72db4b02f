"""256 requests of 1024 tokens in and 1024 out on the 8B shape: python -m tests.benchmarks.gpu.throughput."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.benchmarks.gpu.batches import journal_timing, timed
from tests.benchmarks.gpu.command import Setting, run_command
from tests.benchmarks.gpu.decoding import Decoding, output_of
from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.gpu.models import Wanted, serving_of
from tests.benchmarks.gpu.serving import Timing
from tests.benchmarks.gpu.workloads import fixed

HOW = (
    "All requests are submitted at the start; random ids, greedy, end of sequence ignored. Wall time from the first submit to the"
    " last token on the host, one run after a warm-up. Prefill: until each request has its first token. Decode: the remaining"
    " time, in which all rows decode together. Steps: median of the first 64 and of the last 64 decode steps."
)
MODEL = "qwen3-8b"
PROFILED_STEPS = 10
EDGE_STEPS = 64  # decode steps at the start and at the end whose median is reported


def measure(setting: Setting, journal: Journal) -> None:
    rows, prompt_len, new_tokens = (4, 12, 6) if setting.toy else (256, 1024, 1024)
    context = prompt_len + max(new_tokens, output_of(rows, PROFILED_STEPS + 4))
    with serving_of(Wanted(MODEL, rows, context), setting) as model:
        workload = fixed(rows, prompt_len, new_tokens, model.vocab, seed=0)
        timing = timed(model, fixed(rows, prompt_len, new_tokens, model.vocab, seed=1), workload)
        journal_timing(journal, "throughput", f"{MODEL}, {rows} × {prompt_len}/{new_tokens}", workload, timing)
        journal.figure(f"{MODEL}.seconds", timing.seconds, "s")
        journal.figure(f"{MODEL}.output_tokens_per_s", timing.tokens_per_s, "tok/s")
        _journal_phases(journal, timing)
        decoding = Decoding(model.serving, rows, prompt_len, PROFILED_STEPS + 4, model.vocab)
        decoding.journal_profile(journal, MODEL, PROFILED_STEPS, setting.on_gpu)
        decoding.close()


def _journal_phases(journal: Journal, timing: Timing) -> None:
    first, last = timing.decode_step_s(EDGE_STEPS)
    decode_s = timing.seconds - timing.last_first_s
    columns = ("prefill s", "decode s", "ms per step at the start", "ms per step at the end")
    journal.row("prefill and decode", columns, (timing.last_first_s, decode_s, first * 1e3, last * 1e3))
    journal.figure(f"{MODEL}.prefill_seconds", timing.last_first_s, "s")
    journal.figure(f"{MODEL}.decode_seconds", decode_s, "s")
    journal.figure(f"{MODEL}.first_step_ms", first * 1e3, "ms")
    journal.figure(f"{MODEL}.last_step_ms", last * 1e3, "ms")


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(HOW, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
