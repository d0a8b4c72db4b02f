"""Times each CPU kernel and its torch twin: python -m rootstock_llm.kernels.bench [--threads N].

The shapes are those of a dense model with 0.6 billion parameters and of a small mixture of experts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import SWIGLU, Kernels, RaggedRows, Routing, ScoreRule
from rootstock_llm.kernels.cpu import load_kernels
from rootstock_llm.kernels.reference import layers as reference

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, VOCAB = 1024, 3072, 16, 8, 128, 16, 151936
Case = Callable[[Kernels], Callable[[], object]]


def best_of(work: Callable[[], object], seconds: float = 0.3) -> float:
    """Runs `work` for about `seconds`, and returns the duration of the fastest run in seconds."""
    work()
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until or best == float("inf"):
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
    return best


def linear_case(tokens: int, ins: int, outs: int, gated: bool = False) -> Case:
    x, weight = torch.randn(tokens, ins).bfloat16(), torch.randn(outs, ins).bfloat16()
    out = torch.empty(tokens, outs // 2 if gated else outs, dtype=torch.bfloat16)

    def prepare(kernels: Kernels) -> Callable[[], object]:
        packed = kernels.pack_gated(weight, None) if gated else kernels.pack_linear(weight, None)
        return (lambda: kernels.gated_linear(out, x, packed)) if gated else (lambda: kernels.linear(out, x, packed))

    return prepare


def rows_of(batch: int, start: int, count: int) -> RaggedRows:
    width = -(-(start + count) // PAGE_SIZE)
    positions = (torch.arange(count) + start).repeat(batch)
    table = torch.randperm(batch * width).view(batch, width).int()
    owners = torch.arange(batch).repeat_interleave(count)
    return RaggedRows(
        page_table=table,
        slots=torch.arange(batch, dtype=torch.int32),
        starts=torch.full((batch,), start, dtype=torch.int32),
        num_tokens=torch.full((batch,), count, dtype=torch.int32),
        offsets=torch.arange(batch, dtype=torch.int32) * count,
        positions=positions.int(),
        locations=table[owners, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE,
        max_context=start + count,
    )


def _pools(kernels: Kernels, rows: RaggedRows) -> tuple[Tensor, Tensor]:
    shape = (rows.page_table.numel(), KV_HEADS, PAGE_SIZE, HEAD_DIM)
    pools = kernels.allocate_pool(shape, torch.bfloat16), kernels.allocate_pool(shape, torch.bfloat16)
    for pool in pools:
        pool.normal_()
    return pools


def attention_case(batch: int, start: int, count: int, window: int = 0, with_sinks: bool = False) -> Case:
    rows, rule = rows_of(batch, start, count), ScoreRule(HEAD_DIM**-0.5, window, sinks=torch.randn(HEADS) if with_sinks else None)
    qkv = torch.randn(batch * count, (HEADS + 2 * KV_HEADS) * HEAD_DIM).bfloat16()
    out = torch.empty(batch * count, HEADS * HEAD_DIM, dtype=torch.bfloat16)

    def prepare(kernels: Kernels) -> Callable[[], object]:
        keys, values = _pools(kernels, rows)
        return lambda: kernels.paged_attention(out, qkv, keys, values, rows, rule)

    return prepare


def rope_case(batch: int, start: int, count: int) -> Case:
    rows = rows_of(batch, start, count)
    qkv = torch.randn(batch * count, (HEADS + 2 * KV_HEADS) * HEAD_DIM).bfloat16()
    norms = (torch.ones(HEAD_DIM), torch.ones(HEAD_DIM))
    cos_sin = torch.randn(start + count, HEAD_DIM)

    def prepare(kernels: Kernels) -> Callable[[], object]:
        keys, values = _pools(kernels, rows)
        return lambda: kernels.rope_write_kv(qkv, norms, 1e-6, cos_sin, rows, keys, values)

    return prepare


EXPERTS, CHOSEN, EXPERT_INNER = 32, 4, 768


def experts_case(tokens: int) -> Case:
    """Creates a case in which random experts compute each token. In the fastest run, the weights may be in the CPU's caches."""
    x = torch.randn(tokens, HIDDEN).bfloat16()
    gate_up = (torch.randn(EXPERTS, 2 * EXPERT_INNER, HIDDEN) * 0.02).bfloat16()
    down = (torch.randn(EXPERTS, HIDDEN, EXPERT_INNER) * 0.02).bfloat16()
    ids = torch.rand(tokens, EXPERTS).topk(CHOSEN).indices.int()
    weights, out = torch.rand(tokens, CHOSEN), torch.empty_like(x)

    def prepare(kernels: Kernels) -> Callable[[], object]:
        packed = kernels.pack_experts(gate_up, None, down, None, SWIGLU)
        return lambda: kernels.experts(out, x, ids, weights, packed)

    return prepare


def route_case(tokens: int) -> Case:
    logits, weights = torch.randn(tokens, EXPERTS), torch.empty(tokens, CHOSEN)
    ids, routing = torch.empty(tokens, CHOSEN, dtype=torch.int32), Routing(CHOSEN, renormalize=True)
    return lambda kernels: lambda: kernels.route(weights, ids, logits, None, routing)


def norm_case(tokens: int) -> Case:
    x, residual = (torch.randn(tokens, HIDDEN).bfloat16() for _ in range(2))
    weight = torch.randn(HIDDEN)
    out = torch.empty_like(x)
    return lambda kernels: lambda: kernels.fused_add_rms_norm(out, x, residual, weight, 1e-6)


def silu_case(tokens: int) -> Case:
    x, out = torch.randn(tokens, 2 * INNER).bfloat16(), torch.empty(tokens, INNER, dtype=torch.bfloat16)
    return lambda kernels: lambda: kernels.silu_and_mul(out, x)


def cases() -> dict[str, Callable[[], Case]]:
    """Returns a function per case that creates the case.

    main() creates a case only when it is timed, because the inputs of all cases do not fit into the memory of a small machine.
    """
    found: dict[str, Callable[[], Case]] = {}
    for tokens in (1, 8, 32, 256, 2048):
        shapes = {"qkv": (HIDDEN, 4096), "o": (2048, HIDDEN), "down": (INNER, HIDDEN)}
        for name, (ins, outs) in shapes.items():
            found[f"linear {name} {tokens}"] = partial(linear_case, tokens, ins, outs)
        found[f"gated_linear {tokens}"] = partial(linear_case, tokens, HIDDEN, 2 * INNER, gated=True)
        found[f"fused_add_rms_norm {tokens}"] = partial(norm_case, tokens)
        found[f"silu_and_mul {tokens}"] = partial(silu_case, tokens)
        found[f"experts {tokens}"] = partial(experts_case, tokens)
        found[f"route {tokens}"] = partial(route_case, tokens)
    for rows in (1, 8, 32):
        found[f"linear lm_head {rows}"] = partial(linear_case, rows, HIDDEN, VOCAB)
        found[f"rope_write_kv {rows}x1 at 300"] = partial(rope_case, rows, 299, 1)
        found[f"paged_attention {rows}x1 at 300"] = partial(attention_case, rows, 299, 1)
    found["rope_write_kv 8x256"] = lambda: rope_case(8, 0, 256)
    found["paged_attention 8x256"] = lambda: attention_case(8, 0, 256)
    found["paged_attention 1x2048"] = lambda: attention_case(1, 0, 2048)
    found["paged_attention 1x512 at 4096"] = lambda: attention_case(1, 4096 - 512, 512)
    for window in (0, 128):
        found[f"paged_attention 1x1 sinks {window}"] = partial(attention_case, 1, 4095, 1, window, with_sinks=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of each kernel.")
    parser.add_argument("--only", default="", help="Run only the cases whose names contain this text.")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = load_kernels(options.threads, torch.bfloat16)
    print(f"{'kernel':34} {'ours us':>10} {'torch us':>10} {'ratio':>7}")
    for name, make in cases().items():
        if options.only in name:
            case = make()
            ours, theirs = best_of(case(kernels)), best_of(case(reference))
            print(f"{name:34} {ours * 1e6:10.1f} {theirs * 1e6:10.1f} {theirs / ours:7.2f}", flush=True)


if __name__ == "__main__":
    main()
