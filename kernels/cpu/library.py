"""Implements Kernels and StepKernels with the C++ library.

Layers take float32 and bfloat16 tensors. Each method checks shapes and passes addresses to the library.

Linear layers of bfloat16 use the dot product instructions of the CPU if it has them. All other linear layers without codes add
their products in the order of the depth. torch's matrix products are not used, because the order of their sums depends on the
number of rows.

src/coded.h describes weights with codes and their two kinds of products.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import CodedWeight, Matrix, Scheme, compact_scales
from rootstock_llm.kernels.contracts.ops import (
    Activation,
    DeltaGates,
    Matrices,
    PackedExperts,
    PackedLinear,
    RaggedRows,
    Routing,
    ScoreRule,
    StateRows,
    misfit,
    require_contiguous,
)
from rootstock_llm.kernels.contracts.step_ops import DevicePageTableUpdates
from rootstock_llm.kernels.cpu.functions import FLOAT, INT, INT64, POINTER, load_functions
from rootstock_llm.kernels.reference import layers
from rootstock_llm.kernels.reference.coded import CodedExperts, coded_matrix, in_order, plain_matrix

LAYER_SIGNATURES: dict[str, list[type]] = {
    "rms_norm": [POINTER] * 4 + [INT64] * 2 + [FLOAT, INT, INT],
    "silu_and_mul": [POINTER] * 2 + [INT64] * 2 + [INT, INT],
    "gelu_and_mul": [POINTER] * 2 + [INT64] * 2 + [INT, INT],
    "sigmoid_mul": [POINTER] * 2 + [INT64] * 2 + [INT] * 3,
    "route": [POINTER] * 4 + [INT64] * 5 + [FLOAT] + [INT] * 4,
    "experts": [POINTER] * 10 + [INT64] * 6 + [FLOAT] * 3 + [INT] * 3,
    "rope_write_kv": [POINTER] * 8 + [INT64] * 5 + [FLOAT, INT, INT],
    "gated_delta_rule": [POINTER] * 14 + [INT64] * 7 + [INT, INT],
    "gated_rms_norm": [POINTER] * 4 + [INT64] * 2 + [FLOAT, INT, INT],
    "update_page_table": [POINTER] * 6 + [INT64] * 2 + [INT],
    "resolve_tokens": [POINTER] * 12 + [INT64] * 5 + [INT],
    "paged_attention": [POINTER] * 10 + [INT64] * 9 + [FLOAT] * 2 + [INT, INT, INT],
    "pack_linear": [POINTER] * 2 + [INT64] * 2 + [INT, INT],
    "linear": [POINTER] * 4 + [INT64] * 3 + [INT, INT, INT],
    "pack_ordered": [POINTER] * 2 + [INT64] * 2 + [INT] * 3,
    "linear_ordered": [POINTER] * 4 + [INT64] * 3 + [INT, INT, INT],
    "embedding": [POINTER] * 3 + [INT64] * 3 + [INT],
    "pack_coded": [POINTER] * 3 + [INT64] * 3 + [INT, INT],
    "linear_coded": [POINTER] * 7 + [INT64] * 4 + [INT] * 6,
    "embedding_coded": [POINTER] * 4 + [INT64] * 2 + [INT, INT],
    "has_int8_products": [POINTER],
    "experts_coded": [POINTER] * 10 + [INT64] * 4 + [FLOAT] * 3 + [INT, INT],
    "prefer_huge_pages": [POINTER, INT64],
    "has_packed_linear": [POINTER],
}
BLOCK = 64  # output columns of a packed block
MOST_TAPS = 8  # largest width of the convolution in gated_delta_rule()
# experts() passes at most MOST_ROWS rows to the library at a time, which limits the scratch memory. If there are too few blocks
# of columns for all threads, more than LEAST_ROWS rows are divided into parts. Each part reads the weights again.
MOST_ROWS, LEAST_ROWS = 2048, 512


class CpuKernels:
    """The C++ kernels of a model's layers."""

    write_kv = staticmethod(layers.write_kv)
    page_indices = staticmethod(layers.page_indices)

    def __init__(self, path: Path, threads: int, deterministic: bool = False) -> None:
        """Loads the library.

        Args:
            path: the shared library.
            threads: size of the OpenMP team of each call.
            deterministic: whether results have the guarantees of a deterministic implementation of Kernels.

        Raises:
            OSError: the library cannot be loaded.
        """
        self._functions = load_functions(path, LAYER_SIGNATURES)
        self._threads, self._deterministic = threads, deterministic
        self._packs, self.rounds_activations = self._has("has_packed_linear"), self._has("has_int8_products")
        self._tables: dict[tuple[int, ...], Tensor] = {}  # tables of schemes as int8[16]

    def _has(self, name: str) -> bool:
        result = torch.zeros(1, dtype=torch.int32)
        self._functions[name](result.data_ptr())
        return bool(result)

    def _call(self, name: str, *arguments: int | float | None) -> None:
        self._functions[name](*arguments, self._threads)

    def allocate_pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        pool = torch.empty(shape, dtype=dtype)  # not zeroed: huge pages are only used for memory that was not written before
        self._functions["prefer_huge_pages"](pool.data_ptr(), pool.numel() * pool.itemsize)
        return pool

    def pack_linear(self, weight: Matrix, bias: Tensor | None) -> PackedLinear:
        return self._pack(weight, bias, gated=False)

    def pack_gated(self, weight: Matrix, bias: Tensor | None) -> PackedLinear:
        return self._pack(weight, bias, gated=True)

    def _pack(self, weight: Matrix, bias: Tensor | None, gated: bool) -> PackedLinear:
        if isinstance(weight, CodedWeight):
            return self._pack_coded(weight, bias, gated)
        rows, depth = weight.shape
        if not self._has_dots(weight):
            data = torch.empty(-(-rows // BLOCK), depth, BLOCK, dtype=weight.dtype)
            self._fill(data, weight, gated=False)
            return PackedLinear(data, None if bias is None else bias.contiguous(), depth, rows, True)
        columns = _packed_columns(rows, gated)
        data = torch.empty(len(columns) * depth, dtype=weight.dtype)
        self._fill(data, weight, gated)
        return PackedLinear(data, None if bias is None else _padded(bias, columns), depth, rows, True)

    def _has_dots(self, weight: Tensor) -> bool:
        """Whether the library multiplies this weight with dot product instructions of the CPU."""
        return self._packs and _is_bfloat16(weight) and weight.shape[1] % 2 == 0

    def _fill(self, data: Tensor, weight: Tensor, gated: bool) -> None:
        """Packs a weight [N, K] into `data`, which has the shape [blocks, K, 64], or is flat for dot products."""
        source, arguments = weight.contiguous(), (*weight.shape, gated)
        if data.dim() == 1:
            self._call("pack_linear", data.data_ptr(), source.data_ptr(), *arguments)
        else:
            self._call("pack_ordered", data.data_ptr(), source.data_ptr(), *arguments, _is_bfloat16(weight))

    def pack_experts(
        self, gate_up: Matrices, gate_up_bias: Tensor | None, down: Matrices, down_bias: Tensor | None, activation: Activation
    ) -> PackedExperts:
        """Implements Kernels.pack_experts(). Each block of gate_up has 32 columns of the gate, then the same columns of up."""
        pair, back = gate_up[0], down[0]
        if isinstance(pair, CodedWeight):
            both = self._pack_coded_experts(pair, gate_up, gate_up_bias, gated=True)
            return PackedExperts(both, self._pack_coded_experts(back, down, down_bias, gated=False), activation)
        back = plain_matrix(back)
        dots = self._has_dots(pair) and self._has_dots(back)
        both = self._empty_experts(len(gate_up), pair, gate_up_bias, True, dots)
        out = self._empty_experts(len(gate_up), back, down_bias, False, dots)
        for expert in range(len(gate_up)):
            if expert:  # each matrix is indexed once
                pair, back = plain_matrix(gate_up[expert]), plain_matrix(down[expert])
            self._fill(both.data[expert], pair, gated=True)
            self._fill(out.data[expert], back, gated=False)
        return PackedExperts(both, out, activation)

    def _pack_coded_experts(self, first: Matrix, matrices: Matrices, bias: Tensor | None, gated: bool) -> PackedLinear:
        """Packs the codes of all experts. `first` is the matrix of expert 0, which is not indexed again.

        Raises ValueError if only some matrices have codes, if their schemes differ, or if one of them has an order.
        """
        packed = CodedExperts(len(matrices), lambda shape: self.allocate_pool(shape, torch.uint8))
        for expert in range(len(matrices)):
            packed.add(self._pack_coded(coded_matrix(matrices[expert] if expert else first), None, gated))
        columns = _packed_columns(first.shape[0], gated)
        return packed.finished(None if bias is None else _padded(bias, columns).float())

    def _empty_experts(self, count: int, first: Tensor, bias: Tensor | None, gated: bool, dots: bool) -> PackedLinear:
        """Returns the packed biases and uninitialized weights of all experts. `first` is the matrix of expert 0."""
        rows, depth = first.shape
        columns = _packed_columns(rows, gated)
        shape = (len(columns) * depth,) if dots else (len(columns) // BLOCK, depth, BLOCK)
        data = self.allocate_pool((count, *shape), first.dtype)
        return PackedLinear(data, None if bias is None else _padded(bias, columns), depth, rows, True)

    def _pack_coded(self, weight: CodedWeight, bias: Tensor | None, gated: bool) -> PackedLinear:
        """Packs codes as src/coded.h describes. Scales, zero points and biases get the order of the packed columns."""
        rows, depth = weight.shape
        order = _packed_columns(rows, gated)
        data = torch.empty(len(order) * depth * weight.scheme.bits // 8, dtype=torch.uint8)
        self._functions["prefer_huge_pages"](data.data_ptr(), data.numel())
        codes = weight.codes.contiguous()
        sizes = (len(order), rows, depth, weight.scheme.bits)
        self._call("pack_coded", data.data_ptr(), codes.data_ptr(), order.data_ptr(), *sizes)
        scales = _in_blocks(compact_scales(weight.scales) if weight.scheme.group else weight.scales, order)
        zeros = None if weight.zeros is None else _in_blocks(weight.zeros, order)
        padded = None if bias is None else torch.cat((bias, bias.new_zeros(1)))[order].float()
        return PackedLinear(data, padded, depth, rows, True, weight.scheme, scales, zeros, weight.order)

    def _linear_coded(self, out: Tensor, x: Tensor, weight: PackedLinear, width: int, gated: bool) -> None:
        if x.shape[1] != weight.in_features:
            raise misfit(out, x)
        x = in_order(x, weight)
        require_contiguous(out, x)
        rows, depth = x.shape
        scheme, scales = weight.scheme, weight.scales
        assert scheme is not None and scales is not None, "the weight has codes"
        wide = out.dtype == torch.float32
        if out.shape != (rows, width) or not (wide or out.dtype == x.dtype):
            raise misfit(out, x)
        if not rows:
            return
        tensors = (out, x, weight.data, scales, weight.zeros, weight.bias, self._table(scheme))
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        sizes = (rows, weight.out_features, depth, scheme.group or depth, scheme.bits)
        self._call("linear_coded", *addresses, *sizes, scales.dtype == torch.bfloat16, wide, gated, _is_bfloat16(x))

    def _table(self, scheme: Scheme) -> Tensor | None:
        if scheme.table is None:
            return None
        if scheme.table not in self._tables:
            self._tables[scheme.table] = torch.tensor(scheme.table, dtype=torch.int8)
        return self._tables[scheme.table]

    def linear(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        if weight.scheme is not None:
            self._linear_coded(out, x, weight, weight.out_features, gated=False)
        elif _is_ordered(weight):
            self._linear_ordered(out, x, weight)
        else:
            self._linear_packed(out, x, weight, weight.out_features, gated=False)

    def gated_linear(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        if weight.scheme is not None:
            self._linear_coded(out, x, weight, weight.out_features // 2, gated=True)
        elif not _is_ordered(weight):
            self._linear_packed(out, x, weight, weight.out_features // 2, gated=True)
        else:
            both = torch.empty((len(x), weight.out_features), dtype=x.dtype)
            self.linear(both, x, weight)
            self.silu_and_mul(out, both)

    def embedding(self, out: Tensor, input_ids: Tensor, weight: PackedLinear) -> None:
        """Implements Kernels.embedding(). Raises ValueError if the shapes do not fit."""
        if not weight.packed:
            layers.embedding(out, input_ids, weight)
            return
        require_contiguous(out, input_ids)
        if out.shape != (len(input_ids), weight.in_features) or input_ids.dtype != torch.int64:
            raise misfit(out, input_ids)
        if weight.scheme is not None and weight.scales is not None:
            if weight.scheme.group or weight.scheme.bits != 8 or weight.scheme.zero_points:
                raise ValueError(f"an embedding of {weight.scheme} is not supported")
            addresses = [tensor.data_ptr() for tensor in (out, weight.data, weight.scales, input_ids)]
            self._call("embedding_coded", *addresses, len(input_ids), weight.in_features, _is_bfloat16(out))
            return
        if out.dtype != weight.data.dtype:
            raise misfit(out, weight.data)
        # A packed block interleaves 64 rows in units of one element, or of two consecutive elements of a row.
        unit = out.itemsize if _is_ordered(weight) else 2 * out.itemsize
        units = weight.in_features * out.itemsize // unit
        self._call("embedding", out.data_ptr(), weight.data.data_ptr(), input_ids.data_ptr(), len(input_ids), units, unit)

    def _linear_ordered(self, out: Tensor, x: Tensor, weight: PackedLinear) -> None:
        require_contiguous(out, x)
        rows, depth = x.shape
        wide = out.dtype == torch.float32
        if depth != weight.in_features or out.shape != (rows, weight.out_features) or x.dtype != weight.data.dtype:
            raise misfit(out, x)
        if not rows:
            return
        bias = None if weight.bias is None else weight.bias.data_ptr()
        sizes = (rows, weight.out_features, depth)
        addresses = (out.data_ptr(), x.data_ptr(), weight.data.data_ptr(), bias)
        self._call("linear_ordered", *addresses, *sizes, wide, _is_bfloat16(x))

    def _linear_packed(self, out: Tensor, x: Tensor, weight: PackedLinear, width: int, gated: bool) -> None:
        require_contiguous(out, x)
        rows, depth = x.shape
        if depth != weight.in_features or out.shape != (rows, width) or x.dtype != torch.bfloat16:
            raise misfit(out, x)
        if not rows:
            return
        bias = None if weight.bias is None else weight.bias.data_ptr()
        sizes = (rows, weight.out_features, depth)
        wide = out.dtype == torch.float32
        self._call("linear", out.data_ptr(), x.data_ptr(), weight.data.data_ptr(), bias, *sizes, wide, gated)

    def rms_norm(self, out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        self._norm(out, x, None, weight, eps)

    def fused_add_rms_norm(self, out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        if residual.shape != x.shape:
            raise misfit(x, residual)
        self._norm(out, x, residual, weight, eps)

    def _norm(self, out: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> None:
        require_contiguous(out, x, weight, *(() if residual is None else (residual,)))
        if out.shape != x.shape or weight.shape[0] != x.shape[1] or weight.dtype != torch.float32:
            raise misfit(out, x, weight)
        residual_address = None if residual is None else residual.data_ptr()
        self._call("rms_norm", out.data_ptr(), x.data_ptr(), residual_address, weight.data_ptr(), *x.shape, eps, _is_bfloat16(x))

    def silu_and_mul(self, out: Tensor, x: Tensor) -> None:
        self._activate("silu_and_mul", out, x)

    def gelu_and_mul(self, out: Tensor, x: Tensor) -> None:
        self._activate("gelu_and_mul", out, x)

    def _activate(self, name: str, out: Tensor, x: Tensor) -> None:
        require_contiguous(out, x)
        if x.shape != (out.shape[0], 2 * out.shape[1]):
            raise misfit(out, x)
        self._call(name, out.data_ptr(), x.data_ptr(), *out.shape, _is_bfloat16(x))

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> None:
        require_contiguous(x, gate)
        whole_rows = gate.shape == (len(x), 1)
        if (x.shape != gate.shape and not whole_rows) or x.dtype != gate.dtype:
            raise misfit(x, gate)
        self._call("sigmoid_mul", x.data_ptr(), gate.data_ptr(), *x.shape, whole_rows, _is_bfloat16(x))

    def route(self, weights: Tensor, ids: Tensor, logits: Tensor, bias: Tensor | None, routing: Routing) -> None:
        """Implements Kernels.route(). Raises ValueError if the shapes or the rules do not fit."""
        require_contiguous(weights, ids, logits, *(() if bias is None else (bias,)))
        rows, experts = logits.shape
        fits = weights.shape == ids.shape == (rows, routing.top_k) and (bias is None or bias.shape == (experts,))
        floats = {tensor.dtype for tensor in (weights, logits, *(() if bias is None else (bias,)))}
        if not fits or not routing.fits(experts) or floats != {torch.float32} or ids.dtype != torch.int32:
            raise misfit(weights, ids, logits)
        sizes = (rows, experts, routing.top_k, routing.num_groups, routing.top_groups)
        flags = (routing.scoring == "sigmoid", routing.group_score == "two_best", routing.renormalize)
        addresses = (weights.data_ptr(), ids.data_ptr(), logits.data_ptr(), None if bias is None else bias.data_ptr())
        self._call("route", *addresses, *sizes, routing.scale, *flags)

    def experts(self, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, packed: PackedExperts) -> None:
        """Implements Kernels.experts(). Raises ValueError if the shapes do not fit."""
        require_contiguous(out, x, ids, weights)
        gate_up = packed.gate_up
        if out.shape != x.shape or x.shape[1] != gate_up.in_features or ids.shape != weights.shape or len(ids) != len(x):
            raise misfit(out, x, ids, weights)
        if gate_up.scheme is None and x.dtype != gate_up.data.dtype:
            raise misfit(x, gate_up.data)
        if out.dtype != x.dtype or (ids.dtype, weights.dtype) != (torch.int32, torch.float32):
            raise misfit(out, x, ids, weights, gate_up.data)
        for first in range(0, len(x), MOST_ROWS):
            part = slice(first, first + MOST_ROWS)
            self._some_experts(out[part], x[part], ids[part], weights[part], packed)

    def _some_experts(self, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, packed: PackedExperts) -> None:
        gate_up, down, activation = packed.gate_up, packed.down, packed.activation
        (rows, width), choices = x.shape, ids.shape[1]
        parts = min(-(-rows // LEAST_ROWS), max(1, 4 * self._threads * BLOCK // width))
        part = -(-rows // parts)
        hidden = x.new_empty((rows * choices, down.in_features))
        sums = torch.empty((self._threads, part * choices, BLOCK), dtype=torch.float32)
        addresses = [tensor.data_ptr() for tensor in (out, x, ids, weights)]
        factors = (activation.alpha, activation.limit, activation.shift)
        if gate_up.scheme is not None:
            fields = [array for linear in (gate_up, down) for array in self._coded_fields(linear)]
            addresses += [array.data_ptr() for array in (*fields, hidden, sums)]
            counts = (rows, packed.num_experts, choices, part)
            self._call("experts_coded", *addresses, *counts, *factors, _is_bfloat16(x))
            return
        for linear in (gate_up, down):
            addresses += [linear.data.data_ptr(), 0 if linear.bias is None else linear.bias.data_ptr()]
        sizes = (rows, width, down.in_features, packed.num_experts, choices, part)
        kinds = (gate_up.data.dim() == 2, _is_bfloat16(x))
        self._call("experts", *addresses, hidden.data_ptr(), sums.data_ptr(), *sizes, *factors, *kinds)

    def _coded_fields(self, weight: PackedLinear) -> tuple[Tensor, Tensor]:
        """Returns the pointers and the sizes of a struct Coded (src/coded.h), int64[5] each."""
        scheme, scales = weight.scheme, weight.scales
        assert scheme is not None and scales is not None, "the weight has codes"
        tensors = (weight.data, scales, weight.zeros, weight.bias, self._table(scheme))
        sizes = (weight.out_features, weight.in_features, scheme.group or weight.in_features, scheme.bits)
        return (
            torch.tensor([0 if tensor is None else tensor.data_ptr() for tensor in tensors]),
            torch.tensor([*sizes, int(scales.dtype == torch.bfloat16)]),
        )

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
        require_contiguous(qkv, cos_sin, k_pool, v_pool)
        _, kv_heads, page_size, head_dim = k_pool.shape
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        if (heads + 2 * kv_heads) * head_dim != qkv.shape[1] or rows.positions.shape[0] != qkv.shape[0]:
            raise misfit(qkv, k_pool, rows.positions)
        if norms is not None and any(norm.dtype != torch.float32 for norm in norms):
            raise misfit(*norms)
        norm_addresses = (None, None) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
        tensors = (cos_sin, rows.positions, rows.locations, k_pool, v_pool)
        addresses = [tensor.data_ptr() for tensor in tensors]
        sizes = (len(qkv), heads, kv_heads, head_dim, page_size)
        self._call("rope_write_kv", qkv.data_ptr(), *norm_addresses, *addresses, *sizes, eps, _is_bfloat16(qkv))

    def paged_attention(self, out: Tensor, q: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, rule: ScoreRule) -> None:
        """Implements Kernels.paged_attention(). Raises ValueError if the shapes do not fit."""
        require_contiguous(out, k_pool, v_pool, rows.page_table)
        _, kv_heads, page_size, head_dim = k_pool.shape
        value_dim, width, sinks = v_pool.shape[3], rows.page_table.shape[1], rule.sinks
        heads = out.shape[1] // value_dim
        if rows.max_context > width * page_size or heads * value_dim != out.shape[1] or heads % kv_heads:
            raise misfit(out, k_pool, v_pool, rows.page_table)
        if len(q) != len(out) or q.shape[1] < heads * head_dim or q.stride(1) != 1 or v_pool.shape[:3] != k_pool.shape[:3]:
            raise misfit(out, q, k_pool, v_pool)
        if not q.dtype == out.dtype == k_pool.dtype == v_pool.dtype:
            raise misfit(out, q, k_pool, v_pool)
        if sinks is not None and (sinks.shape != (heads,) or sinks.dtype != torch.float32 or not sinks.is_contiguous()):
            raise misfit(out, sinks)
        columns = (rows.page_table, rows.slots, rows.starts, rows.num_tokens, rows.offsets)
        addresses = [tensor.data_ptr() for tensor in (out, q, k_pool, v_pool, *columns)]
        sizes = (len(rows.slots), width, heads, kv_heads, head_dim, value_dim, q.stride(0), page_size, rule.window)
        options = (rule.scale, rule.softcap, self._deterministic, _is_bfloat16(q))
        self._call("paged_attention", *addresses, None if sinks is None else sinks.data_ptr(), *sizes, *options)

    def gated_delta_rule(
        self,
        out: Tensor,
        qkv: Tensor,
        gates: Tensor,
        weight: Tensor,
        decay: DeltaGates,
        rows: RaggedRows,
        states: StateRows,
        conv_pool: Tensor,
        state_pool: Tensor,
    ) -> None:
        """Implements Kernels.gated_delta_rule(). Raises ValueError if the shapes do not fit, or for more than 8 taps."""
        require_contiguous(out, qkv, gates, weight, decay.rates, decay.biases, conv_pool, state_pool)
        units, heads, key_dim, value_dim = state_pool.shape
        channels, taps = weight.shape
        key_channels = channels - heads * value_dim
        key_heads = key_channels // (2 * key_dim)
        fits = qkv.shape == (len(out), channels) and conv_pool.shape == (units, taps - 1, channels) and taps <= MOST_TAPS
        if not fits or out.shape[1] != heads * value_dim or gates.shape != (len(out), 2 * heads) or heads % max(key_heads, 1):
            raise misfit(out, qkv, gates, weight, conv_pool, state_pool)
        if key_heads < 1 or 2 * key_heads * key_dim != key_channels or state_pool.dtype != torch.float32:
            raise misfit(weight, state_pool)
        columns = (rows.offsets, rows.num_tokens, states.before, states.after, states.cuts, states.at_cut)
        if len({len(column) for column in columns}) > 1:
            raise misfit(*columns)
        tensors = (out, qkv, gates, weight, decay.rates, decay.biases, conv_pool, state_pool, *columns)
        sizes = (len(out), len(rows.offsets), key_heads, heads, key_dim, value_dim, taps)
        self._call("gated_delta_rule", *(tensor.data_ptr() for tensor in tensors), *sizes, _is_bfloat16(qkv))

    def gated_rms_norm(self, out: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> None:
        """Implements Kernels.gated_rms_norm(). Raises ValueError if the shapes do not fit."""
        require_contiguous(out, x, gate, weight)
        if not out.shape == x.shape == gate.shape or weight.shape[0] != x.shape[1] or weight.dtype != torch.float32:
            raise misfit(out, x, gate, weight)
        places = (out.data_ptr(), x.data_ptr(), gate.data_ptr(), weight.data_ptr())
        self._call("gated_rms_norm", *places, *x.shape, eps, _is_bfloat16(x))

    def update_page_table(self, table: Tensor, updates: DevicePageTableUpdates) -> None:
        """Implements StepKernels.update_page_table(). Raises ValueError if the shapes do not fit."""
        columns = (updates.slots, updates.firsts, updates.counts, updates.offsets)
        if len({len(column) for column in columns}) > 1:
            raise misfit(*columns)
        require_contiguous(table, *columns, updates.pages)
        addresses = [tensor.data_ptr() for tensor in (table, *columns, updates.pages)]
        self._call("update_page_table", *addresses, len(updates.slots), table.shape[1])

    def resolve_tokens(
        self,
        input_ids: Tensor,
        rows: RaggedRows,
        given: Tensor,
        relay: Tensor,
        unwritten: Tensor | None,
        num_extend: int,
        page_size: int,
        vocab_size: int,
        max_tokens: int,
        known: Tensor | None = None,
    ) -> None:
        """Implements StepKernels.resolve_tokens(). Raises ValueError if the shapes do not fit."""
        tokens = len(input_ids)
        if not len(rows.positions) == len(rows.locations) == tokens or (known is not None and len(known) != tokens):
            raise misfit(input_ids, rows.positions, rows.locations, *(() if known is None else (known,)))
        require_contiguous(input_ids, rows.positions, rows.locations, rows.page_table, relay)
        columns = (rows.page_table, rows.slots, rows.starts, rows.num_tokens, rows.offsets, given, relay)
        addresses = [tensor.data_ptr() for tensor in (input_ids, rows.positions, rows.locations, *columns)]
        addresses += [0 if tensor is None else tensor.data_ptr() for tensor in (known, unwritten)]
        self._call("resolve_tokens", *addresses, len(rows.slots), num_extend, page_size, vocab_size, rows.page_table.shape[1])


def _is_ordered(weight: PackedLinear) -> bool:
    """Whether the weight is packed as [ceil(N / 64), K, 64]."""
    return weight.data.dim() == 3


def _in_blocks(values: Tensor, order: Tensor) -> Tensor:
    """Returns values [N, C] as [blocks, C, 64], in the order of the packed columns. Padding is 0."""
    padded = torch.cat((values, values.new_zeros(1, values.shape[1])))[order]
    return padded.view(-1, BLOCK, values.shape[1]).transpose(1, 2).contiguous()


def _packed_columns(rows: int, gated: bool) -> Tensor:
    """Returns the weight row of each packed column as int64[n].

    A padding column has the value `rows`, the index after the last row. A gated block has 32 gate columns and their 32 up
    columns.
    """
    if not gated:
        columns = torch.arange(-(-rows // BLOCK) * BLOCK)
        return columns.clamp(max=rows)
    half = rows // 2
    pairs = torch.arange(-(-half // 32) * 32).view(-1, 1, 32)
    both = torch.cat((pairs, pairs + half), dim=1)
    return torch.where(pairs < half, both, rows).flatten()


def _padded(bias: Tensor, columns: Tensor) -> Tensor:
    """Returns biases [..., N] in the order of packed columns, with 0 for padding."""
    return torch.nn.functional.pad(bias, (0, 1))[..., columns]


def _is_bfloat16(tensor: Tensor) -> bool:
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"the C++ kernels take float32 and bfloat16, not {tensor.dtype}")
    return tensor.dtype == torch.bfloat16
