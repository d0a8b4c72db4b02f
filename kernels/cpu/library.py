"""The C++ kernels as a kernels.contracts.ops.Kernels: checks shapes, then passes addresses. For float32 and bfloat16 tensors.

Linear layers take the packed path only for bfloat16 where the CPU has dot products for it; torch does the others.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from kernels.contracts.ops import Draws, PackedLinear, RaggedRows
from kernels.reference import layers as reference

POINTER, INT64, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
SIGNATURES: dict[str, list[type]] = {
    "rms_norm": [POINTER] * 4 + [INT64] * 2 + [FLOAT, INT, INT],
    "silu_and_mul": [POINTER] * 2 + [INT64] * 2 + [INT, INT],
    "rope_write_kv": [POINTER] * 8 + [INT64] * 5 + [FLOAT, INT, INT],
    "argmax": [POINTER] * 2 + [INT64] * 2 + [INT],
    "draw": [POINTER] * 8 + [INT64] * 2 + [INT],
    "paged_attention": [POINTER] * 9 + [INT64] * 7 + [FLOAT, INT, INT],
    "pack_linear": [POINTER] * 2 + [INT64] * 2 + [INT, INT],
    "linear": [POINTER] * 4 + [INT64] * 3 + [INT, INT, INT],
}
BLOCK = 64  # columns of a packed block


def _is_bfloat16(tensor: Tensor) -> bool:
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"the C++ kernels take float32 and bfloat16, not {tensor.dtype}")
    return tensor.dtype == torch.bfloat16


def _contiguous(*tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")


def _misfit(*tensors: Tensor) -> ValueError:
    """Made only once a check has failed: describing shapes costs more than a small kernel."""
    return ValueError(f"shapes or dtypes do not fit: {', '.join(f'{tuple(t.shape)} {t.dtype}' for t in tensors)}")


class CpuKernels:
    """Loads the library at path. threads: size of the OpenMP team of each call. Raises OSError if it cannot be loaded."""

    write_kv = staticmethod(reference.write_kv)
    general_attention = staticmethod(reference.general_attention)

    def __init__(self, path: Path, threads: int) -> None:
        library = ctypes.CDLL(str(path))  # releases the GIL during calls
        self._threads = threads
        for name, arguments in SIGNATURES.items():
            function = getattr(library, f"rootstock_{name}")
            function.argtypes, function.restype = arguments, None
            setattr(self, f"_{name}", function)
        self._prefer_huge_pages = library.rootstock_prefer_huge_pages
        self._prefer_huge_pages.argtypes, self._prefer_huge_pages.restype = [POINTER, INT64], None
        self._packs = bool(library.rootstock_has_packed_linear())
        self._library = library

    def _call(self, name: str, *arguments: int | float | None) -> None:
        getattr(self, f"_{name}")(*arguments, self._threads)

    def allocate_pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        pool = torch.empty(shape, dtype=dtype)  # mapped on first touch, so the hint comes in time
        self._prefer_huge_pages(pool.data_ptr(), pool.numel() * pool.itemsize)
        return pool

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return self._pack(weight, bias, gated=False)

    def pack_gated(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return self._pack(weight, bias, gated=True)

    def _pack(self, weight: Tensor, bias: Tensor | None, gated: bool) -> PackedLinear:
        rows, depth = weight.shape
        if not self._packs or not _is_bfloat16(weight) or depth % 2:
            return reference.pack_linear(weight, bias)
        columns = _packed_columns(rows, gated)
        data, source = torch.empty(len(columns) * depth, dtype=weight.dtype), weight.contiguous()
        self._call("pack_linear", data.data_ptr(), source.data_ptr(), rows, depth, gated)
        padded = None if bias is None else torch.cat((bias, bias.new_zeros(1)))[columns]
        return PackedLinear(data, padded, depth, rows, True)

    def linear(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        if weight.packed:
            self._linear_packed(out, x, weight, weight.out_features, gated=False)
        else:
            reference.linear(out, x, weight)

    def gated_linear(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        if weight.packed:
            self._linear_packed(out, x, weight, weight.out_features // 2, gated=True)
        else:
            both = torch.empty((len(x), weight.out_features), dtype=x.dtype)
            reference.linear(both, x, weight)
            self.silu_and_mul(out, both)

    def _linear_packed(self, out: Tensor, x: Tensor, weight: PackedLinear, width: int, gated: bool) -> None:
        _contiguous(out, x)
        rows, depth = x.shape
        if depth != weight.in_features or out.shape != (rows, width) or x.dtype != torch.bfloat16:
            raise _misfit(out, x)
        bias = None if weight.bias is None else weight.bias.data_ptr()
        sizes = (rows, weight.out_features, depth)
        wide = out.dtype == torch.float32
        self._call("linear", out.data_ptr(), x.data_ptr(), weight.data.data_ptr(), bias, *sizes, wide, gated)

    def rms_norm(self, out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        self._norm(out, x, None, weight, eps)

    def fused_add_rms_norm(self, out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        if residual.shape != x.shape:
            raise _misfit(x, residual)
        self._norm(out, x, residual, weight, eps)

    def _norm(self, out: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> None:
        _contiguous(out, x, weight, *(() if residual is None else (residual,)))
        if out.shape != x.shape or weight.shape[0] != x.shape[1]:
            raise _misfit(out, x, weight)
        held = None if residual is None else residual.data_ptr()
        self._call("rms_norm", out.data_ptr(), x.data_ptr(), held, weight.data_ptr(), *x.shape, eps, _is_bfloat16(x))

    def silu_and_mul(self, out: Tensor, x: Tensor) -> None:
        _contiguous(out, x)
        if x.shape != (out.shape[0], 2 * out.shape[1]):
            raise _misfit(out, x)
        self._call("silu_and_mul", out.data_ptr(), x.data_ptr(), *out.shape, _is_bfloat16(x))

    def rope_write_kv(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        cos_sin: Tensor,
        rows: RaggedRows,
        k_pool: Tensor,
        v_pool: Tensor,
    ) -> None:
        _contiguous(qkv, cos_sin, k_pool, v_pool)
        _, kv_heads, page_size, head_dim = k_pool.shape
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        if (heads + 2 * kv_heads) * head_dim != qkv.shape[1] or rows.positions.shape[0] != qkv.shape[0]:
            raise _misfit(qkv, k_pool, rows.positions)
        norm_places = (None, None) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
        places = (cos_sin.data_ptr(), rows.positions.data_ptr(), rows.locations.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr())
        sizes = (len(qkv), heads, kv_heads, head_dim, page_size)
        self._call("rope_write_kv", qkv.data_ptr(), *norm_places, *places, *sizes, eps, _is_bfloat16(qkv))

    def paged_attention(
        self, out: Tensor, qkv: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, scale: float, window: int
    ) -> None:
        _contiguous(out, qkv, k_pool, v_pool, rows.page_table)
        _, kv_heads, page_size, head_dim = k_pool.shape
        heads, width = out.shape[1] // head_dim, rows.page_table.shape[1]
        if rows.max_context > width * page_size or out.shape[1] + 2 * kv_heads * head_dim != qkv.shape[1]:
            raise _misfit(out, qkv, k_pool, rows.page_table)
        columns = (rows.page_table, rows.slots, rows.starts, rows.num_tokens, rows.offsets)
        places = [tensor.data_ptr() for tensor in (out, qkv, k_pool, v_pool, *columns)]
        sizes = (len(rows.slots), width, heads, kv_heads, head_dim, page_size, window)
        self._call("paged_attention", *places, *sizes, scale, _is_bfloat16(qkv))

    def argmax(self, logits: Tensor) -> Tensor:
        _contiguous(logits)
        if logits.dtype != torch.float32:
            raise _misfit(logits)
        out = torch.empty(len(logits), dtype=torch.int64)
        self._call("argmax", out.data_ptr(), logits.data_ptr(), *logits.shape)
        return out

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        columns = (draws.rows, draws.temperatures, draws.top_ks, draws.top_ps, draws.min_ps, draws.uniforms)
        _contiguous(logits, *columns)
        dtypes = (torch.int64, torch.float32, torch.int64, torch.float32, torch.float32, torch.float64)
        if logits.dtype != torch.float32 or tuple(column.dtype for column in columns) != dtypes:
            raise _misfit(logits, *columns)
        out = torch.empty(len(draws.rows), dtype=torch.int64)
        places = [column.data_ptr() for column in columns]
        self._call("draw", out.data_ptr(), logits.data_ptr(), *places, len(out), logits.shape[1])
        return out


def _packed_columns(rows: int, gated: bool) -> Tensor:
    """int64: the weight row of each packed column; `rows`, one past the end, where the column is padding."""
    if not gated:
        columns = torch.arange(-(-rows // BLOCK) * BLOCK)
        return columns.clamp(max=rows)
    half = rows // 2
    pairs = torch.arange(-(-half // 32) * 32).view(-1, 1, 32)
    both = torch.cat((pairs, pairs + half), dim=1)
    return torch.where(pairs < half, both, rows).flatten()
