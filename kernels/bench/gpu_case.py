"""One kernel at one shape, to be timed on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Work = Callable[[], object]
Make = Callable[[torch.device], Work]


@dataclass(frozen=True, slots=True)
class GpuCase:
    """make: allocates inputs and outputs on the device, and gives what is timed: one call of the kernel, with no host work but
    the launch. It is called several times, so that the calls of a measurement go round among separate inputs; what it gives
    keeps its inputs alive.

    bytes_moved: read and written by one call at the least; what is read twice counts once. flops: of one call, 0 where they do
    not matter. captures: whether the work can be captured in a CUDA graph; what cannot is launched call by call.
    plain: the same in plain torch, or None; plain_captures as captures.
    """

    name: str
    make: Make
    bytes_moved: int
    flops: int = 0
    captures: bool = True
    plain: Make | None = None
    plain_captures: bool = True
