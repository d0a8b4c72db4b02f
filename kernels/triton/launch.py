"""Defines helpers for all launches: block sizes, chained launches, and the counter that finds the last program.

Chained launches use CUDA's programmatic dependent launch: a kernel starts while the previous kernel runs, which hides the launch
latency. Each program of a chained kernel follows these steps:

1. It calls begin_next().
2. It may read data that no kernel writes, such as weights.
3. It calls wait_for_last().
4. It reads the outputs of other kernels, and it writes.

A kernel runs on the current CUDA device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

MAX_BLOCK = 1 << 15  # largest number of elements that one program can have in registers


def block_of(size: int) -> int:
    """Returns the smallest power of two that is at least `size`. Raises ValueError if it exceeds MAX_BLOCK."""
    block = int(triton.next_power_of_2(size))
    if block > MAX_BLOCK:
        raise ValueError(f"{size} elements are more than the {MAX_BLOCK} that one program can hold")
    return block


def warps_for(elements: int) -> int:
    """Returns 1 to 16 warps. From 256 to 4096 elements, a thread has 8: one load of 16 bytes for a 16-bit type."""
    return min(max(elements // 256, 1), 16)


@cache
def _chains(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def chained(device: torch.device) -> dict[str, Any]:
    """Returns the launch options of a kernel that calls begin_next() and wait_for_last().

    Launches are chained on CUDA devices of compute capability 9.0 and above.
    """
    chains = _chains(device)
    return {"CHAINED": chains, "launch_pdl": chains}


@triton.jit
def begin_next(CHAINED: tl.constexpr):
    """Allows the launch of the next kernel after every program has called this function.

    The next kernel calls wait_for_last() to wait for the end of this kernel.
    """
    if CHAINED:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(CHAINED: tl.constexpr):
    """Waits until the previous kernel has ended.

    Before this call, a program writes nothing and reads only data that no kernel writes.
    """
    if CHAINED:
        cuda.gdc_wait()


@triton.jit
def take_turn(CHAINED: tl.constexpr):
    """Calls begin_next() and wait_for_last(), for kernels that do nothing between these calls."""
    begin_next(CHAINED)
    wait_for_last(CHAINED)


@triton.jit
def last_to_end(arrivals, programs):
    """Returns whether this program is the last of `programs` programs to call this function.

    All stores of the other programs are visible to the last program, which resets the counter to 0.

    Args:
        arrivals: pointer to an int32 counter, 0 before the first call.
        programs: number of programs that share the counter.
    """
    tl.debug_barrier()  # so that all threads have stored before a thread increments the counter
    arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    if arrived == programs - 1:
        tl.store(arrivals, 0)
    return arrived == programs - 1


@triton.jit
def fetch_ahead(pointers, CHAINED: tl.constexpr):
    """Prefetches lines of 128 bytes into the L2 cache without waiting for them.

    A program calls it before wait_for_last(), for data that no kernel writes.

    Args:
        pointers: a block of pointers, one per line.
        CHAINED: if False, the call does nothing.
    """
    if CHAINED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )
