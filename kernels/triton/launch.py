"""What launches share: sizes of blocks and warps, and the checks before them. A kernel runs on the current CUDA device."""

from __future__ import annotations

import triton
from torch import Tensor

MAX_BLOCK = 1 << 15  # elements that one program holds at a time


def block_of(size: int) -> int:
    """The power of two that holds `size`. Raises ValueError above MAX_BLOCK."""
    block = int(triton.next_power_of_2(size))
    if block > MAX_BLOCK:
        raise ValueError(f"{size} elements are more than the {MAX_BLOCK} that one program can hold")
    return block


def warps_for(elements: int) -> int:
    """So many that a thread has 8 elements: 16 bytes of a half type, one load."""
    return min(max(elements // 256, 1), 16)


def require_contiguous(*tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")


def misfit(*tensors: Tensor) -> ValueError:
    """Made only once a check has failed: describing shapes costs more than a launch."""
    return ValueError(f"shapes or dtypes do not fit: {', '.join(f'{tuple(t.shape)} {t.dtype}' for t in tensors)}")
