"""python -m tests.benchmarks.unit_policy: hit rates of a model with recurrent layers, by memory share and state interval.

The scheduler runs on simulated traces of chats, agents and shared prefixes. The memory is as large for each case: for the ratio r
(mamba_full_memory_ratio), states take r bytes for each byte of KV. A state takes as much memory as the KV of STATE_TOKENS tokens.
Prints a table for each trace, with the hit rate of a model without recurrent layers in the same memory as the limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STATE_TOKENS = 1536  # size of a state of Qwen3.5-0.8B in bfloat16
PAGE_SIZE = 16
RATIOS = (0.1, 0.3, 0.9, 2.0)
INTERVALS = (256, 1024, 4096, 1 << 20)
TRACES = {
    "chats": ["multi-turn", "--sessions", "400", "--turns", "6", "--system", "300", "--user", "120", "--output", "200"],
    "agents": ["multi-turn", "--sessions", "60", "--turns", "25", "--system", "6000", "--user", "400", "--output", "60"],
    "shared prefixes": ["shared-prefix", "--groups", "150", "--per-group", "12", "--prefix", "3072", "--suffix", "320"],
}
MODULE = [sys.executable, "-m", "rootstock_llm.services.sim.core"]


def hit_rate(trace: Path, budget: int, ratio: float, interval: int) -> float:
    """Returns the hit rate of a run.

    Args:
        budget: memory in tokens of KV.
        ratio: bytes of states per byte of KV; 0 for a model without recurrent layers.
        interval: see state_interval.
    """
    kv = round(budget / (1 + ratio))
    states = (budget - kv) // STATE_TOKENS
    running = min(64, states // 3) if ratio else 64
    flags = {
        "num-pages": kv // PAGE_SIZE,
        "states": states if ratio else 0,
        "state-interval": interval,
        "max-running-requests": max(running, 1),
        "chunked-prefill-size": 2048,
    }
    command = [*MODULE, str(trace), "--json", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]
    found: float = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["hit_rate"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=600_000, help="memory in tokens of KV (default 600,000)")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.processes) as pool:
        for name, kind in TRACES.items():
            trace = Path(folder) / f"{name}.jsonl"
            subprocess.run([*MODULE, "generate", kind[0], str(trace), *kind[1:], "--rate", "20"], check=True, capture_output=True)
            limit = pool.submit(hit_rate, trace, args.budget, 0.0, PAGE_SIZE)
            rates = {(r, i): pool.submit(hit_rate, trace, args.budget, r, i) for r in RATIOS for i in INTERVALS}
            print(f"{name}: {limit.result():.3f} without recurrent layers\n")
            print("| ratio | " + " | ".join(f"interval {i}" if i < 1 << 20 else "no chunk ends" for i in INTERVALS) + " |")
            print("| ---: |" + " ---: |" * len(INTERVALS))
            for ratio in RATIOS:
                print(f"| {ratio:g} | " + " | ".join(f"{rates[ratio, i].result():.3f}" for i in INTERVALS) + " |")
            print(flush=True)


if __name__ == "__main__":
    main()
