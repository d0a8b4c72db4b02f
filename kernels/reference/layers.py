"""Implements every kernel in plain torch.

These functions are the reference for tests of the C++ and Triton kernels. A worker on a CPU uses them if the C++ library can be
neither found nor built, or if the model dtype is float16.
For shapes see rootstock_llm.kernels.contracts.ops and rootstock_llm.kernels.contracts.step_ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import CodedWeight, Matrix
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
)
from rootstock_llm.kernels.contracts.step_ops import DevicePageTableUpdates
from rootstock_llm.kernels.reference.coded import (
    PARTLY_CODED,
    CodedExperts,
    coded_embedding,
    coded_linear,
    coded_matrix,
    elements,
    expert_of,
    pack_coded,
    plain_matrix,
)
from rootstock_llm.kernels.reference.sampling import edit_logits as edit_logits
from rootstock_llm.kernels.reference.sampling import measure_logprobs as measure_logprobs
from rootstock_llm.kernels.reference.sampling import select_tokens as select_tokens

MAX_SCORES = 1 << 24  # largest number of attention scores in memory at a time: 64 MiB of float32


def allocate_pool(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def pack_linear(weight: Matrix, bias: Tensor | None) -> PackedLinear:
    """Returns a weight [N, K] unpacked. Codes are packed by pack_coded()."""
    if isinstance(weight, CodedWeight):
        return pack_coded(weight, bias)
    return PackedLinear(weight.contiguous(), bias, weight.shape[1], weight.shape[0], False)


def linear(out: Tensor, x: Tensor, weight: PackedLinear) -> None:
    if weight.scheme is not None:
        coded_linear(out, x, weight)
    elif out.dtype == x.dtype and weight.bias is None:
        torch.mm(x, weight.data.t(), out=out)
    else:
        out.copy_(torch.nn.functional.linear(x, weight.data, weight.bias))


def embedding(out: Tensor, input_ids: Tensor, weight: PackedLinear) -> None:
    if weight.scheme is not None:
        coded_embedding(out, input_ids, weight)
    else:
        torch.index_select(weight.data, 0, input_ids, out=out)


def pack_gated(weight: Matrix, bias: Tensor | None) -> PackedLinear:
    return pack_linear(weight, bias)


def gated_linear(out: Tensor, x: Tensor, weight: PackedLinear) -> None:
    both = x.new_empty((len(x), weight.out_features))
    linear(both, x, weight)
    silu_and_mul(out, both)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMS norm of x [..., N] with weight float32[N], as float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    out.copy_(_normed(x, weight, eps))


def fused_add_rms_norm(out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual.add_(x)
    rms_norm(out, residual, weight, eps)


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def gelu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)


def sigmoid_mul(x: Tensor, gate: Tensor) -> None:
    x.copy_(x.float() * gate.float().sigmoid())


def route(weights: Tensor, ids: Tensor, logits: Tensor, bias: Tensor | None, routing: Routing) -> None:
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    selection = (scores if bias is None else scores + bias).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    order = selection.sort(dim=-1, descending=True, stable=True).indices
    if routing.top_groups < routing.num_groups:
        grouped = selection.view(len(selection), routing.num_groups, -1)
        best = 2 if routing.group_score == "two_best" else 1
        group_scores = grouped.topk(min(best, grouped.shape[2]), -1).values.sum(-1).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        groups = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
        outside = torch.ones_like(group_scores).scatter(1, groups, 0.0).repeat_interleave(grouped.shape[2], -1)
        order = order.gather(1, outside.gather(1, order).sort(dim=-1, stable=True).indices)  # experts of chosen groups first
    order = order[:, : routing.top_k]
    chosen = scores.gather(1, order)
    if routing.renormalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    weights.copy_(chosen * routing.scale)
    ids.copy_(order)


def pack_experts(
    gate_up: Matrices, gate_up_bias: Tensor | None, down: Matrices, down_bias: Tensor | None, activation: Activation
) -> PackedExperts:
    """Returns the matrices as two tensors, [E, 2 I, N] and [E, N, I]. Codes are packed by pack_coded()."""
    both, back = _in_one(gate_up, gate_up_bias), _in_one(down, down_bias)
    if (both.scheme is None) != (back.scheme is None):
        raise ValueError(PARTLY_CODED)
    return PackedExperts(both, back, activation)


def _in_one(matrices: Matrices, bias: Tensor | None) -> PackedLinear:
    """Returns the weights of all experts, [E, ...]."""
    if isinstance(matrices, Tensor):
        return PackedLinear(matrices.contiguous(), bias, matrices.shape[2], matrices.shape[1], False)
    first = matrices[0]
    rest = (matrices[index] for index in range(1, len(matrices)))
    if isinstance(first, Tensor):
        whole = torch.stack([first, *map(plain_matrix, rest)])
        return PackedLinear(whole, bias, whole.shape[2], whole.shape[1], False)
    packed = CodedExperts(len(matrices), lambda shape: torch.empty(shape, dtype=torch.uint8, device=first.device))
    packed.add(pack_coded(first, None))
    for matrix in rest:
        packed.add(pack_coded(coded_matrix(matrix), None))
    return packed.finished(bias)


def _joined(both: Tensor, activation: Activation) -> Tensor:
    """Returns the activation's result, [T, I], of gate and up, float32[T, 2 I]."""
    gate, up = both.chunk(2, dim=-1)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (up + activation.shift) * gate * (activation.alpha * gate).sigmoid()


def experts(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, packed: PackedExperts) -> None:
    """Implements Kernels.experts() expert by expert. Reads the ids on the host."""
    parts = x.new_empty((*ids.shape, packed.down.out_features), dtype=torch.float32)
    for expert in ids.unique().tolist():
        rows, choices = (ids == expert).nonzero(as_tuple=True)
        both = _of_expert(x[rows], packed.gate_up, expert)
        hidden = _joined(both, packed.activation).to(x.dtype)
        parts[rows, choices] = _of_expert(hidden, packed.down, expert)
    total = torch.zeros_like(parts[:, 0])
    for choice in range(ids.shape[1]):
        total += parts[:, choice] * weights[:, choice, None]
    out.copy_(total)


def _of_expert(x: Tensor, weight: PackedLinear, expert: int) -> Tensor:
    """Returns the projection of x [T, K] by one expert, float32[T, N]."""
    bias = None if weight.bias is None else weight.bias[expert].float()
    matrix = weight.data[expert].float() if weight.scheme is None else elements(expert_of(weight, expert), 0, weight.out_features)
    return torch.nn.functional.linear(x.float(), matrix, bias)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x, float32[T, heads, D], rotated by cos and sin, float32[T, 1, D / 2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def rope_write_kv(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos_sin: Tensor,
    rows: RaggedRows,
    k_pool: Tensor,
    v_pool: Tensor,
) -> None:
    _, kv_heads, _, head_dim = k_pool.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * kv_heads
    q, k, v = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
    q_wide, k_wide = (_normed(q, norms[0], eps), _normed(k, norms[1], eps)) if norms else (q.float(), k.float())
    cos, sin = cos_sin[rows.positions.long()].unsqueeze(1).chunk(2, dim=-1)
    keys = _rotated(k_wide, cos, sin).to(k_pool.dtype)
    q.copy_(_rotated(q_wide, cos, sin))
    write_kv(keys, v, rows, k_pool, v_pool)


def gated_delta_rule(
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
    columns = (rows.offsets, rows.num_tokens, states.before, states.after, states.cuts, states.at_cut)
    for offset, count, before, after, cut, at_cut in torch.stack([column.long() for column in columns]).t().tolist():
        conv, state = conv_pool.new_zeros(conv_pool.shape[1:]), state_pool.new_zeros(state_pool.shape[1:])
        if before >= 0:
            conv, state = conv_pool[before].clone(), state_pool[before].clone()
        stops = sorted({count} | ({cut} if at_cut >= 0 and 0 < cut < count else set()))
        first = 0
        for stop in stops:
            part = slice(offset + first, offset + stop)
            if stop > first:
                conv, state = _delta_run(out[part], qkv[part], gates[part], weight, decay, conv, state)
            for unit, end in ((at_cut, cut), (after, count)):
                if unit >= 0 and end == stop:
                    conv_pool[unit], state_pool[unit] = conv, state
            first = stop


def _delta_run(
    out: Tensor, qkv: Tensor, gates: Tensor, weight: Tensor, decay: DeltaGates, conv: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes consecutive tokens of one sequence. Returns the last inputs of the convolution and the state after the last token.

    Args:
        conv: [K - 1, C], inputs before the first token.
        state: float32[J, D, E], state before the first token.
    """
    heads, key_dim, value_dim = state.shape
    inputs = torch.cat((conv, qkv))
    taps = weight.shape[1]
    windows = inputs.float().unfold(0, taps, 1)  # [tokens, C, K]
    qkv.copy_(torch.nn.functional.silu((windows * weight.float()).sum(-1)))
    split = (qkv.shape[1] - heads * value_dim) // 2
    query, key, value = qkv.float().split((split, split, heads * value_dim), dim=1)
    query, key = (_unit_length(each.view(len(qkv), -1, key_dim), heads) for each in (query, key))
    value, query = value.view(len(qkv), heads, value_dim), query * key_dim**-0.5
    rate, gate = gates.float().split(heads, dim=1)
    decays = (-decay.rates * torch.nn.functional.softplus(gate + decay.biases)).exp()
    for t in range(len(qkv)):
        state = state * decays[t, :, None, None]
        delta = (value[t] - torch.einsum("hde,hd->he", state, key[t])) * rate[t].sigmoid()[:, None]
        state = state + key[t, :, :, None] * delta[:, None, :]
        out[t] = torch.einsum("hde,hd->he", state, query[t]).flatten()
    return inputs[len(inputs) - taps + 1 :], state


def _unit_length(x: Tensor, heads: int) -> Tensor:
    """Returns x, float32[T, I, D], scaled to length 1, with each key head repeated for its value heads."""
    scaled = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)
    return scaled.repeat_interleave(heads // x.shape[1], dim=1)


def gated_rms_norm(out: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> None:
    out.copy_(_normed(x, weight, eps) * torch.nn.functional.silu(gate.float()))


def write_kv(keys: Tensor, values: Tensor, rows: RaggedRows, k_pool: Tensor, v_pool: Tensor) -> None:
    """Implements Kernels.write_kv() on any device."""
    page_size = k_pool.shape[2]
    valid = rows.locations >= 0
    pages, offsets = rows.locations[valid] // page_size, rows.locations[valid] % page_size
    k_pool[pages, :, offsets] = keys[valid]
    v_pool[pages, :, offsets] = values[valid]


def _sequence(pool: Tensor, pages: Tensor, length: int) -> Tensor:
    """Returns the first `length` keys or values on consecutive pages of one sequence as float32[G, length, D].

    Args:
        pool: [P, G, S, D].
        pages: int64[pages], page ids.
        length: number of positions.
    """
    picked = pool[pages].transpose(0, 1)
    return picked.reshape(picked.shape[0], -1, picked.shape[3])[:, :length].float()


def _weights(scores: Tensor, hidden: Tensor, rule: ScoreRule) -> Tensor:
    """Returns the softmax weights, float32[t, G, H / G, s].

    Args:
        scores: float32[t, G, H / G, s].
        hidden: bool[t, s], whether the token does not attend to the position.
        rule: the cap of the scores, and the sinks, whose softmax weights are dropped.
    """
    capped = rule.softcap * torch.tanh(scores / rule.softcap) if rule.softcap else scores
    masked = capped.masked_fill(hidden[:, None, None, :], -torch.inf)
    if rule.sinks is None:
        return masked.softmax(-1)
    sinks = rule.sinks.view(1, *masked.shape[1:3], 1).expand(*masked.shape[:3], 1)
    return torch.cat((masked, sinks), dim=-1).softmax(-1)[..., :-1]


def paged_attention(out: Tensor, q: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, rule: ScoreRule) -> None:
    """Implements Kernels.paged_attention() on any device, row by row. Reads the rows' lengths on the host."""
    _, kv_heads, page_size, head_dim = k_pool.shape
    num_heads = out.shape[1] // v_pool.shape[3]
    queries = q[:, : num_heads * head_dim].unflatten(1, (kv_heads, -1, head_dim))
    for row in range(len(rows.slots)):
        start, count, offset = int(rows.starts[row]), int(rows.num_tokens[row]), int(rows.offsets[row])
        seen = max(start - rule.window + 1, 0) if rule.window else 0  # first position to which a token of the row attends
        base, end = seen // page_size * page_size, start + count
        pages = rows.page_table[int(rows.slots[row]), base // page_size : -(-end // page_size)].clamp(min=0).long()
        keys, values = _sequence(k_pool, pages, end - base), _sequence(v_pool, pages, end - base)
        for each in (keys, values):  # another request may have written NaN before the window, and 0 times NaN is NaN
            each[:, : seen - base] = 0.0
        for first, piece in _pieces(count, max(1, MAX_SCORES // max((end - base) * num_heads, 1))):
            part = slice(offset + first, offset + first + piece)
            positions = torch.arange(start + first, start + first + piece, device=q.device)
            distance = positions[:, None] - torch.arange(base, end, device=q.device)[None, :]
            hidden = (distance < 0) | (distance >= rule.window) if rule.window else distance < 0
            scores = torch.einsum("tghd,gsd->tghs", queries[part].float(), keys) * rule.scale
            mixed = torch.einsum("tghs,gse->tghe", _weights(scores, hidden, rule), values)
            out[part] = mixed.reshape(piece, -1).to(out.dtype)


def _pieces(count: int, size: int) -> list[tuple[int, int]]:
    """Splits range(count) into pieces of at most `size`, and returns (first, length) of each piece."""
    return [(first, min(size, count - first)) for first in range(0, count, size)]


def update_page_table(table: Tensor, updates: DevicePageTableUpdates) -> None:
    """Implements StepKernels.update_page_table() without reading a device value on the host.

    One assignment by index writes all entries. Instead of an entry that must be skipped, it writes the table's first entry, with
    the value that the first entry has after all updates.
    """
    width, steps = table.shape[1], min(table.shape[1], len(updates.pages))
    if not len(updates.slots) * steps:
        return
    ahead = torch.arange(steps, device=table.device)
    entries = updates.firsts.long()[:, None] + ahead
    valid = (ahead < updates.counts[:, None]) & (updates.slots[:, None] >= 0) & (entries >= 0) & (entries < width)
    pages = updates.pages[(updates.offsets.long()[:, None] + ahead).clamp(0, len(updates.pages) - 1)]
    cells = torch.where(valid, updates.slots.long()[:, None] * width + entries, 0)
    sets_first = (valid & (cells == 0)).flatten()
    first = torch.where(sets_first.any(), pages.flatten().index_select(0, sets_first.int().argmax().view(1)), table[0, 0])
    table.view(-1)[cells.flatten()] = torch.where(valid, pages, first).flatten()


def _scatter(out: Tensor, indices: Tensor, valid: Tensor, values: Tensor) -> None:
    """Sets out[indices] = values in place where `valid` is True. Does not read the number of valid indices on the host."""
    longer = torch.cat((out, out.new_zeros(1)))
    longer[torch.where(valid, indices, len(out)).flatten()] = values.to(out.dtype).flatten()
    out.copy_(longer[:-1])


def resolve_tokens(
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
    """Implements StepKernels.resolve_tokens() with tensors [R, max_tokens], without reading a device value on the host."""
    if not len(rows.slots) * max_tokens:
        return
    slots, width = rows.slots.long()[:, None], rows.page_table.shape[1]
    ahead = torch.arange(max_tokens, device=input_ids.device)
    exists, tokens = ahead < rows.num_tokens[:, None], rows.offsets.long()[:, None] + ahead
    positions = rows.starts.long()[:, None] + ahead
    logical = positions.div(page_size, rounding_mode="floor")
    pages = rows.page_table[slots.clamp(min=0), logical.clamp(0, width - 1)].long()
    reached = (slots >= 0) & (logical >= 0) & (logical < width) & (pages >= 0)
    relays = torch.arange(len(rows.slots), device=input_ids.device)[:, None] >= num_extend
    last_token = torch.where(slots >= 0, relay[slots.clamp(min=0)], 0)
    given_ids = given[tokens.clamp(0, len(given) - 1)].long() if len(given) else torch.zeros_like(tokens)
    if known is not None:
        known_ids = known[tokens.clamp(0, len(known) - 1)].long()
        relays, given_ids = relays & (known_ids < 0), torch.where(relays, known_ids, given_ids)
    ids = torch.where(relays, last_token, given_ids)
    if unwritten is not None:
        unwritten += (exists & relays & (ids < 0)).sum()
    _scatter(input_ids, tokens, exists, ids.clamp(0, vocab_size - 1))
    _scatter(rows.positions, tokens, exists, positions)
    _scatter(rows.locations, tokens, exists, torch.where(reached, pages * page_size + positions % page_size, -1))


def page_indices(out: Tensor, indptr: Tensor, rows: RaggedRows) -> None:
    """Implements StepKernels.page_indices() without reading a device value on the host."""
    if not len(out) or not len(rows.slots):
        return
    indices, width = torch.arange(len(out), device=out.device), rows.page_table.shape[1]
    owners = torch.searchsorted(indptr.long(), indices, right=True) - 1
    valid = (owners >= 0) & (owners < len(rows.slots))
    row = owners.clamp(0, len(rows.slots) - 1)
    entries, slots = indices - indptr[row], rows.slots.long()[row]
    pages = rows.page_table[slots.clamp(min=0), entries.clamp(0, width - 1)].clamp(min=0)
    known = (slots >= 0) & (entries < width)
    out.copy_(torch.where(valid, torch.where(known, pages, 0), out))
