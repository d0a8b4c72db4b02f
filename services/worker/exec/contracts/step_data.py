"""Tensors and columns that forward pass, CUDA graphs and sampler of a step exchange. Contains no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.contracts.ops import RaggedRows
from kernels.contracts.sample_ops import SampleRows
from services.worker.core.contracts.plan import I32, RowFault, RowLogprobs
from services.worker.exec.streams.cuda_streams import Graph

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleSpace:
    """The device memory in which a batch of n rows is sampled."""

    rows: SampleRows  # inputs
    out: Tensor  # int32[2, n]: sampled tokens and codes of faults

    @property
    def tokens(self) -> Tensor:
        return self.out[0]

    @property
    def faults(self) -> Tensor:
        return self.out[1]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows to sample."""

    slots: I32  # int32[n] on the host, without padding
    rows: NDArray[np.int64]  # int64[n], rows of the plan
    logits: Tensor  # float32[>= n, V]
    space: SampleSpace  # inputs and outputs; slots and positions are on the device already
    fixed: bool  # the space belongs to a CUDA graph, whose addresses must stay

    def __post_init__(self) -> None:
        assert len(self.slots) == len(self.rows) <= len(self.space.rows.slots), "each row has a slot, and a place in the space"


@dataclass(frozen=True, slots=True)
class Places:
    """The order in which rows of a batch with draft tokens are sampled.

    Each row of the batch is one token of its slot's run: the next token, then one token after each draft token. Rows are ordered
    by their index in the run: first the rows at index 0 of all slots, then the rows at index 1 of the slots with a draft token,
    and so on. A row is sampled if the row before it in the run has sampled the draft token; otherwise its code is NOT_SAMPLED.
    """

    order: I64  # int64[n], rows of the batch in this order
    sizes: tuple[int, ...]  # rows at each index, never rising; the rows at index i + 1 continue the first rows at index i
    guesses: I32  # int32[n - sizes[0]]: for each row after index 0, the draft token that the row before it must sample

    def __post_init__(self) -> None:
        assert sum(self.sizes) == len(self.order) == self.sizes[0] + len(self.guesses), "each row stands at a place"
        assert list(self.sizes) == sorted(self.sizes, reverse=True), "who has a token has one at each place before"

    @property
    def in_order(self) -> bool:
        """Whether the order is that of the batch's first rows."""
        return bool((self.order == np.arange(len(self.order))).all())

    def guesses_behind(self, row: int) -> list[int]:
        """Returns the draft tokens of a row at index 0, in order."""
        firsts = np.cumsum(self.sizes[1:]) - np.array(self.sizes[1:], dtype=np.int64)
        return [int(self.guesses[first + row]) for first, size in zip(firsts, self.sizes[1:], strict=True) if row < size]


NOT_SAMPLED = -1  # code in SampleSpace.faults of a row that was not sampled


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of sampling n rows."""

    tokens: I32  # int32[n]; 0 for a row that was not sampled
    faults: dict[int, RowFault]  # by index into the rows, none for a row that was not sampled
    logprobs: dict[int, RowLogprobs]  # by index into the rows, none for a row that was not sampled


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A part of the prompt log probabilities of one row."""

    row: int  # row of the plan
    num_top: int  # number of most likely tokens that the request wants
    ids: I64  # int64[m], further token ids that the request wants
    name: str = ""  # prefix of the piece's tensors in the readback


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows that end with their prompt and want log probabilities of labels after it."""

    rows: I64  # int64[n], rows of the plan
    indices: I64  # int64[n], of each row's last token within the pass
    labels: tuple[I64, ...]  # token ids of each row, 1 or more


@dataclass(frozen=True, slots=True)
class ScorePiece:
    """Scored rows whose values are in the readback under one name."""

    name: str  # prefix of the tensors in the readback
    rows: tuple[int, ...]  # rows of the plan
    sizes: tuple[int, ...]  # labels of each row


@dataclass(frozen=True, slots=True)
class OutputLogprobs:
    """The log probabilities that sampled rows want.

    They are copied, because the slot may change its request before the result comes.
    """

    rows: I32  # indices into the sampled rows
    nums: tuple[int, ...]  # number of most likely tokens, per entry of `rows`
    ids: tuple[I64, ...]  # further token ids, per entry of `rows`


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """A captured decode step.

    A captured kernel keeps addresses and no references. So the graph holds all tensors that existed before its capture, or their
    memory would be reused.
    """

    size: int  # rows, padding included
    words: Tensor  # copy target of the step's columns
    known: Tensor  # int32[size], token ids that the plan gives; -1 for a token from the relay
    ids: Tensor  # input token ids
    rows: RaggedRows  # inputs of the forward kernels
    # memory of the sampling kernels; covers only the first rows if the graph has more rows than there are slots
    space: SampleSpace
    logits: Tensor  # output of the forward kernels, for the rows of `space`
    forward: Graph
    sample: Graph
