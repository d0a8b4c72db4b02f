"""The models that FlashInfer can serve, and upper bounds of the scratch memory that it needs.

The bounds follow the library's scheduler (attention/scheduler.cuh) in versions 0.6.4 and 0.7.2.
"""

from __future__ import annotations

import torch

from rootstock_llm.services.worker.exec.attention.backend import AttentionShape

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
MAX_ROWS = 32768  # the length of the library's own buffer of key/value lengths
TENSOR_CORE_GROUP = 4  # smallest number of query heads per key/value head for which decode runs on tensor cores
BLOCKS_PER_SM = 16  # blocks of the decode kernel that one multiprocessor runs at once: 2,048 threads, 128 per block
MIN_FLOAT_BYTES = 128 << 20  # size of the float workspace in the library's documentation
MIN_INT_BYTES = 8 << 20  # size of the int workspace that the library allocates itself
SLACK_BYTES = 4096  # for alignment: every array of the library begins at a multiple of 16 bytes


class Unsupported(Exception):
    """Raised if FlashInfer cannot serve this model. `reason` is one clause for the log. Another back end must be chosen."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def check(shape: AttentionShape, dtype: torch.dtype) -> None:
    """Checks that FlashInfer has kernels for the shape and dtype. Raises Unsupported if not."""
    if dtype not in DTYPES:
        raise Unsupported(f"its kernels compute in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}")
    if shape.head_dim not in HEAD_DIMS:
        raise Unsupported(f"its kernels exist for head sizes {HEAD_DIMS}, not for {shape.head_dim}")
    if shape.value_dim != shape.head_dim:
        raise Unsupported(f"its values must have the size of keys; the sizes are {shape.value_dim} and {shape.head_dim}")
    if shape.has_sinks:
        raise Unsupported("its back end has no attention sinks")
    if shape.has_softcap:
        raise Unsupported("its back end has no score caps")
    if shape.num_kv_heads < 1 or shape.num_heads % shape.num_kv_heads:
        raise Unsupported(f"{shape.num_heads} query heads are not a multiple of {shape.num_kv_heads} key/value heads")
    if shape.page_size < 1:
        raise Unsupported(f"page_size is {shape.page_size}; it must be 1 or more")
    if shape.max_rows > MAX_ROWS:
        raise Unsupported(f"its buffers hold {MAX_ROWS} rows, not {shape.max_rows}")


def tensor_cores(shape: AttentionShape) -> bool:
    """Returns whether decode runs on tensor cores: if a key/value head has at least TENSOR_CORE_GROUP query heads.

    The decode kernel for CUDA cores computes 2 floating-point operations in float32 per query head and element that it reads. An
    H200 reads 4.8 TB/s and computes 67 TFLOP/s. With 4 query heads, the bytes of one second need about 20 TFLOP, without their
    conversion from bfloat16. The kernel is then limited by arithmetic instead of memory. With fewer than 4 query heads, a tensor
    core tile of 16 rows would be mostly padding. The kernel for CUDA cores exists for groups of 1, 2, 3, 4 and 8 heads, which
    include every group below the threshold.
    """
    return shape.num_heads // shape.num_kv_heads >= TENSOR_CORE_GROUP


def graph_tile(group: int, head_dim: int) -> int:
    """Returns the rows of one block of a captured decode on tensor cores. A row is one query head of one token."""
    if group > 64 and head_dim < 256:
        return 128
    return 64 if group > 16 else 16


def float_bytes(shape: AttentionShape, num_sms: int, graph_rows: int) -> int:
    """Returns the bytes for the float32 partial outputs and sums of rows whose keys are split between blocks.

    Args:
        graph_rows: rows of the largest captured graph, 0 for no graph.
    """
    group, heads = shape.num_heads // shape.num_kv_heads, shape.num_heads
    split = 2 * num_sms // shape.num_kv_heads
    rows = [
        split * (64 if shape.head_dim >= 256 else 128),  # prefill, mixed, and decode by the prefill kernel
        BLOCKS_PER_SM * num_sms // shape.num_kv_heads,  # decode on CUDA cores
    ]
    if graph_rows and tensor_cores(shape):
        tile = graph_tile(group, shape.head_dim)
        rows.append(max(split, -(-graph_rows * group // tile) + graph_rows - 1) * tile)
    return max(MIN_FLOAT_BYTES, heads * max(rows) * (shape.head_dim + 1) * 4 + SLACK_BYTES)


def int_bytes(shape: AttentionShape, num_sms: int) -> int:
    """Returns the bytes of one plan's schedule, which assigns parts of rows to blocks."""
    group = shape.num_heads // shape.num_kv_heads
    tiles = max(2 * num_sms // shape.num_kv_heads, -(-shape.max_tokens * group // 16) + shape.max_rows)
    prefill = 13 * tiles + 4 * (shape.max_rows + shape.max_tokens + 2)
    per_head = -(-shape.max_tokens // 128) + shape.max_rows - 1
    works = per_head if per_head > 4096 else per_head * shape.num_heads
    hopper = 28 * max(works, min(per_head, 4096) * shape.num_heads) + 4 * (num_sms + 1)
    decode = 13 * max(BLOCKS_PER_SM * num_sms // shape.num_kv_heads, shape.max_rows) + 4
    return max(MIN_INT_BYTES, prefill + SLACK_BYTES, hopper + SLACK_BYTES, decode + SLACK_BYTES)
