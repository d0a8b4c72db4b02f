"""Time of equal steps with each attention backend: python -m tests.benchmarks.gpu.attention."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from tests.benchmarks.gpu.command import Setting, run_command
from tests.benchmarks.gpu.decoding import Decoding, output_of
from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.gpu.models import Wanted, serving_of
from tests.benchmarks.gpu.workloads import fixed

HOW = (
    "8B shape, each backend in its own executor. Decode steps: mean wall time between the tokens of two steps on the host, from a"
    " context of 1,024 tokens, with overlap and graphs. Prompts: wall time of 16 requests of 2,048 tokens in and one out, one run"
    " after a warm-up."
)
MODEL = "qwen3-8b"
COLUMNS = ("back end", "what", "ms")


def backends(setting: Setting) -> tuple[str, ...]:
    if not setting.on_gpu:
        return ("torch",)
    return ("triton", *(("flashinfer",) if importlib.util.find_spec("flashinfer") is not None else ()))


def measure(setting: Setting, journal: Journal) -> None:
    for name in backends(setting):
        with journal.apart(name):
            _measure_one(name, setting, journal)


def _measure_one(name: str, setting: Setting, journal: Journal) -> None:
    rows, prompt_len, steps = ((1, 2), 8, 4) if setting.toy else ((1, 64, 256), 1024, 100)
    prompts, tokens = (2, 12) if setting.toy else (16, 2048)
    context = max(prompt_len + output_of(max(rows), steps + 4), tokens + 1)
    with serving_of(Wanted(MODEL, max(rows), context, attention=name), setting) as model:
        for count in rows:
            decoding = Decoding(model.serving, count, prompt_len, steps + 4, model.vocab)
            _, mean = decoding.step_s(steps)
            decoding.close()
            _keep(journal, name, f"decode step of {count} rows", f"step_{count}_rows", mean)
        for seed in (1, 0):
            seconds = model.serving.run(fixed(prompts, tokens, 1, model.vocab, seed)).seconds
            model.serving.forget()
        _keep(journal, name, f"{prompts} prompts of {tokens}", "prompts", seconds)


def _keep(journal: Journal, name: str, what: str, figure: str, seconds: float) -> None:
    journal.row("attention", COLUMNS, (name, what, seconds * 1e3))
    journal.figure(f"{name}.{figure}_ms", seconds * 1e3, "ms")


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(HOW, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
