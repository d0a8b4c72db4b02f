"""Creates the cases of a model's layers and of the start of a step, at the shapes of two dense models.

The kernels of a step's start are timed for rows of one token, and resolve_tokens() also for one long row. These kernels are so
short that their launch latency matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rootstock_llm.kernels.bench.gpu_timing import GpuCase, Make, Work
from rootstock_llm.kernels.contracts.ops import DeltaGates, RaggedRows, StateRows
from rootstock_llm.kernels.contracts.step_ops import DevicePageTableUpdates
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.kernels.triton.layers.layers import TritonLayers

DTYPE, SIZE = torch.bfloat16, 2
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DecoderShape:
    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    page_size: int = 16

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


SHAPES = (
    DecoderShape("0.6B", 1024, 3072, 16, 8, 128, 151936),
    DecoderShape("8B", 4096, 12288, 32, 8, 128, 151936),
)
TOKENS = (1, 64, 256, 8192)
MOST_DECODES = 256  # largest number of tokens that the case of a recurrent layer computes as a decode step
TAPS = 4  # width of the convolution in a recurrent layer


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=DTYPE)


def _norm_case(shape: DecoderShape, tokens: int) -> GpuCase:
    def inputs(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, residual = _random(device, tokens, shape.hidden), _random(device, tokens, shape.hidden)
        return torch.empty_like(x), x, residual, torch.randn(shape.hidden, device=device)

    def make(device: torch.device) -> Work:
        kernels, given = TritonLayers(device), inputs(device)
        return lambda: kernels.fused_add_rms_norm(*given, EPS)

    def plain(device: torch.device) -> Work:
        out, x, residual, weight = inputs(device)
        return lambda: out.copy_(functional.rms_norm(residual.add_(x), (shape.hidden,), weight.to(DTYPE), EPS))

    moved = (4 * tokens + 2) * shape.hidden * SIZE  # the weight is float32
    return GpuCase(f"fused_add_rms_norm {shape.name} {tokens}", make, moved, plain=plain)


def _silu_case(shape: DecoderShape, tokens: int) -> GpuCase:
    def make(device: torch.device) -> Work:
        kernels, x = TritonLayers(device), _random(device, tokens, 2 * shape.inner)
        out = _random(device, tokens, shape.inner)
        return lambda: kernels.silu_and_mul(out, x)

    def plain(device: torch.device) -> Work:
        x, out = _random(device, tokens, 2 * shape.inner), _random(device, tokens, shape.inner)
        gate, up = x.chunk(2, dim=-1)
        return lambda: torch.mul(functional.silu(gate), up, out=out)

    return GpuCase(f"silu_and_mul {shape.name} {tokens}", make, 3 * tokens * shape.inner * SIZE, plain=plain)


def rope_case(shape: DecoderShape, tokens: int, context: int, deterministic: bool = False) -> GpuCase:
    def make_with(ours: bool) -> Make:
        def make(device: torch.device) -> Work:
            kernels = TritonLayers(device, deterministic) if ours else reference
            rows = decode_rows(tokens, context, shape.page_size, device)
            pool_shape = (rows.page_table.numel(), shape.kv_heads, shape.page_size, shape.head_dim)
            keys, values = (torch.empty(pool_shape, dtype=DTYPE, device=device) for _ in range(2))
            norms = torch.randn(shape.head_dim, device=device), torch.randn(shape.head_dim, device=device)
            qkv, cos_sin = _random(device, tokens, shape.qkv), torch.randn(context, shape.head_dim, device=device)
            return lambda: kernels.rope_write_kv(qkv, norms, EPS, cos_sin, rows, keys, values)

        return make

    moved = tokens * 2 * shape.qkv * SIZE
    name = f"{'deterministic ' if deterministic else ''}rope_write_kv {shape.name} {tokens}"
    return GpuCase(name, make_with(True), moved, plain=make_with(False), plain_captures=False)


def _write_case(shape: DecoderShape, tokens: int, context: int) -> GpuCase:
    def make_with(which: type[TritonLayers] | None) -> Make:
        def make(device: torch.device) -> Work:
            kernels = reference if which is None else which(device)
            rows = decode_rows(tokens, context, shape.page_size, device)
            pool_shape = (rows.page_table.numel(), shape.kv_heads, shape.page_size, shape.head_dim)
            pools = [torch.empty(pool_shape, dtype=DTYPE, device=device) for _ in range(2)]
            keys, values = (_random(device, shape.kv_heads, tokens, shape.head_dim).transpose(0, 1) for _ in range(2))
            return lambda: kernels.write_kv(keys, values, rows, pools[0], pools[1])

        return make

    moved = tokens * 4 * shape.kv_heads * shape.head_dim * SIZE
    name = f"write_kv {shape.name} {tokens}"
    return GpuCase(name, make_with(TritonLayers), moved, plain=make_with(None), plain_captures=False)


def _linear_case(shape: DecoderShape, layer: str, ins: int, outs: int, tokens: int) -> GpuCase:
    """Creates a case of a linear layer. The layer that computes logits has float32 output.

    There is no comparison with torch, because TritonLayers uses torch's kernel for more than one row.
    """
    wide = layer == "lm_head"

    def make(device: torch.device) -> Work:
        kernels, x = TritonLayers(device), _random(device, tokens, ins)
        weight = kernels.pack_linear(_random(device, outs, ins), None)
        out = torch.empty(tokens, outs, dtype=torch.float32 if wide else DTYPE, device=device)
        return lambda: kernels.linear(out, x, weight)

    moved = (outs * ins + tokens * ins) * SIZE + tokens * outs * (4 if wide else SIZE)
    return GpuCase(f"linear {layer} {shape.name} {tokens}", make, moved, flops=2 * tokens * ins * outs)


def _gated_case(shape: DecoderShape, tokens: int) -> GpuCase:
    """Creates a case of a gated linear layer. Its bytes_moved excludes gate and up, which a fused kernel keeps in registers."""

    def make_with(which: type[TritonLayers] | None) -> Make:
        def make(device: torch.device) -> Work:
            kernels = reference if which is None else which(device)
            x, out = _random(device, tokens, shape.hidden), _random(device, tokens, shape.inner)
            weight = kernels.pack_gated(_random(device, 2 * shape.inner, shape.hidden), None)
            return lambda: kernels.gated_linear(out, x, weight)

        return make

    moved = (2 * shape.inner * shape.hidden + tokens * (shape.hidden + shape.inner)) * SIZE
    flops = 4 * tokens * shape.hidden * shape.inner
    return GpuCase(f"gated_linear {shape.name} {tokens}", make_with(TritonLayers), moved, flops, plain=make_with(None))


def _delta_case(shape: DecoderShape, tokens: int, context: int) -> GpuCase:
    """Creates a case of Gated DeltaNet with the model's heads: a decode step, or one prompt of more than MOST_DECODES tokens."""
    heads, dim = shape.heads, shape.head_dim
    size, num_rows = 3 * heads * dim, 1 if tokens > MOST_DECODES else tokens

    def make(device: torch.device) -> Work:
        kernels = TritonLayers(device)
        rows = _long_row(tokens, device) if num_rows == 1 else decode_rows(tokens, context, shape.page_size, device)
        qkv, gates = _random(device, tokens, size), _random(device, tokens, 2 * heads)
        weight, out = _random(device, size, TAPS), _random(device, tokens, heads * dim)
        decay = DeltaGates(torch.rand(heads, device=device), torch.rand(heads, device=device))
        before = torch.arange(num_rows, dtype=torch.int32, device=device)
        states = StateRows(before, before + num_rows, before * 0, before * 0 - 1)
        conv = _random(device, 2 * num_rows, TAPS - 1, size)
        pool = torch.zeros(2 * num_rows, heads, dim, dim, device=device)
        return lambda: kernels.gated_delta_rule(out, qkv, gates, weight, decay, rows, states, conv, pool)

    moved = 2 * num_rows * heads * dim * dim * 4 + tokens * (2 * size + heads * dim) * SIZE
    return GpuCase(f"gated_delta_rule {shape.name} {tokens}", make, moved, flops=8 * tokens * heads * dim * dim)


def _gated_norm_case(shape: DecoderShape, tokens: int) -> GpuCase:
    def make(device: torch.device) -> Work:
        kernels, rows = TritonLayers(device), tokens * shape.heads
        out, x, gate = (_random(device, rows, shape.head_dim) for _ in range(3))
        weight = torch.rand(shape.head_dim, device=device)
        return lambda: kernels.gated_rms_norm(out, x, gate, weight, EPS)

    return GpuCase(f"gated_rms_norm {shape.name} {tokens}", make, 3 * tokens * shape.heads * shape.head_dim * SIZE)


def _sigmoid_case(shape: DecoderShape, tokens: int) -> GpuCase:
    def make(device: torch.device) -> Work:
        kernels, width = TritonLayers(device), shape.heads * shape.head_dim
        x, gate = _random(device, tokens, width), _random(device, tokens, width)
        return lambda: kernels.sigmoid_mul(x, gate)

    return GpuCase(f"sigmoid_mul {shape.name} {tokens}", make, 3 * tokens * shape.heads * shape.head_dim * SIZE)


def cases(shapes: tuple[DecoderShape, ...] = SHAPES, tokens: tuple[int, ...] = TOKENS, context: int = 1024) -> list[GpuCase]:
    found: list[GpuCase] = []
    for shape in shapes:
        attention = shape.heads * shape.head_dim
        layers = {"qkv": (shape.hidden, shape.qkv), "o": (attention, shape.hidden), "down": (shape.inner, shape.hidden)}
        for count in tokens:
            found += [_norm_case(shape, count), _silu_case(shape, count), _gated_case(shape, count)]
            found += [rope_case(shape, count, context), _write_case(shape, count, context)]
            found += [_delta_case(shape, count, context), _gated_norm_case(shape, count), _sigmoid_case(shape, count)]
            found += [_linear_case(shape, layer, ins, outs, count) for layer, (ins, outs) in layers.items()]
        for count in tokens[:-1]:
            found.append(_linear_case(shape, "lm_head", shape.hidden, shape.vocab, count))
    return [*found, *step_cases(tokens, context)]


PAGE_SIZE, VOCAB = 16, 151936


def decode_rows(rows: int, context: int, page_size: int, device: torch.device) -> RaggedRows:
    """Returns rows of one token at position context - 1, on shuffled pages."""
    width = -(-context // page_size)
    table = torch.randperm(rows * width, device=device).view(rows, width).int()
    last = table[:, -1].long()
    return RaggedRows(
        page_table=table,
        slots=torch.arange(rows, dtype=torch.int32, device=device),
        starts=torch.full((rows,), context - 1, dtype=torch.int32, device=device),
        num_tokens=torch.ones(rows, dtype=torch.int32, device=device),
        offsets=torch.arange(rows, dtype=torch.int32, device=device),
        positions=torch.full((rows,), context - 1, dtype=torch.int32, device=device),
        locations=last * page_size + (context - 1) % page_size,
        max_context=context,
    )


def _long_row(tokens: int, device: torch.device) -> RaggedRows:
    table = torch.randperm(-(-tokens // PAGE_SIZE), device=device).int()[None]
    column = torch.zeros(1, dtype=torch.int32, device=device)
    return RaggedRows(
        page_table=table,
        slots=column,
        starts=column,
        num_tokens=column + tokens,
        offsets=column,
        positions=torch.zeros(tokens, dtype=torch.int32, device=device),
        locations=torch.zeros(tokens, dtype=torch.int64, device=device),
        max_context=tokens,
    )


def _both(make: Make, plain: Make, name: str, moved: int) -> GpuCase:
    return GpuCase(name, make, moved, plain=plain)


def _resolve(rows: RaggedRows, kernels: TritonLayers | None, extends: int, longest: int) -> Work:
    tokens, device = len(rows.positions), rows.positions.device
    which = reference if kernels is None else kernels
    ids, given = torch.zeros(tokens, dtype=torch.int64, device=device), torch.zeros(tokens, dtype=torch.int32, device=device)
    relay = torch.zeros(len(rows.page_table), dtype=torch.int64, device=device)
    known = None if extends else torch.full((tokens,), -1, dtype=torch.int32, device=device)  # decode graphs pass a tensor
    return lambda: which.resolve_tokens(ids, rows, given, relay, None, extends, PAGE_SIZE, VOCAB, longest, known)


def _resolve_case(tokens: int, context: int, long: bool) -> GpuCase:
    def work(device: torch.device, kernels: TritonLayers | None) -> Work:
        rows = _long_row(tokens, device) if long else decode_rows(tokens, context, PAGE_SIZE, device)
        return _resolve(rows, kernels, int(long), tokens if long else 1)

    name = f"resolve_tokens {f'1x{tokens}' if long else f'{tokens}x1'}"
    moved = tokens * (8 + 4 + 8) + (tokens * 4 + tokens // PAGE_SIZE * 4 if long else tokens * (16 + 4 + 4 + 8))
    return _both(lambda device: work(device, TritonLayers(device)), lambda device: work(device, None), name, moved)


def _updates(rows: int, device: torch.device) -> DevicePageTableUpdates:
    column = torch.arange(rows, dtype=torch.int32, device=device)
    return DevicePageTableUpdates(slots=column, firsts=column * 0, counts=column * 0 + 1, offsets=column, pages=column)


def _table_case(rows: int, context: int) -> GpuCase:
    def work(device: torch.device, kernels: TritonLayers | None) -> Work:
        which = reference if kernels is None else kernels
        table = torch.zeros(rows, -(-context // PAGE_SIZE), dtype=torch.int32, device=device)
        updates = _updates(rows, device)
        return lambda: which.update_page_table(table, updates)

    name = f"update_page_table {rows}"
    return _both(lambda device: work(device, TritonLayers(device)), lambda device: work(device, None), name, rows * 6 * 4)


def _indices_case(rows: int, context: int) -> GpuCase:
    width = -(-context // PAGE_SIZE)

    def work(device: torch.device, kernels: TritonLayers | None) -> Work:
        which, held = reference if kernels is None else kernels, decode_rows(rows, context, PAGE_SIZE, device)
        indptr: Tensor = torch.arange(rows + 1, dtype=torch.int32, device=device) * width
        out = torch.zeros(rows * width, dtype=torch.int32, device=device)
        return lambda: which.page_indices(out, indptr, held)

    name, moved = f"page_indices {rows}x{width}", 2 * rows * width * 4
    return _both(lambda device: work(device, TritonLayers(device)), lambda device: work(device, None), name, moved)


def step_cases(tokens: tuple[int, ...], context: int) -> list[GpuCase]:
    """Creates the cases of a step's start.

    Args:
        tokens: the last number is the length of one long row; the others are numbers of rows with one token each.
        context: context length of the rows of one token.
    """
    found = [_resolve_case(tokens[-1], context, long=True)]
    for rows in tokens[:-1]:
        found += [_resolve_case(rows, context, long=False), _table_case(rows, context), _indices_case(rows, context)]
    return found
