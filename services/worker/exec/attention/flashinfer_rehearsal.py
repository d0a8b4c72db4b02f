"""Steps over rows of zeros, which make a back end compile and load the kernels of a kind of step before its first use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels.contracts.ops import RaggedRows
from services.worker.exec.attention.backend import AttentionBackend, AttentionBatch, AttentionShape


def rehearse(
    backend: AttentionBackend,
    shape: AttentionShape,
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: Sequence[int],
    num_extend: int,
) -> None:
    """Plans one step of padding rows and runs its attention once per window. Waits for the device.

    Args:
        num_tokens: tokens of each row.
        num_extend: number of extend rows, which are the first ones.
    """
    rows, tokens = len(num_tokens), sum(num_tokens)
    zeros = torch.zeros(rows, dtype=torch.int32, device=device)
    columns = RaggedRows(zeros.view(rows, 1), zeros - 1, zeros, zeros, zeros, zeros, zeros.long(), max(num_tokens))
    width, heads = shape.head_dim, shape.num_heads + 2 * shape.num_kv_heads
    pool = torch.zeros((1, shape.num_kv_heads, shape.page_size, width), dtype=dtype, device=device)
    qkv = torch.zeros((tokens, heads * width), dtype=dtype, device=device)
    out = torch.empty((tokens, shape.num_heads * width), dtype=dtype, device=device)
    starts, counts = np.zeros(rows, np.int32), np.array(num_tokens, np.int32)
    backend.plan(AttentionBatch(starts, counts, num_extend, columns))
    for window in shape.windows:
        backend.attend(out, qkv, pool, pool, columns, 1.0, window)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
