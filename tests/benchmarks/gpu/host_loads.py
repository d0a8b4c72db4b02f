"""Loading cached prefixes from host memory layer by layer or as whole pages: python -m tests.benchmarks.gpu.host_loads."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median

from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.exec.contracts.options import TierOptions
from tests.benchmarks.gpu.command import Setting, run_command
from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.intervals import interval
from tests.benchmarks.make_model import SHAPES, write_model
from tests.benchmarks.tiers import SECRET, prompt, ttft
from tests.exec.tiered import PAGE_SIZE, Served, build

HOW = (
    "Each prompt begins with tokens whose KV is in host memory and ends with new tokens; one prompt at a time. Ratio: time to the"
    " first token if the step waits for each layer's KV, divided by the time if it waits for whole pages. Medians of alternating"
    " pairs, 95 % intervals. Random weights, the default write policy."
)
MODEL = "qwen3-0.6b"
HOST_BYTES = 8 << 30
TOY, ON_CPU, ON_GPU = ((160, 16),), ((1024, 16),), ((4096, 256), (24_000, 512))  # (tokens from the host, new tokens) of a prompt
PAIRS = 15
COLUMNS = ("from the host", "new", "MiB", "GB/s", "by layers, ms", "whole, ms", "ratio", "95 %")


def measure(setting: Setting, journal: Journal) -> None:
    kept, pairs = ON_GPU if setting.on_gpu else ON_CPU, PAIRS
    if setting.toy:
        kept, pairs = TOY, 2
    longest = max(map(sum, kept)) + PAGE_SIZE
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPES["tiny" if setting.toy else MODEL])
        executor, core = build(
            Path(folder),
            3 * longest // PAGE_SIZE,  # a load from the host may take at most half of the pool
            TierOptions(0.0, 64 << 20 if setting.toy else HOST_BYTES, None, SECRET),
            max_slots=4,
            dtype="bfloat16",
            context_len=longest,
            device=setting.device,
            num_threads=1 if setting.on_gpu else 2,
            deterministic=False,
            attention_backend=setting.attention,
            kernels=setting.kernels,
            cuda_graphs=setting.graphs,
            max_graph_rows=4,
        )
        with closing(Served(executor, core)) as served:
            for tokens, new in kept:
                _measured(served, journal, tokens, new, pairs)


def _measured(served: Served, journal: Journal, tokens: int, new: int, pairs: int) -> None:
    mover, tiers = served.executor._mover, served.core.tiers
    assert mover is not None and tiers is not None, "the executor must have a host tier"
    if not mover._by_layers:
        journal.note("This machine cannot load pages layer by layer, so both columns show loads of whole pages.")
    by_layers, asked = mover._by_layers, 0
    ttft(served, prompt(tokens, tokens))
    taken: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(-1, pairs):  # pair -1 warms up
        for layered in (pair % 2 == 0, pair % 2 == 1):
            SchedulerControl(served.core).flush_cache()
            mover._by_layers = layered and by_layers
            asked += 1
            seconds, found = ttft(served, [*prompt(tokens, tokens), *(asked + at for at in range(1, new + 1))])
            assert found == tokens // PAGE_SIZE * PAGE_SIZE, "all whole pages of the prefix must come from the host"
            if pair >= 0:
                taken[layered].append(seconds)
    mover._by_layers = by_layers
    ratios = [layered / whole for layered, whole in zip(taken[True], taken[False], strict=True)]
    size, low_high = tokens * tiers.rates._page_bytes / PAGE_SIZE, interval(ratios)
    rate = tiers.stats().load_bytes_s / 1e9
    milliseconds = [median(taken[layered]) * 1000 for layered in (True, False)]
    row = (tokens, new, round(size / 2**20), rate, *milliseconds, median(ratios), f"{low_high[0]:.3f} to {low_high[1]:.3f}")
    journal.row("KV from host memory", COLUMNS, row)
    journal.figure(f"{MODEL}.ttft_{tokens}_by_layers_over_whole", median(ratios), "×")


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(HOW, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
