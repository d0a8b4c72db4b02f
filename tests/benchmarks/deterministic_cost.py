"""Cost of deterministic mode on a CPU: python -m tests.benchmarks.deterministic_cost [--threads N] [--pairs N]

One process has two executors with random bf16 weights in the shape of Qwen3-0.6B, with and without the mode. Each load runs on
both in alternating order. For each load, the output is the median ratio of the time with the mode to the time without, and its
95 % interval.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

import torch

from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from tests.benchmarks.cpu_decode import PAGE_SIZE, build_model, prompts, run_ours
from tests.benchmarks.intervals import interval
from tests.exec.driver import Driver

LOADS = ((1, 256, 64), (8, 256, 64), (32, 256, 64), (1, 4032, 64))  # requests in flight, tokens in, tokens out
CHUNK_TOKENS = 2048
MAX_SLOTS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument(
        "--loads", type=int, nargs="+", default=list(range(len(LOADS))), help="indices of the loads to run, from 0; default: all"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loads = [LOADS[number] for number in options.loads]
    pages = max(batch * (-(-(num_in + num_out) // PAGE_SIZE) + 1) for batch, num_in, num_out in loads)
    drivers = {}
    with tempfile.TemporaryDirectory() as folder:
        build_model().save_pretrained(Path(folder))
        for mode in (False, True):
            made = DeviceOptions(device="cpu", num_threads=options.threads, max_tokens=CHUNK_TOKENS + 64, deterministic=mode)
            executor, _ = build_device_executor(folder, "auto", PAGE_SIZE, MAX_SLOTS, pages, 0.5, None, made, print)
            drivers[mode] = Driver(executor, PAGE_SIZE)
            run_ours(drivers[mode], prompts(1, 32).tolist(), 4, CHUNK_TOKENS)
    for batch, num_in, num_out in loads:
        whole: list[float] = []
        prefill: list[float] = []
        for number in range(options.pairs):
            timings, texts = {}, prompts(batch, num_in).tolist()
            for mode in (False, True) if number % 2 else (True, False):
                timings[mode] = run_ours(drivers[mode], texts, num_out, CHUNK_TOKENS)
            on, off = timings[True], timings[False]
            whole.append((on.prefill_s + on.decode_s) / (off.prefill_s + off.decode_s))
            prefill.append(on.prefill_s / off.prefill_s)
        low, high = interval(whole)
        print(
            f"{batch:3} in flight, {num_in} in, {num_out} out: {median(whole):.3f} ({low:.3f} to {high:.3f}),"
            f" prefill alone {median(prefill):.3f}",
            flush=True,
        )
    for driver in drivers.values():
        driver.executor.close()


if __name__ == "__main__":
    main()
