"""Who begins when: kernels that begin while the one before them ends (programmatic dependent launch), so that nothing is idle
while they are launched, and the program of a kernel that ends last.

Every program of a chained kernel calls begin_next(), then wait_for_last() before it reads what another kernel writes, or writes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


@cache
def _chains(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def chained(device: torch.device) -> dict[str, Any]:
    """Of the launch of a kernel with begin_next() and wait_for_last(): whether it may begin while the one before it runs."""
    chains = _chains(device)
    return {"CHAINED": chains, "launch_pdl": chains}


@triton.jit
def begin_next(CHAINED: tl.constexpr):
    """The kernel behind this one may be launched once every program has come here: it waits for this one's end itself."""
    if CHAINED:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(CHAINED: tl.constexpr):
    """Until the kernel before this one has ended. Before it nothing is read that a kernel writes, and nothing written."""
    if CHAINED:
        cuda.gdc_wait()


@triton.jit
def take_turn(CHAINED: tl.constexpr):
    """Both, of a kernel that has nothing to do before."""
    begin_next(CHAINED)
    wait_for_last(CHAINED)


@triton.jit
def last_to_end(arrivals, programs):
    """Whether all others of so many programs have come here before: what they have stored can be read then, and their counter is
    0 again."""
    tl.debug_barrier()  # every thread has stored before one of them says so
    arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    if arrived == programs - 1:
        tl.store(arrivals, 0)
    return arrived == programs - 1


@triton.jit
def fetch_ahead(pointers, CHAINED: tl.constexpr):
    """Has the lines of 128 bytes at these places brought to the L2 cache, and waits for none: for what no kernel writes, before
    wait_for_last()."""
    if CHAINED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )
