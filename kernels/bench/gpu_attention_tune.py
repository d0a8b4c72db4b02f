"""Times attention with many block sizes and splits: python -m rootstock_llm.kernels.bench.gpu_attention_tune [--only PART]."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from triton.runtime.errors import OutOfResources

from rootstock_llm.kernels.bench.gpu import NO_GPU
from rootstock_llm.kernels.bench.gpu_attention import AttentionSizes, call_of, decode_sizes, extend_sizes, work_of
from rootstock_llm.kernels.bench.gpu_timing import GpuTimer, Work
from rootstock_llm.kernels.triton.attention.attention import head_shape, plan_call
from rootstock_llm.kernels.triton.attention.attention_plan import Blocks, HeadShape, Launch, retiled


def candidates(launch: Launch) -> Iterator[tuple[Blocks, int]]:
    """Yields the (blocks, splits) of the launches to compare with the plan `launch`.

    The plan's own values are omitted, because tuned() times the plan itself. There is one exception: if the plan's splits are
    dealt (see Launch), retiled() makes a different launch from the same values, with even splits.
    """
    lanes = [launch.blocks.m] if launch.one_token else [64, 128]
    splits = sorted({launch.splits} | ({1, 2, 4, 8, 16, 32} if launch.splits else set()))
    for m, n, warps, stages, split in product(lanes, [32, 64, 128], [4, 8], [2, 3, 4], splits):
        if launch.extra or (Blocks(m, n, warps, stages), split) != (launch.blocks, launch.splits):
            yield Blocks(m, n, warps, stages), split


def _work(sizes: AttentionSizes, launch: Launch, device: torch.device) -> Work:
    return work_of(call_of(sizes, device), launch)


def tuned(sizes: AttentionSizes, timer: GpuTimer, device: torch.device) -> Iterator[tuple[float, Launch]]:
    """Yields (microseconds, launch) of the plan, and then of each other launch that the device can run."""
    call = call_of(sizes, device)
    shape: HeadShape = head_shape(call.q, call.k_pool, call.v_pool)
    plan = plan_call(shape, call.rows, len(call.q), call.rule.window, device)
    others = [retiled(shape, plan, blocks, splits, len(call.q)) for blocks, splits in candidates(plan)]
    for launch in [plan, *others]:
        try:
            timing = timer.time(partial(_work, sizes, launch), sizes.bytes_moved, True)
        except OutOfResources:
            continue
        yield timing.microseconds, launch


def main(arguments: list[str] | None = None) -> int:
    """Prints the time of the plan and of the five fastest launches for each shape. Returns 0; 2 if there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="Run only the shapes whose names contain this text.")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    timer = GpuTimer(device, 0.05)
    for sizes in decode_sizes() + extend_sizes():
        if options.only not in sizes.name:
            continue
        found = list(tuned(sizes, timer, device))
        print(sizes.name)
        for label, (microseconds, launch) in [
            ("plan", found[0]),
            *(("", one) for one in sorted(found, key=lambda one: one[0])[:5]),
        ]:
            print(
                f"  {label:4} {microseconds:9.1f} us  {launch.blocks} splits {launch.splits} extra {launch.extra}",
                flush=True,
            )
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
