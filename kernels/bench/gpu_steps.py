"""The kernels of a step's start, for rows of one token and for one long row. They are small: what counts is their latency."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.bench.gpu_case import GpuCase, Make, Work
from kernels.contracts.ops import RaggedRows
from kernels.contracts.step_ops import TableUpdates
from kernels.reference import layers as reference
from kernels.triton.layers.layers import TritonLayers

PAGE_SIZE, VOCAB = 16, 151936


def decode_rows(rows: int, context: int, page_size: int, device: torch.device) -> RaggedRows:
    """Rows of one token at position context - 1, on shuffled pages."""
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
    known = None if extends else torch.full((tokens,), -1, dtype=torch.int32, device=device)  # as decode graphs have it
    return lambda: which.resolve_tokens(ids, rows, given, relay, None, extends, PAGE_SIZE, VOCAB, longest, known)


def _resolve_case(tokens: int, context: int, long: bool) -> GpuCase:
    def work(device: torch.device, kernels: TritonLayers | None) -> Work:
        rows = _long_row(tokens, device) if long else decode_rows(tokens, context, PAGE_SIZE, device)
        return _resolve(rows, kernels, int(long), tokens if long else 1)

    name = f"resolve_tokens {f'1x{tokens}' if long else f'{tokens}x1'}"
    moved = tokens * (8 + 4 + 8) + (tokens * 4 + tokens // PAGE_SIZE * 4 if long else tokens * (16 + 4 + 4 + 8))
    return _both(lambda device: work(device, TritonLayers(device)), lambda device: work(device, None), name, moved)


def _updates(rows: int, device: torch.device) -> TableUpdates:
    column = torch.arange(rows, dtype=torch.int32, device=device)
    return TableUpdates(slots=column, firsts=column * 0, counts=column * 0 + 1, offsets=column, pages=column)


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
    """The largest count is one row's tokens, the others are rows."""
    found = [_resolve_case(tokens[-1], context, long=True)]
    for rows in tokens[:-1]:
        found += [_resolve_case(rows, context, long=False), _table_case(rows, context), _indices_case(rows, context)]
    return found
