"""Cost and benefit of KV tiers on a CPU: python -m tests.benchmarks.tiers cost|reuse [--prompts N] ...

The model has random bf16 weights in the shape of Qwen3-0.6B, and the write policy is the default.

  cost: new prompts run in one process, alternately with tiers (host and files) and without them. Prints the median ratios of
    requests per second and of TTFT, with 95 % intervals. For TTFT, prompts run one after another.

  reuse: a process runs --prompts prompts of 1,024 tokens, four times as many as the pool can store, and is killed by SIGKILL.
    A second process opens the files of the first one and repeats a part of the prompts. Prints TTFT with pages from a file in the
    kernel's page cache, with pages from the disk (if the page cache can be dropped), and with computed pages.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rootstock_llm.services.worker.core.contracts.transfers import Tier
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.core.tiers.page_keys import SECRET_BYTES
from rootstock_llm.services.worker.exec.contracts.options import TierOptions
from rootstock_llm.services.worker.exec.tiers.segment_store import SegmentStore
from tests.benchmarks.cpu_decode import build_model
from tests.benchmarks.intervals import interval
from tests.exec.tiered import PAGE_SIZE, Served, build

SECRET = bytes(range(SECRET_BYTES))
REUSE_TOKENS, COST_TOKENS = 1024, 256
FIRSTS = 4  # prompts whose median TTFT is measured, for each side of a pair
VOCAB = 100_000  # range of token ids in prompts
HOST_BYTES, FILE_BYTES = 2 << 30, 24 << 30
OPERATION_WAIT_S = 0.05  # seconds; longest wait of a loop iteration for the end of a tier operation
PAIRS_PER_REPORT = 20  # measured pairs between two printed results


def tier_options(folder: Path) -> TierOptions:
    def opened(page_bytes: int, identity: bytes) -> SegmentStore:
        return SegmentStore(folder, page_bytes, FILE_BYTES, identity=identity)

    return TierOptions(0.0, HOST_BYTES, opened, SECRET)


def served(model: Path, pages: int, folder: Path | None, threads: int, context: int) -> Served:
    tiers = None if folder is None else tier_options(folder)
    executor, core = build(model, pages, tiers, dtype="bfloat16", num_threads=threads, deterministic=False, context_len=context)
    return Served(executor, core, prefers_reading=False)


def prompt(number: int, length: int) -> list[int]:
    """Returns the token ids of a prompt. Two prompts differ in their first token."""
    return [(number * 7919 + at * at * 31 + at) % VOCAB + 1 for at in range(length)]


def ttft(one: Served, ids: Sequence[int]) -> tuple[float, int]:
    """Runs a prompt for one output token and waits for its backups and writes, which are not measured.

    Returns:
        Seconds to the first token, and the number of prompt tokens whose KV was read from another tier.
    """
    begun = time.perf_counter()
    handle = one.submit(ids, max_new_tokens=1, temperature=0.0, top_logprobs=-1)
    until_answered(one, [handle])
    took = time.perf_counter() - begun
    one.drain()
    answer = one.answers[handle]
    assert answer.finish is not None
    found = answer.finish.cached_from
    return took, found.get(Tier.HOST, 0) + found.get(Tier.STORAGE, 0)


def until_answered(one: Served, handles: Sequence[int]) -> None:
    """Runs the scheduler loop until all requests have ended. As in a worker, it waits for tier operations if it has no step."""
    while any(one.answers[handle].finish is None for handle in handles):
        one.turn(wait_s=OPERATION_WAIT_S)


def cost(args: argparse.Namespace, model: Path) -> None:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        pages = 4 * args.prompts * COST_TOKENS // PAGE_SIZE
        runs = {
            "without": served(model, pages, None, args.threads, 512),
            "with": served(model, pages, Path(folder), args.threads, 512),
        }
        pairs = saved_pairs(args.keep)
        slow: list[float] = []
        number = 0
        for turn in range(args.pairs + 1):
            found: dict[str, tuple[float, float]] = {}
            for name in list(runs)[:: 1 if turn % 2 else -1]:
                one = runs[name]
                ids = [prompt(number + index, COST_TOKENS) for index in range(args.prompts + FIRSTS)]
                number += len(ids)
                begun = time.perf_counter()
                until_answered(one, [one.submit(each, max_new_tokens=args.num_out, top_logprobs=-1) for each in ids[FIRSTS:]])
                took = time.perf_counter() - begun
                found[name] = took, median(ttft(one, each)[0] for each in ids[:FIRSTS])
            if turn:  # turn 0 is a warm-up
                slow.append(found["without"][0])
                pairs.append((found["without"][0] / found["with"][0], found["without"][1] / found["with"][1]))
                if args.keep:
                    args.keep.write_text(json.dumps(pairs))
                if turn % PAIRS_PER_REPORT == 0 or turn == args.pairs:
                    print_ratios(pairs)
        print(f"tokens per second without tiers: {args.prompts * (COST_TOKENS + args.num_out) / median(slow):.0f}")
        stats = runs["with"].core.stats()
        print(f"with tiers: {stats.backed_up_pages_total} pages copied to the host, {stats.stored_pages_total} written to files")


def saved_pairs(file: Path | None) -> list[tuple[float, float]]:
    """Returns the saved pairs: (time without tiers / time with tiers, TTFT without tiers / TTFT with tiers).

    The first ratio equals the requests per second with tiers divided by those without.
    """
    return [(both[0], both[1]) for both in json.loads(file.read_text())] if file and file.exists() else []


def print_ratios(pairs: Sequence[tuple[float, float]]) -> None:
    for what, ratios in zip(
        ("requests a second, tiers / no tiers", "TTFT, no tiers / tiers"), zip(*pairs, strict=True), strict=True
    ):
        low, high = interval(ratios)
        print(f"{what}: {median(ratios):.3f} [{low:.3f}, {high:.3f}], {len(ratios)} pairs", flush=True)


def fill(args: argparse.Namespace, model: Path, folder: Path) -> None:
    """Runs all prompts twice and then waits until the parent kills this process."""
    one = served(model, args.prompts * REUSE_TOKENS // PAGE_SIZE // 4, folder, args.threads, 2048)
    begun = time.perf_counter()
    for turn in range(2):
        found = [ttft(one, prompt(number, REUSE_TOKENS)) for number in range(args.prompts)]
        print(
            f"turn {turn}: median TTFT {median(each[0] for each in found):.3f} s, {sum(each[1] for each in found)} tokens read",
            flush=True,
        )
    print(f"filled in {time.perf_counter() - begun:.0f} s", flush=True)
    signal.pause()


def reuse(args: argparse.Namespace, model: Path) -> None:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        command = [sys.executable, "-m", "tests.benchmarks.tiers", "fill", "--folder", folder, "--prompts", str(args.prompts)]
        command += ["--threads", str(args.threads), "--model", str(model)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                print(line, end="", flush=True)
                if line.startswith("filled"):
                    child.send_signal(signal.SIGKILL)
        one = served(model, args.prompts * REUSE_TOKENS // PAGE_SIZE // 4, Path(folder), args.threads, 2048)
        news = [ttft(one, prompt(args.prompts + number, REUSE_TOKENS)) for number in range(args.pairs)]
        assert not any(tokens for _, tokens in news), "new prompts must not read stored pages"
        computed = [taken for taken, _ in news]
        for what in ("a warm page cache", "the disk, its cache dropped"):
            if what.startswith("the disk") and not _drop_caches():
                print("the kernel's page cache cannot be dropped on this machine")
                break
            found = [ttft(one, prompt(number, REUSE_TOKENS)) for number in range(args.pairs)]
            assert all(tokens >= REUSE_TOKENS - PAGE_SIZE for _, tokens in found), "repeated prompts must read all stored pages"
            ratios = [a / b[0] for a, b in zip(computed, found, strict=True)]
            low, high = interval(ratios)
            print(
                f"TTFT computed / from {what}: {median(ratios):.1f} [{low:.1f}, {high:.1f}],"
                f" {median(computed):.3f} s to {median(each[0] for each in found):.3f} s",
                flush=True,
            )
            SchedulerControl(one.core).flush_cache()


def _drop_caches() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "reuse", "fill"])
    parser.add_argument("--prompts", type=int, default=0, help="cost: concurrent prompts (8); reuse: number of prompts (64)")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--num-out", type=int, default=8, help="cost: output tokens per prompt (8)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="cost: file to which measured pairs are added; its earlier pairs count too"
    )
    parser.add_argument("--folder", type=Path, help="parent folder of the file tier; default: the system's temporary folder")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint that cpu_decode has written; default: a new one")
    args = parser.parse_args()
    args.prompts = args.prompts or (8 if args.what == "cost" else 64)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder)
        if args.model is None:
            build_model().save_pretrained(model)
        if args.what == "fill":
            fill(args, model, args.folder)
        else:
            {"cost": cost, "reuse": reuse}[args.what](args, model)


if __name__ == "__main__":
    main()
