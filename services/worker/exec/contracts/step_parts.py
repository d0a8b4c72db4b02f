"""Declares the sampler and the CUDA graphs of the model runner. All calls come from the thread that launches steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.kernels.contracts.sample_ops import Measured, SampleRows
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, PromptLogprobs, RowFault, SlotParams
from rootstock_llm.services.worker.exec.contracts.protocol import Masks
from rootstock_llm.services.worker.exec.contracts.step_data import (
    CudaGraph,
    Outcome,
    PromptPiece,
    SampleBatch,
    SampleOrder,
    ScoredRows,
    ScorePiece,
)
from rootstock_llm.services.worker.exec.streams.copies import Readback, UploadRing


class Sections(Protocol):
    """Sampling parameters of new slots, in the form of an upload."""

    def sections(self) -> list[tuple[str, NDArray[np.generic]]]:
        """Returns the sections of an upload as (name, values)."""


class StepLogprobs(Protocol):
    """Measures requested log probabilities on the device and copies them to the host."""

    def measure_prompts(
        self, plan: BatchPlan, input_ids: Tensor, logits: Callable[[Tensor], Tensor], readback: Readback, prefix: str
    ) -> list[PromptPiece]:
        """Launches the measurement of the plan's prompt_logprob_rows.

        Args:
            plan: the step's plan.
            input_ids: int64[T], the step's input tokens on the device.
            logits: returns the logits of the tokens with the given indices in the step.
            readback: receives the results.
            prefix: prefix of the names in the readback.
        """

    def prompts(
        self, pieces: Sequence[PromptPiece], host: Mapping[str, Tensor]
    ) -> tuple[dict[int, PromptLogprobs], dict[int, RowFault]]:
        """Returns prompt log probabilities and faults, by row of the plan.

        A row whose logits are not finite has both log probabilities and a fault.
        """

    def scored_rows(self, plan: BatchPlan) -> ScoredRows | None:
        """Returns the rows that end a prompt whose request asks for a score, or None if the plan has no such row."""

    def score_sections(self, scored: ScoredRows) -> list[tuple[str, NDArray[np.generic]]]:
        """Returns the sections of an upload that measure_scores() reads."""

    def measure_scores(
        self,
        scored: ScoredRows,
        views: Mapping[str, Tensor],
        logits: Callable[[Tensor], Tensor],
        readback: Readback,
        prefix: str,
    ) -> list[ScorePiece]:
        """Launches the measurement of the log probabilities of the rows' labels.

        Args:
            scored: the rows and their labels.
            views: the uploaded sections of score_sections().
            logits: returns the logits of the tokens with the given indices in the step.
            readback: receives the results.
            prefix: prefix of the names in the readback.
        """

    def scores(
        self, pieces: Sequence[ScorePiece], host: Mapping[str, Tensor]
    ) -> tuple[dict[int, NDArray[np.float32]], dict[int, RowFault]]:
        """Returns label log probabilities and faults, by row of the plan.

        A row whose logits are not finite has only a fault.
        """

    def measure(self, logits: Tensor, tokens: Tensor, rows: Tensor, num_top: int) -> Measured:
        """Measures the log probabilities of a given token and of the most likely tokens, in rows of logits.

        Args:
            logits: float32[n, V].
            tokens: int32[m], the token whose log probability is measured in each of the rows.
            rows: int32[m], rows of `logits`; a negative row is not measured.
            num_top: number of most likely tokens to return; the result may have more.
        """


class StepSampler(Protocol):
    """Samples the rows of a step."""

    max_slots: int  # number of slots, and so the largest number of rows that a captured graph samples

    @property
    def logprobs(self) -> StepLogprobs:
        """Measures the log probabilities that the slots' requests ask for."""

    @property
    def num_words(self) -> int:
        """Words of a token mask: ceil(V / 32)."""

    @property
    def ring(self) -> UploadRing:
        """Buffers of the sampler's uploads."""

    def admission(self, admitted: Sequence[SlotParams]) -> Sections:
        """Returns the sampling parameters of new slots for an upload. admit() reads them on the device."""

    def admit(self, views: Mapping[str, Tensor]) -> None:
        """Writes the sampling parameters of new slots into the table on the device.

        Args:
            views: uploaded sections of admission().
        """

    def follow(self, plan: BatchPlan) -> None:
        """Records the input tokens of the plan's extend rows, for penalties."""

    def fixed_inputs(self, slots: Tensor, positions: Tensor) -> SampleRows:
        """Returns inputs of the sampling kernels with constant addresses, for a CUDA graph."""

    def step_inputs(self, slots: Tensor, positions: Tensor) -> SampleRows:
        """Returns inputs of the sampling kernels for one step that is not replayed as a graph."""

    def run_kernels(self, batch: SampleBatch) -> None:
        """Launches the sampling kernels for all rows of the inputs on the current stream. The launches can be captured."""

    def launch(
        self, batch: SampleBatch, masks: Masks, replay: Callable[[], None] | None = None, order: SampleOrder | None = None
    ) -> SampleBatch:
        """Launches the sampling of a batch.

        Args:
            batch: the rows to sample.
            masks: token masks by row of the plan.
            replay: runs the captured kernels of a fixed batch, None to launch the kernels.
            order: the order of rows that verify draft tokens, None if no row depends on another.

        Returns:
            The batch with its readback, and with the rows in `order`.
        """

    def outcome(self, batch: SampleBatch) -> Outcome:
        """Waits for the results of a launched batch."""


class StepGraphs(Protocol):
    """Captured decode steps, by their number of rows."""

    def for_rows(self, num_rows: int) -> CudaGraph | None:
        """Returns the smallest graph with at least `num_rows` rows, or None if all graphs have fewer rows."""

    def set_known(self, graph: CudaGraph, known: Tensor | None) -> None:
        """Sets the token ids that a graph does not read from the relay. Called on the forward stream before the replay.

        Args:
            graph: the graph to replay.
            known: int32[size], -1 for a token from the relay; None if all tokens are from the relay.
        """

    def release(self) -> None: ...
