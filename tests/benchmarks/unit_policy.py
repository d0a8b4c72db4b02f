"""python -m tests.benchmarks.unit_policy: times and hit rates of a model with recurrent layers, by ratio and state interval.

The scheduler runs on simulated traces of chats, agents and shared prefixes. All cases have the same amount of memory. The
ratio (mamba_full_memory_ratio) is the number of bytes of states per byte of KV. A state takes as much memory as the KV of
STATE_TOKENS tokens. Prints a table for each trace, and above the table the figures of a model without recurrent layers that has
the same memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rootstock_llm.services.worker.core.contracts.pool_sizes import PoolSizes

STATE_TOKENS = 1536  # size of a state of Qwen3.5-0.8B in bfloat16
PAGE_SIZE = 16
MAX_RUNNING = 64
RATIOS = (0.3, 0.9, 1.4, 2.0, 3.0, 5.0)
INTERVALS = (256, 1024, 4096, 1 << 20)
TRACES = {
    "chats": ["multi-turn", "--sessions", "400", "--turns", "6", "--system", "300", "--user", "120", "--output", "200"],
    "agents": ["multi-turn", "--sessions", "60", "--turns", "25", "--system", "6000", "--user", "400", "--output", "60"],
    "shared prefixes": ["shared-prefix", "--groups", "150", "--per-group", "12", "--prefix", "3072", "--suffix", "320"],
}
MODULE = [sys.executable, "-m", "rootstock_llm.services.sim.core"]


def figures(trace: Path, budget: int, ratio: float, interval: int) -> str:
    """Returns the seconds of a run and, in brackets, its hit rate.

    Args:
        budget: memory in tokens of KV.
        ratio: bytes of states per byte of KV; 0 for a model without recurrent layers.
        interval: the setting state_interval, in tokens.
    """
    kv = round(budget / (1 + ratio))
    states = (budget - kv) // STATE_TOKENS
    running = PoolSizes(kv // PAGE_SIZE, states=states if ratio else 0).max_running_requests(MAX_RUNNING)
    flags = {
        "num-pages": kv // PAGE_SIZE,
        "states": states if ratio else 0,
        "state-interval": interval,
        "max-running-requests": running,
        "chunked-prefill-size": 2048,
    }
    command = [*MODULE, str(trace), "--json", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return f"{found['seconds']:.0f} ({found['hit_rate']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=600_000, help="memory in tokens of KV (default 600,000)")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.processes) as pool:
        for name, kind in TRACES.items():
            trace = Path(folder) / f"{name}.jsonl"
            subprocess.run([*MODULE, "generate", kind[0], str(trace), *kind[1:], "--rate", "20"], check=True, capture_output=True)
            limit = pool.submit(figures, trace, args.budget, 0.0, PAGE_SIZE)
            rates = {(r, i): pool.submit(figures, trace, args.budget, r, i) for r in RATIOS for i in INTERVALS}
            print(f"{name}: {limit.result()} without recurrent layers\n")
            print("| ratio | " + " | ".join(f"interval {i}" if i < 1 << 20 else "no chunk ends" for i in INTERVALS) + " |")
            print("| ---: |" + " ---: |" * len(INTERVALS))
            for ratio in RATIOS:
                print(f"| {ratio:g} | " + " | ".join(f"{rates[ratio, i].result()}" for i in INTERVALS) + " |")
            print(flush=True)


if __name__ == "__main__":
    main()
