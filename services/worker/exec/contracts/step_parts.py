"""What the model runner asks of a sampler and of graphs. Calls are of the thread that launches steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.contracts.sample_ops import Measured
from services.worker.core.contracts.plan import BatchPlan, PromptLogprobs, RowFault, SlotParams
from services.worker.exec.contracts.protocol import Masks
from services.worker.exec.contracts.step_data import (
    Batch,
    CudaGraph,
    Outcome,
    OutputLogprobs,
    Places,
    PromptPiece,
    SampleSpace,
    ScoredRows,
    ScorePiece,
)
from services.worker.exec.streams.readback import Readback
from services.worker.exec.streams.upload import UploadRing


class TakesNote(Protocol):
    def add(self, token: int) -> None:
        """Of a token that was sampled."""


@dataclass(slots=True)
class Launched:
    """What is on its way, and for whom. pasts: index of a row, and what takes note of its token."""

    batch: Batch
    readback: Readback
    wish: OutputLogprobs | None
    pasts: Sequence[tuple[int, TakesNote]]
    broken: frozenset[int]


class Sections(Protocol):
    def sections(self) -> list[tuple[str, NDArray[np.generic]]]:
        """Of an upload, by the field's name."""


class StepLogprobs(Protocol):
    def measure_prompts(
        self, plan: BatchPlan, input_ids: Tensor, logits: Callable[[Tensor], Tensor], readback: Readback, prefix: str
    ) -> list[PromptPiece]:
        """Of the plan's prompt_logprob_rows. input_ids: int64[T], of the step, on the device. logits: of tokens by their index.
        prefix: of the names in the readback."""

    def prompts(
        self, pieces: Sequence[PromptPiece], host: Mapping[str, Tensor]
    ) -> tuple[dict[int, PromptLogprobs], dict[int, RowFault]]:
        """By row of the plan; a row whose logits are not finite stands in both."""

    def of_prompts(self, plan: BatchPlan) -> ScoredRows | None:
        """Returns the rows whose last token ends a prompt that is scored; None if there are none."""

    def score_sections(self, scored: ScoredRows) -> list[tuple[str, NDArray[np.generic]]]:
        """Returns sections of an upload, which measure_scores() reads."""

    def measure_scores(
        self,
        scored: ScoredRows,
        views: Mapping[str, Tensor],
        logits: Callable[[Tensor], Tensor],
        readback: Readback,
        prefix: str,
    ) -> list[ScorePiece]:
        """Launches the measurement of the labels of the rows. logits: by index of a token. prefix: of names in the readback."""

    def scores(
        self, pieces: Sequence[ScorePiece], host: Mapping[str, Tensor]
    ) -> tuple[dict[int, NDArray[np.float32]], dict[int, RowFault]]:
        """Returns label log probabilities and faults by row of the plan; a row whose logits are not finite has a fault alone."""

    def measure(self, logits: Tensor, tokens: Tensor, rows: Tensor, num_top: int) -> Measured:
        """Of the given rows of float32[n, V], each with its token of tokens; num_top top ones at least."""


class StepSampler(Protocol):
    """max_slots: rows that are sampled at a time, at most."""

    max_slots: int

    @property
    def wishes(self) -> StepLogprobs: ...

    @property
    def num_words(self) -> int:
        """Of a mask."""

    @property
    def ring(self) -> UploadRing: ...

    def admission(self, admitted: Sequence[SlotParams]) -> Sections:
        """What admit() takes once it is on the device."""

    def admit(self, views: Mapping[str, Tensor]) -> None:
        """views: sections of an admission, on the device."""

    def follow(self, plan: BatchPlan) -> None:
        """Takes note of the tokens that the plan gives."""

    def fixed_space(self, slots: Tensor, positions: Tensor) -> SampleSpace:
        """One whose addresses stay."""

    def passing_space(self, slots: Tensor, positions: Tensor) -> SampleSpace:
        """One for a single step."""

    def run_kernels(self, logits: Tensor, space: SampleSpace) -> None:
        """On the current stream; can be captured. logits: float32[>= n, V]."""

    def launch(
        self, batch: Batch, masks: Masks, replay: Callable[[], None] | None = None, places: Places | None = None
    ) -> Launched:
        """masks: by row of the plan. replay: runs the captured kernels of a fixed space; None to launch them here. places: None
        for rows that do not wait for each other."""

    def outcome(self, launched: Launched) -> Outcome:
        """Waits for it."""


class StepGraphs(Protocol):
    def for_rows(self, num_rows: int) -> CudaGraph | None:
        """The smallest that holds so many, None if there is none."""

    def tell(self, graph: CudaGraph, known: Tensor | None) -> None:
        """On the forward stream, before the replay. known: int32[size]; None: all ids are relayed."""

    def release(self) -> None: ...
