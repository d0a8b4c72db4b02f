"""Shows on a model just loaded that paged attention in its layers computes what its own attention computes.

Two prompts, one of them in two chunks with the other one beside the second, then a decoded token: a state between steps, a
mix-up of rows, or an attention that is not what it seems changes the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.contracts.ops import Kernels, RaggedRows
from services.worker.exec.contracts.causal_model import CausalModel
from services.worker.exec.pools.kv_pool import LayerKV, allocate
from services.worker.exec.weights.families import UnsupportedModel

PAGE_SIZE = 4
LONG, CUT, SHORT = 24, 11, 8  # tokens: of one prompt, of its first chunk, of the other prompt
TABLE = torch.tensor([[7, 2, 9, 0, 5, 1], [4, 8, 0, 0, 0, 0]], dtype=torch.int32)
NUM_PAGES = 10
STEPS = (  # slots (which is the number of the prompt), starts and ends of their rows
    ((0,), (0,), (CUT,)),
    ((0, 1), (CUT, 0), (LONG - 1, SHORT - 1)),
    ((0, 1), (LONG - 1, SHORT - 1), (LONG, SHORT)),
)
TOLERANCE = 1e-3
HALF_TOLERANCE = 0.05  # half precision rounds differently in another order of sums


@dataclass(frozen=True, slots=True)
class Subject:
    """What the check must know of the model. layers: by the index of their pools."""

    layers: Sequence[LayerKV]
    dtype: torch.dtype
    kernels: Kernels
    has_head: bool


def prompts(vocab_size: int, context_len: int) -> tuple[Tensor, Tensor]:
    """Token ids int64[LONG] and int64[SHORT]. Raises UnsupportedModel if they do not fit the context."""
    if context_len < LONG:
        raise UnsupportedModel(f"a context of {context_len} tokens is too short to check the model with")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab_size, (LONG + SHORT,), generator=generator)
    return ids[:LONG], ids[LONG:]


def outputs(model: Any, ids: Tensor, has_head: bool) -> Tensor:
    """The model's own, [tokens, vocabulary or hidden size], float32."""
    output = model(input_ids=ids[None], use_cache=False)
    wide: Tensor = (output.logits if has_head else output.last_hidden_state)[0].float()
    return wide


def _rows(slots: tuple[int, ...], starts: tuple[int, ...], ends: tuple[int, ...]) -> RaggedRows:
    assert len(slots) == len(starts) == len(ends), "columns of the same rows"
    assert max(ends) <= TABLE.shape[1] * PAGE_SIZE, "a row has pages for its tokens"
    pieces = [torch.arange(start, end, dtype=torch.int32) for start, end in zip(starts, ends, strict=True)]
    pages = [TABLE[slot][piece // PAGE_SIZE].long() for slot, piece in zip(slots, pieces, strict=True)]
    positions = torch.cat(pieces)
    assert all(start < end for start, end in zip(starts, ends, strict=True)), "no row is empty"
    counts = torch.tensor([len(piece) for piece in pieces], dtype=torch.int32)
    return RaggedRows(
        page_table=TABLE,
        slots=torch.tensor(slots, dtype=torch.int32),
        starts=torch.tensor(starts, dtype=torch.int32),
        num_tokens=counts,
        offsets=(counts.cumsum(0) - counts).to(torch.int32),
        positions=positions,
        locations=torch.cat(pages) * PAGE_SIZE + positions % PAGE_SIZE,
        max_context=max(ends),
    )


def check(model: CausalModel, subject: Subject, expected: tuple[Tensor, Tensor], ids: tuple[Tensor, Tensor]) -> None:
    """ids: prompts(); expected: outputs() for both. Raises UnsupportedModel if the paged model's differ."""
    pool = allocate(subject.layers, NUM_PAGES, PAGE_SIZE, subject.dtype, subject.kernels)
    ours = [torch.empty_like(own) for own in expected]
    for slots, starts, ends in STEPS:
        spans = list(zip(slots, starts, ends, strict=True))
        input_ids = torch.cat([ids[slot][start:end] for slot, start, end in spans])
        assert len(input_ids) == sum(end - start for _, start, end in spans), "a token for every position"
        model.forward(input_ids, _rows(slots, starts, ends), pool)
        wanted = torch.arange(len(input_ids))
        computed = (model.logits(wanted) if subject.has_head else model.states(wanted)).float()
        for (slot, start, end), piece in zip(spans, torch.split(computed, [end - start for _, start, end in spans]), strict=True):
            ours[slot][start:end] = piece
    _compare(ours[0], expected[0], subject.dtype)
    _compare(ours[0][CUT:], expected[0][CUT:], subject.dtype)
    _compare(ours[1], expected[1], subject.dtype)


def _compare(ours: Tensor, own: Tensor, dtype: torch.dtype) -> None:
    """Relative to the size of each token's own output. In half precision most tokens must agree, in float32 each: rounding
    may make a router send a token to another expert."""
    errors = (ours - own).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-6)
    error, tolerance = (errors.max(), TOLERANCE) if dtype == torch.float32 else (errors.median(), HALF_TOLERANCE)
    if not error <= tolerance:
        raise UnsupportedModel(f"paged attention gives other numbers than the model's own attention (off by {error:.2g} of 1)")
