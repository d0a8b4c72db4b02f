"""Columns and tensors of a step that forward pass, attention, CUDA graphs and sampler exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows
from rootstock_llm.kernels.contracts.sample_ops import NO_SLOT, SampleRows
from rootstock_llm.services.worker.core.contracts.plan import I32, BatchPlan, RowFault, RowLogprobs
from rootstock_llm.services.worker.exec.contracts.draft_states import RecurrentColumns, Replays
from rootstock_llm.services.worker.exec.streams.copies import Readback
from rootstock_llm.services.worker.exec.streams.cuda_streams import Graph

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The columns of a forward pass: R rows, of which n sample a token. Padding rows are last.

    In a pass of a graph, R is the graph's size and the sample_* columns are padded to R.
    """

    num_extend: int  # number of extend rows, which come first
    slots: I32  # [R], NO_SLOT for padding
    starts: I32  # [R], position of the row's first token
    num_tokens: I32  # [R]
    offsets: I32  # [R], index of the row's first token in the pass
    rows: I64  # int64[n], rows of the plan that sample a token
    sample_slots: I32  # [n or R]
    sample_positions: I32  # [n or R], position of the sampled token
    sample_indices: I32  # [n or R], index in the pass of the token before the sampled token
    max_context: int  # tokens of KV that the longest row attends to; in a graph, the capacity of a slot
    max_tokens: int  # tokens of the longest row
    # int64[tokens of the plan]: for each token of the pass, its index in the plan; None if the orders are equal
    order: I64 | None = None
    states: I32 | None = None  # [4, R], the columns of StateRows; None without recurrent layers, or if `recurrent` is set
    recurrent: RecurrentColumns | None = None  # columns of recurrent layers if tokens are replayed or saved

    @classmethod
    def of(cls, plan: BatchPlan, samples: NDArray[np.bool_], capacity: int, replays: Replays | None = None) -> ForwardBatch:
        """Returns the columns of a plan that runs without a graph.

        Args:
            samples: bool[rows], the rows that sample a token.
            capacity: number of positions that the page table maps for a slot. A row whose request has ended may start beyond
                them; such a row is moved to lower positions.
            replays: tokens that recurrent layers replay or save; None if there are none.
        """
        counts = plan.num_tokens
        starts = np.minimum(plan.starts, capacity - counts)
        assert len(counts) == len(plan.slots) == len(plan.starts) == len(samples), "the columns have equal lengths"
        rows = np.flatnonzero(samples)
        ends = np.cumsum(counts)
        assert len(plan.input_ids) == (ends[plan.num_extend - 1] if plan.num_extend else 0), "ids are those of the extend rows"
        longest = int(counts.max())
        assert longest <= capacity, "a row fits the pages of its slot"
        return cls(
            num_extend=plan.num_extend,
            slots=plan.slots,
            starts=starts,
            num_tokens=counts,
            offsets=(ends - counts).astype(np.int32),
            rows=rows,
            sample_slots=plan.slots[rows],
            sample_positions=(plan.starts + counts)[rows],
            sample_indices=(ends - 1)[rows].astype(np.int32),
            max_context=int((starts + counts).max()),
            max_tokens=longest,
            states=_states_of(plan) if replays is None else None,
            recurrent=None if replays is None else RecurrentColumns.of(plan, replays),
        )

    @classmethod
    def of_decode(cls, plan: BatchPlan, capacity: int, size: int) -> ForwardBatch:
        """Returns the columns of a plan that has only decode rows, all of which sample, padded to `size` rows.

        A graph captures num_tokens, offsets, max_context and max_tokens, so these depend only on size and capacity.
        """
        count, order = plan.num_rows, np.arange(size, dtype=np.int32)
        assert count <= size and not plan.num_extend, "a graph has a row for each row of the plan, and all of them decode"
        slots = np.full(size, NO_SLOT, dtype=np.int32)
        starts, positions = np.zeros(size, dtype=np.int32), np.zeros(size, dtype=np.int32)
        slots[:count] = plan.slots
        starts[:count] = np.minimum(plan.starts, capacity - 1)
        positions[:count] = plan.starts + 1
        states = _states_of(plan)
        if states is not None:
            states = np.concatenate((states, np.full((4, size - count), -1, dtype=np.int32)), axis=1)
        return cls(
            num_extend=0,
            slots=slots,
            starts=starts,
            num_tokens=np.ones(size, dtype=np.int32),
            offsets=order,
            rows=np.arange(count),
            sample_slots=slots,
            sample_positions=positions,
            sample_indices=order,
            max_context=capacity,
            max_tokens=1,
            states=states,
        )

    @classmethod
    def of_known(cls, plan: BatchPlan, capacity: int, size: int, drafted: I32 | None = None) -> tuple[ForwardBatch, I32]:
        """Returns the columns of a plan in which every token becomes a decode row of a graph.

        Tokens after which a row samples come first, in row order. The other tokens follow, then padding up to `size`.

        Args:
            drafted: int32[tokens of the plan], ids of draft tokens, -1 for other tokens, or None for no draft tokens.

        Returns:
            The columns, and the token ids of the graph's rows, int32[size], -1 for a row that reads its token from the relay.
        """
        counts, order = plan.num_tokens, np.arange(size, dtype=np.int32)
        rows = np.repeat(np.arange(plan.num_rows), counts)
        count = len(rows)
        assert count <= size, "a graph has a row for every token"
        index = np.arange(count) - np.repeat(np.cumsum(counts) - counts, counts)
        sampled = (index == counts[rows] - 1) & plan.sample[rows]
        sampled_first = np.argsort(~sampled, kind="stable")
        num_sampled = int(sampled.sum())
        assert num_sampled == int(plan.sample.sum()), "each row that samples has one last token"
        slots, sample_slots = np.full((2, size), NO_SLOT, dtype=np.int32)
        starts, positions = np.zeros((2, size), dtype=np.int32)
        known = np.full(size, -1, dtype=np.int32)
        slots[:count] = plan.slots[rows][sampled_first]
        sample_slots[:num_sampled] = slots[:num_sampled]
        starts[:count] = np.minimum((plan.starts[rows] + index)[sampled_first], capacity - 1)
        positions[:num_sampled] = (plan.starts + counts)[plan.sample]
        given = np.full(count, -1, dtype=np.int32)
        if drafted is not None:
            given[:] = drafted
        given[: len(plan.input_ids)] = plan.input_ids
        known[:count] = given[sampled_first]
        columns = cls(
            num_extend=0,
            slots=slots,
            starts=starts,
            num_tokens=np.ones(size, dtype=np.int32),
            offsets=order,
            rows=np.flatnonzero(plan.sample),
            sample_slots=sample_slots,
            sample_positions=positions,
            sample_indices=order,
            max_context=capacity,
            max_tokens=1,
            order=sampled_first if plan.num_extend else None,
        )
        return columns, known

    @classmethod
    def idle(cls, capacity: int, size: int) -> ForwardBatch:
        """Returns columns of `size` padding rows, for captures and measurements."""
        nobody, zeros, ones = (np.full(size, value, dtype=np.int32) for value in (NO_SLOT, 0, 1))
        order = np.arange(size, dtype=np.int32)
        return cls(0, nobody, zeros, ones, order, np.arange(0), nobody, zeros, order, capacity, 1)

    @property
    def total(self) -> int:
        """Number of tokens of the pass, padding included."""
        return int(self.offsets[-1] + self.num_tokens[-1]) if len(self.offsets) else 0

    def words(self) -> I32:
        """Returns the columns of the rows and of the samples as one int32 array, which is uploaded to the device."""
        assert len(self.slots) == len(self.starts) == len(self.num_tokens) == len(self.offsets), "columns of equal lengths"
        assert len(self.sample_slots) == len(self.sample_positions) == len(self.sample_indices), "columns of equal lengths"
        parts = (self.slots, self.starts, self.num_tokens, self.offsets)
        return np.concatenate((*parts, self.sample_slots, self.sample_positions, self.sample_indices))

    def row_columns(self, words: Tensor) -> Sequence[Tensor]:
        """Returns slots, starts, num_tokens and offsets as views of the uploaded words(), int32[R] each."""
        return words[: 4 * len(self.slots)].view(4, -1).unbind(0)

    def sample_columns(self, words: Tensor) -> Sequence[Tensor]:
        """Returns sample_slots, sample_positions and sample_indices as views of the uploaded words(), int32[n or R] each."""
        return words[4 * len(self.slots) :].view(3, -1).unbind(0)


def _states_of(plan: BatchPlan) -> I32 | None:
    if not len(plan.state_before):
        return None
    return np.stack((plan.state_before, plan.state_after, plan.state_cuts, plan.state_at_cut))


NOT_SAMPLED = -1  # code in SampleBatch.faults of a row that was not sampled


class TokenRecorder(Protocol):
    """Records the sampled tokens of one request, for penalties."""

    def add(self, token: int) -> None:
        """Appends the next sampled token."""


@dataclass(frozen=True, slots=True)
class OutputLogprobs:
    """The log probabilities that the requests of the sampled rows ask for.

    The values are copied from the rows' slots, because a slot may have another request before the result arrives.
    """

    rows: I32  # indices into the sampled rows
    nums: tuple[int, ...]  # per entry of `rows`: number of most likely tokens that the request asks for
    ids: tuple[I64, ...]  # per entry of `rows`: token ids that the request asks for in addition


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Rows that are sampled together, and the device memory in which they are sampled.

    StepSampler.launch() returns a copy of the batch in which the fields from `readback` on are set.
    """

    slots: I32  # int32[n] on the host, without padding
    rows: I64  # int64[n], rows of the plan
    logits: Tensor  # float32[>= n, V]
    inputs: SampleRows  # inputs of the sampling kernels, at least n rows
    out: Tensor  # int32[2, rows of `inputs`]: sampled tokens and codes of faults
    fixed: bool = False  # inputs and out belong to a CUDA graph, so that their addresses must not change
    readback: Readback | None = None  # the copy of `out` and of log probabilities to the host; None before the launch
    requested: OutputLogprobs | None = None  # log probabilities that requests ask for, None if no request asks for any
    pasts: Sequence[tuple[int, TokenRecorder]] = ()  # (index of a row, recorder of the row's sampled token)
    broken: frozenset[int] = frozenset()  # slots whose sampling parameters could not be applied

    def __post_init__(self) -> None:
        assert len(self.slots) == len(self.rows) <= len(self.inputs.slots), "each row has a slot, and an input on the device"

    @classmethod
    def of(cls, logits: Tensor, inputs: SampleRows, slots: I32, rows: I64) -> SampleBatch:
        """Returns a batch of one step and allocates its output."""
        out = torch.zeros((2, len(inputs.slots)), dtype=torch.int32, device=inputs.slots.device)
        return cls(slots, rows, logits, inputs, out)

    @classmethod
    def idle(cls, logits: Tensor, inputs: SampleRows) -> SampleBatch:
        """Returns a batch without rows of a plan, for graphs and measurements. Its kernels run over all rows of `inputs`."""
        return cls.of(logits, inputs, np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))

    @property
    def tokens(self) -> Tensor:
        return self.out[0]

    @property
    def faults(self) -> Tensor:
        return self.out[1]


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order in which rows of a batch with draft tokens are sampled.

    A slot with k draft tokens has a run of k + 1 rows in the batch: row 0 samples the token at the position of the first draft
    token, row i the token after draft token i. The order has row 0 of all runs, then row 1 of the runs that have one, and so on.
    Row i + 1 is sampled only if row i has sampled draft token i + 1; otherwise the fault of row i + 1 is NOT_SAMPLED.
    """

    order: I64  # int64[n], rows of the batch in this order
    sizes: tuple[
        int, ...
    ]  # sizes[i] is the number of runs that have a row i, descending; the first sizes[i + 1] of them also have a row i + 1
    draft_tokens: I32  # int32[n - sizes[0]]: for each later row, the draft token that the row before it in its run must sample

    def __post_init__(self) -> None:
        assert sum(self.sizes) == len(self.order) == self.sizes[0] + len(self.draft_tokens), (
            "each row of the batch occurs once in the order"
        )
        assert list(self.sizes) == sorted(self.sizes, reverse=True), "a run with a row at an index has a row at each lower index"

    @property
    def in_order(self) -> bool:
        """Whether `order` is 0, 1, ..., so that no row has to be moved."""
        return bool((self.order == np.arange(len(self.order))).all())

    def draft_tokens_of(self, row: int) -> list[int]:
        """Returns the draft tokens of a run, in their order. `row` is the index of the run's row 0 in `order`."""
        firsts = np.cumsum(self.sizes[1:]) - np.array(self.sizes[1:], dtype=np.int64)
        return [int(self.draft_tokens[first + row]) for first, size in zip(firsts, self.sizes[1:], strict=True) if row < size]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of sampling n rows."""

    tokens: I32  # int32[n]; 0 for a row that was not sampled
    faults: dict[int, RowFault]  # by index into the rows, none for a row that was not sampled
    logprobs: dict[int, RowLogprobs]  # by index into the rows, none for a row that was not sampled


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A part of one row's prompt log probabilities that was measured separately to bound the memory for logits."""

    row: int  # row of the plan
    num_top: int  # number of most likely tokens that the request wants
    ids: I64  # int64[m], further token ids that the request wants
    name: str = ""  # prefix of the piece's tensors in the readback


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows whose requests end with their prompt and ask for log probabilities of labels after it."""

    rows: I64  # int64[n], rows of the plan
    indices: I64  # int64[n], index of each row's last token in the pass
    labels: tuple[I64, ...]  # token ids of each row, 1 or more


@dataclass(frozen=True, slots=True)
class ScorePiece:
    """Scored rows whose label log probabilities are in the readback under one name."""

    name: str  # prefix of the tensors in the readback
    rows: tuple[int, ...]  # rows of the plan
    sizes: tuple[int, ...]  # number of labels of each row


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """A captured decode step.

    A captured kernel has addresses and no references. This object therefore references all tensors that existed before the
    capture, so that their memory is not reused.
    """

    size: int  # rows, padding included
    words: Tensor  # int32, ForwardBatch.words() of the step that is replayed
    known: Tensor  # int32[size], token ids from the plan or a drafter; -1 for a token from the relay
    ids: Tensor  # int64[size], resolved input token ids
    rows: RaggedRows  # inputs of the forward kernels
    # Logits of the forward kernels, and memory of the sampling kernels. The batch has no rows of a plan. If the graph has more
    # rows than there are slots, the batch covers only the first rows of the graph.
    batch: SampleBatch
    forward: Graph
    sample: Graph
    states: Tensor | None = None  # int32[4, size], the columns of rows.states; None without recurrent layers
