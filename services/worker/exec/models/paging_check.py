"""Compares a loaded model with paged attention against the model with its own attention.

A trial has two prompts: one in two chunks with the other one beside the second chunk, then a decoded token of each. A state
between steps, a mix-up of rows, or an attention of another kind changes the numbers. The short trial runs all layers, up to the
logits. The long trial is longer than every block and compression rate of the config, and than windows up to LONGEST_WINDOW. It
runs the first layers of each kind alone, up to their states; all layers would take most of a large model's start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.contracts.ops import Kernels, RaggedRows
from services.worker.exec.contracts.causal_model import CausalModel
from services.worker.exec.pools.kv_pool import LayerKV, allocate
from services.worker.exec.weights.checkpoint import UnsupportedModel

PAGE_SIZE = 4
SHORTEST, CUT, SHORT = 24, 11, 8  # tokens: of the short trial's prompt, of its first chunk, of the other prompt
LONGER = 160  # minimum length of the long trial's prompt; some classes have a block of 128 that their config does not name
BEYOND = 24  # tokens behind the last boundary
LONGEST = 2048  # tokens; boundaries beyond it are not tried
LONGEST_WINDOW = 1024  # tokens; the check of a longer window reads its mask
TOLERANCE = 1e-3
HALF_TOLERANCE = 0.05  # rounding of half precision depends on the order of sums
AGREEING = 0.95  # share of a long prompt's tokens; a router may send a few to another expert
_SIZES = {"block", "chunk", "rate", "rates", "stride", "segment", "compress", "compression", "window"}
_NO_LENGTHS = {"type", "types", "pattern", "layers", "layer", "theta", "multiplier", "multiple", "dim", "adjust", "forward"}
_MASKED = {"sliding_window", "attention_chunk_size"}  # transformers describes them by masks
_STATE = {"mamba", "ssm", "conv"}  # words of layers that are refused by their type


@dataclass(frozen=True, slots=True)
class Subject:
    """The sizes of a model under check."""

    # by the index of their pools
    layers: Sequence[LayerKV]
    dtype: torch.dtype
    kernels: Kernels
    has_head: bool


@dataclass(frozen=True)
class Trial:
    """Two prompts, and the way in which their tokens are compared."""

    ids: tuple[Tensor, Tensor]  # int64
    cut: int  # tokens of the first prompt's first chunk
    boundaries: tuple[int, ...] = ()  # positions at which a layer's computation may change
    agreeing: float = 1.0  # share of the tokens whose numbers agree in float32

    @property
    def steps(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]:
        """Slots, starts and ends of the rows of each step. A slot is the index of a prompt."""
        long, short = map(len, self.ids)
        return (
            ((0,), (0,), (self.cut,)),
            ((0, 1), (self.cut, 0), (long - 1, short - 1)),
            ((0, 1), (long - 1, short - 1), (long, short)),
        )

    @cached_property
    def table(self) -> Tensor:
        """The pages of both prompts, int32[2, pages], shuffled."""
        width, narrow = (-(-len(ids) // PAGE_SIZE) for ids in self.ids)
        pages = torch.randperm(width + narrow, generator=torch.Generator().manual_seed(2)).to(torch.int32)
        table = torch.zeros(2, width, dtype=torch.int32)
        table[0], table[1, :narrow] = pages[:width], pages[width:]
        return table

    def pieces(self) -> Iterator[slice]:
        """Yields the parts of the first prompt that its cut and the boundaries make."""
        long = len(self.ids[0])
        edges = sorted({0, long, self.cut, *(each for each in self.boundaries if each < long)})
        yield from (slice(*pair) for pair in pairwise(edges))


def short_trial(vocab_size: int, context_len: int) -> Trial:
    """Returns the trial of all layers. Raises UnsupportedModel if the prompt exceeds the context."""
    if context_len < SHORTEST:
        raise UnsupportedModel(f"a context of {context_len} tokens is too short to check the model with")
    return Trial(_prompts(vocab_size, SHORTEST, 1), CUT)


def long_trial(config: Any, context_len: int) -> Trial:
    """Returns the trial whose prompt reaches beyond each boundary that the config names, or to the end of the context."""
    boundaries = tuple(sorted({size for _, size in named_sizes(config) if size <= LONGEST and size < context_len}))
    tokens = min(context_len, max((LONGER, *(size + BEYOND for size in boundaries))))
    return Trial(_prompts(int(config.vocab_size), tokens, 3), tokens // 2 - 1, boundaries, AGREEING)


def refuse_sizes(config: Any, context_len: int, name: str) -> None:
    """Refuses a block, a rate or a window within the context that is longer than any trial. Raises UnsupportedModel."""
    for key, size in named_sizes(config):
        if LONGEST < size < context_len:
            raise UnsupportedModel(
                f"{name} names {key} of {size} tokens; attention is checked with {LONGEST} tokens at most. Set context_len to"
                f" {size} or less."
            )


def named_sizes(config: Any) -> Iterator[tuple[str, int]]:
    """Yields blocks, compression rates and windows of a config, in tokens, by their keys.

    Windows above LONGEST_WINDOW are left out if transformers describes them by masks.
    """
    for key, value in _numbers(config.to_dict(), ""):
        if size_named(key) and value > 1 and not (key in _MASKED and value > LONGEST_WINDOW):
            yield key, value


def size_named(key: str) -> bool:
    """Whether the config's key is that of a length in tokens."""
    words = set(key.split("_"))
    return bool(words & _SIZES) and not words & (_NO_LENGTHS | _STATE)


def _numbers(values: Any, key: str) -> Iterator[tuple[str, int]]:
    """Yields the integers of a JSON value with their keys. A number in an object under a length's key has both keys."""
    if isinstance(values, dict):
        for own, value in values.items():
            yield from _numbers(value, f"{key}_{own}" if size_named(key) else str(own))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _numbers(value, key)
    elif isinstance(values, int) and not isinstance(values, bool):
        yield key, values


def _prompts(vocab_size: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """int64[tokens] and int64[SHORT]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (tokens + SHORT,), generator=generator)
    return ids[:tokens], ids[tokens:]


def outputs(model: Any, trial: Trial, has_head: bool) -> tuple[Tensor, Tensor]:
    """Computes both prompts with the model's own attention. Returns float32[tokens, vocabulary or hidden size] each."""

    def own(ids: Tensor) -> Tensor:
        output = model(input_ids=ids[None], use_cache=False)
        wide: Tensor = (output.logits if has_head else output.last_hidden_state)[0].float()
        return wide

    return own(trial.ids[0]), own(trial.ids[1])


def _rows(table: Tensor, slots: tuple[int, ...], starts: tuple[int, ...], ends: tuple[int, ...]) -> RaggedRows:
    assert len(slots) == len(starts) == len(ends), "columns of the same rows"
    assert max(ends) <= table.shape[1] * PAGE_SIZE, "a row has pages for its tokens"
    pieces = [torch.arange(start, end, dtype=torch.int32) for start, end in zip(starts, ends, strict=True)]
    pages = [table[slot][piece // PAGE_SIZE].long() for slot, piece in zip(slots, pieces, strict=True)]
    positions = torch.cat(pieces)
    assert all(start < end for start, end in zip(starts, ends, strict=True)), "no row is empty"
    counts = torch.tensor([len(piece) for piece in pieces], dtype=torch.int32)
    return RaggedRows(
        page_table=table,
        slots=torch.tensor(slots, dtype=torch.int32),
        starts=torch.tensor(starts, dtype=torch.int32),
        num_tokens=counts,
        offsets=(counts.cumsum(0) - counts).to(torch.int32),
        positions=positions,
        locations=torch.cat(pages) * PAGE_SIZE + positions % PAGE_SIZE,
        max_context=max(ends),
    )


def check(model: CausalModel, subject: Subject, expected: tuple[Tensor, Tensor], trial: Trial) -> None:
    """Computes the trial with paged attention. Raises UnsupportedModel if the results differ from `expected`, see outputs()."""
    pool = allocate(subject.layers, int(trial.table.max()) + 1, PAGE_SIZE, subject.dtype, subject.kernels)
    ours = [torch.empty_like(own) for own in expected]
    for slots, starts, ends in trial.steps:
        spans = list(zip(slots, starts, ends, strict=True))
        input_ids = torch.cat([trial.ids[slot][start:end] for slot, start, end in spans])
        assert len(input_ids) == sum(end - start for _, start, end in spans), "a token for every position"
        model.forward(input_ids, _rows(trial.table, slots, starts, ends), pool)
        wanted = torch.arange(len(input_ids))
        computed = (model.logits(wanted) if subject.has_head else model.states(wanted)).float()
        for (slot, start, end), piece in zip(spans, torch.split(computed, [end - start for _, start, end in spans]), strict=True):
            ours[slot][start:end] = piece
    for part in trial.pieces():
        _compare(ours[0][part], expected[0][part], subject.dtype, trial.agreeing)
    _compare(ours[1], expected[1], subject.dtype, trial.agreeing)


def _compare(ours: Tensor, own: Tensor, dtype: torch.dtype, agreeing: float) -> None:
    """Compares outputs, relative to the norm of each token's output. Raises UnsupportedModel.

    In half precision half of the tokens must agree, in float32 a share of `agreeing`, because rounding may make a router
    choose another expert.
    """
    errors = (ours - own).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-6)
    error, tolerance = (errors.quantile(agreeing), TOLERANCE) if dtype == torch.float32 else (errors.median(), HALF_TOLERANCE)
    if not error <= tolerance:
        raise UnsupportedModel(f"paged attention gives other numbers than the model's own attention (off by {error:.2g} of 1)")
