"""What passes between the forward pass, its graphs and the sampler of one step: tensors and columns, and no behaviour."""

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
    """Where a batch of n rows is sampled: inputs (see SampleRows) and outputs: int32[2, n], tokens and faults."""

    rows: SampleRows
    out: Tensor

    @property
    def tokens(self) -> Tensor:
        return self.out[0]

    @property
    def faults(self) -> Tensor:
        return self.out[1]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows to sample. slots: int32[n] on the host, without padding; logits: float32[>= n, V]; rows: their place in the plan;
    space: with slots and positions on the device. fixed: the space is a graph's, whose addresses stay."""

    slots: I32
    rows: NDArray[np.int64]
    logits: Tensor
    space: SampleSpace
    fixed: bool

    def __post_init__(self) -> None:
        assert len(self.slots) == len(self.rows) <= len(self.space.rows.slots), "each row has a slot, and a place in the space"


@dataclass(frozen=True, slots=True)
class Places:
    """Rows of a batch that are tokens of their slots one after the other: all slots' first ones, then the second ones of those
    that have been guessed at, and so on. A row is sampled if the token before it is what was guessed, else it is NOT_SAMPLED.

    order: int64[n], the batch's rows in this order. sizes: how many there are at each place, none more than at the one before,
    whose first rows they follow. guesses: int32[n - sizes[0]], of the rows behind the first place, what has to come before."""

    order: I64
    sizes: tuple[int, ...]
    guesses: I32

    def __post_init__(self) -> None:
        assert sum(self.sizes) == len(self.order) == self.sizes[0] + len(self.guesses), "each row stands at a place"
        assert list(self.sizes) == sorted(self.sizes, reverse=True), "who has a token has one at each place before"

    @property
    def in_order(self) -> bool:
        """The batch's first rows stand as they should."""
        return bool((self.order == np.arange(len(self.order))).all())

    def guesses_behind(self, row: int) -> list[int]:
        """Of a row of the first place, in order."""
        firsts = np.cumsum(self.sizes[1:]) - np.array(self.sizes[1:], dtype=np.int64)
        return [int(self.guesses[first + row]) for first, size in zip(firsts, self.sizes[1:], strict=True) if row < size]


NOT_SAMPLED = -1  # among the codes of faults


@dataclass(frozen=True, slots=True)
class Outcome:
    """tokens: int32[n]. faults, logprobs: by index into the rows; a row that was NOT_SAMPLED has neither, and token 0."""

    tokens: I32
    faults: dict[int, RowFault]
    logprobs: dict[int, RowLogprobs]


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Of one row of the plan: how many top ones it wants, and which ids beside. name: of its tensors in the readback."""

    row: int
    num_top: int
    ids: I64
    name: str = ""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows that end with their prompt and want log probabilities of labels behind it."""

    rows: I64  # int64[n], rows of the plan
    indices: I64  # int64[n], of each row's last token within the pass
    labels: tuple[I64, ...]  # token ids of each row, 1 or more


@dataclass(frozen=True, slots=True)
class ScorePiece:
    """Some scored rows, whose values are in the readback under one name."""

    name: str  # of the tensors in the readback
    rows: tuple[int, ...]  # rows of the plan
    sizes: tuple[int, ...]  # labels of each row


@dataclass(frozen=True, slots=True)
class OutputLogprobs:
    """rows: indices into the sampled rows that want logprobs of their tokens. nums, ids: what each of them wants; kept here
    because a slot may have another holder when the step's result comes."""

    rows: I32
    nums: tuple[int, ...]
    ids: tuple[I64, ...]


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """words: where the step's columns are copied to; known: int32[size], the ids that the plan gives, -1 for relayed ones; ids,
    rows, space and logits: what the captured kernels read and write, space and logits for the first rows alone where more
    than there are slots are computed. A graph keeps addresses and no tensors: all that was made before its capture has to be
    here, or its memory goes to others."""

    size: int
    words: Tensor
    known: Tensor
    ids: Tensor
    rows: RaggedRows
    space: SampleSpace
    logits: Tensor
    forward: Graph
    sample: Graph
