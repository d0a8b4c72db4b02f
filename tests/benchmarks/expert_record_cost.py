"""Cost of an expert distribution record on a CPU: python -m tests.benchmarks.expert_record_cost [--threads N] [--pairs N]

A mixture with random bf16 weights decodes: Qwen3-MoE with 12 layers of width 1,024, and 4 of 32 experts per token. In each pair
of successive steps, one counts experts. For each number of rows, and for prompts of 512 tokens, the benchmark prints the median
CPU time of a step, the median ratio of the time with counts to the time without them in successive steps, and its 95 % interval.
CPU time is less disturbed by other work on the machine than wall time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers

from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, SamplingParams
from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from rootstock_llm.services.worker.exec.contracts.protocol import Executor
from tests.benchmarks.intervals import interval
from tests.exec.driver import Driver, Sequence

PAGE_SIZE, MAX_SLOTS = 16, 32
NUM_IN, PROMPT = 64, 512  # tokens of the prompts before the decode steps, and of the measured prompts
MOST_PROMPTS = 41  # largest number of pairs of measured prompts
SHAPE = {
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 704,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}


def write_model(folder: Path, num_layers: int) -> None:
    config = transformers.Qwen3MoeConfig(**SHAPE, num_hidden_layers=num_layers, dtype="bfloat16")
    with torch.device("meta"):
        model: Any = transformers.Qwen3MoeForCausalLM(config)
    model = model.to_empty(device="cpu").bfloat16()
    for name, parameter in model.named_parameters():
        parameter.data.fill_(1) if name.endswith("norm.weight") else parameter.data.normal_(std=0.02)
    model.save_pretrained(folder)


def seconds(executor: Executor, plan: BatchPlan) -> float:
    began = time.process_time()
    run = executor.forward(plan)
    executor.sample(run, {})
    executor.wait(run)
    return time.process_time() - began


def compared(executor: Executor, plans: list[BatchPlan]) -> tuple[list[float], list[float]]:
    """Runs the plans in pairs of one step with counts and one without, in alternating order.

    Returns:
        The seconds of the steps without counts, and the ratios of the pairs.
    """
    plain, ratios = [], []
    for number, pair in enumerate(zip(plans[::2], plans[1::2], strict=True)):
        counts = (True, False) if number % 2 else (False, True)
        times = {on: seconds(executor, replace(plan, counts_experts=on)) for plan, on in zip(pair, counts, strict=True)}
        plain.append(times[False])
        ratios.append(times[True] / times[False])
    return plain, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    nothing, params = np.empty(0, dtype=np.int32), SamplingParams(4096, temperature=0.0)
    rng, steps = np.random.default_rng(3), 2 * options.pairs
    pages = max(options.rows) * (NUM_IN + steps) // PAGE_SIZE + 2 * MOST_PROMPTS * PROMPT // PAGE_SIZE + 1000
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.layers)
        made = DeviceOptions(device="cpu", num_threads=options.threads, max_tokens=2048)
        executor, info = build_device_executor(folder, "auto", PAGE_SIZE, MAX_SLOTS, pages, 0.5, None, made, print)
    print(info.experts)
    for rows in options.rows:
        driver = Driver(executor, PAGE_SIZE)
        sequences = [Sequence(rng.integers(6, 32_000, NUM_IN).tolist(), slot, params) for slot in range(rows)]
        driver.prefill(sequences)
        plans = [replace(driver.plan([(each, 1) for each in sequences]), num_extend=0, input_ids=nothing) for _ in range(steps)]
        report(f"{rows} rows", *compared(executor, plans))
    driver = Driver(executor, PAGE_SIZE)
    prompts = [Sequence(rng.integers(6, 32_000, PROMPT).tolist(), 0, params) for _ in range(2 * min(options.pairs, MOST_PROMPTS))]
    report(f"a prompt of {PROMPT} tokens", *compared(executor, [driver.plan([(each, PROMPT)]) for each in prompts]))
    executor.close()


def report(load: str, plain: list[float], ratios: list[float]) -> None:
    low, high = interval(ratios)
    print(f"{load:>24}: {median(plain) * 1e3:8.2f} ms, ratio {median(ratios):.4f} ({low:.4f} to {high:.4f})", flush=True)


if __name__ == "__main__":
    main()
