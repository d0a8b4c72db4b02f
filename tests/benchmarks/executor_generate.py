"""Runs the worker's executor on a batch, as a child process with a JSON job on stdin and {"seconds", "tokens"} on stdout.

The job is that of transformers_generate. The steps are made without a scheduler: first the prompts in steps of at most
CHUNK_TOKENS tokens, then decode steps of the whole batch. Each step begins after the end of the previous one.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from tests.benchmarks.cpu_decode import PAGE_SIZE, run_ours
from tests.exec.driver import Driver

CHUNK_TOKENS = 2048
WARMUP_TOKENS = 4


def run(job: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(job["threads"])
    texts, num_out = job["prompts"], job["output_len"]
    pages = sum(-(-(len(text) + num_out) // PAGE_SIZE) for text in texts)
    options = DeviceOptions(device="cpu", num_threads=job["threads"], max_tokens=CHUNK_TOKENS + len(texts))
    executor, _ = build_device_executor(
        job["model"], "bfloat16", PAGE_SIZE, max(2, len(texts)), pages, 0.5, None, options, lambda *_: None
    )
    driver = Driver(executor, PAGE_SIZE)
    run_ours(driver, texts[:1], WARMUP_TOKENS, CHUNK_TOKENS)
    timing = run_ours(driver, texts, num_out, CHUNK_TOKENS)
    tokens = sum(len(sequence.output) for sequence in timing.sequences)
    executor.close()
    return {"seconds": timing.prefill_s + timing.decode_s, "tokens": tokens}


if __name__ == "__main__":
    json.dump(run(json.load(sys.stdin)), sys.stdout)
