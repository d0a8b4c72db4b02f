"""What verified guesses save on a CPU: python -m tests.benchmarks.speculation [--threads N] [--pairs N] [--drafts K]

One stream of random weights at the shape of Qwen3-0.6B, bfloat16, in two executors of one process, without guesses and with.
A drafter that knows the text says it with errors, so that a step gives --accept-length tokens on average; all else is as it is.
Then the same with guesses that are always wrong. Prints medians of time without over time with, and their 95 % intervals.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from services.worker.core.contracts.sampling import SamplingParams
from services.worker.exec.build import DeviceOptions, build_device_executor
from services.worker.exec.executor import DeviceExecutor
from tests.benchmarks.cpu_decode import PAGE_SIZE, SHAPE, build_model
from tests.benchmarks.deterministic_cost import interval
from tests.exec.guesses import Guesses
from tests.exec.random_contexts import Asked, World, alone

PROMPT_TOKENS, NEW_TOKENS, CONTEXT = 256, 64, 512
VOCAB = SHAPE["vocab_size"]


def error_rate(accept_length: float, drafts: int) -> float:
    """Of each guess, for which 1 + p + .. + p^drafts tokens come of a step on average."""
    low, high = 0.0, 1.0
    for _ in range(50):
        right = (low + high) / 2
        low, high = (right, high) if sum(right**place for place in range(drafts + 1)) < accept_length else (low, right)
    return 1 - low


def seconds_of(world: World, executor: DeviceExecutor, asked: Asked) -> tuple[float, list[int]]:
    begun = time.perf_counter()
    answer = alone(world, executor, asked)
    return time.perf_counter() - begun, answer.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--accept-length", type=float, default=2.5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = {"page_size": PAGE_SIZE, "vocab_size": VOCAB, "context_len": CONTEXT, "max_slots": 4, "num_pages": 128}
    worlds = {drafts: World(**sizes, max_drafts=drafts) for drafts in (0, options.drafts)}
    executors = {}
    with tempfile.TemporaryDirectory() as folder:
        build_model().save_pretrained(Path(folder))
        for drafts in worlds:
            made = DeviceOptions(device="cpu", num_threads=options.threads, max_tokens=CONTEXT, max_drafts=drafts)
            executors[drafts], _ = build_device_executor(folder, "auto", PAGE_SIZE, 4, 128, 0.5, CONTEXT, made, print)
    rng = random.Random(3)
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=1.0, seed=5, ignore_eos=True)
    asked = Asked(tuple(rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)), params)
    _, text = seconds_of(worlds[0], executors[0], asked)
    for name, errors in (("guesses", error_rate(options.accept_length, options.drafts)), ("wrong guesses", 1.0)):
        ratios, lengths = [], []
        for number in range(options.pairs):
            drafter = Guesses([[*asked.prompt, *text]], errors, VOCAB, seed=number)
            executors[options.drafts]._steps._drafter = drafter  # type: ignore[attr-defined]
            found = {}
            for drafts in (0, options.drafts) if number % 2 else (options.drafts, 0):
                found[drafts] = seconds_of(worlds[drafts], executors[drafts], asked)
            assert found[options.drafts][1] == text, "the text stays the same"
            ratios.append(found[0][0] / found[options.drafts][0])
            lengths.append(NEW_TOKENS / (NEW_TOKENS - drafter.accepted))
        low, high = interval(ratios)
        print(f"{name}: {median(lengths):.2f} tokens a step, {median(ratios):.2f} x ({low:.2f} to {high:.2f})", flush=True)
    for executor in executors.values():
        executor.close()


if __name__ == "__main__":
    main()
