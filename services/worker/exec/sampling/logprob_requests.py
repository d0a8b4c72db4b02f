"""Measures requested log probabilities on the device and copies them to the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.kernels.contracts.sample_ops import Measured, SampleKernels
from rootstock_llm.services.shared.limits import MAX_TOP_LOGPROBS
from rootstock_llm.services.worker.core.contracts.plan import I32, BatchPlan, PromptLogprobs, RowFault, RowLogprobs, SlotParams
from rootstock_llm.services.worker.exec.contracts.step_data import OutputLogprobs, PromptPiece, ScoredRows, ScorePiece
from rootstock_llm.services.worker.exec.streams.copies import Readback

I64 = NDArray[np.int64]
Logits = Callable[[Tensor], Tensor]  # takes indices of tokens in the pass, int64[n]; returns their raw logits, float32[n, V]
PIECE_BYTES = 64 << 20  # largest size of the float32 logits of prompt tokens in memory at a time
COLUMNS = ("own", "top_ids", "top", "mass")  # fields of Measured that are copied to the host
TOPS = (0, 5, MAX_TOP_LOGPROBS)  # numbers of top tokens for which kernels are compiled; smaller numbers are rounded up


class LogprobRequests:
    """Implements StepLogprobs. Stores which log probabilities each slot's request asks for.

    Belongs to the thread that launches steps.
    """

    def __init__(self, max_slots: int, vocab_size: int, kernels: SampleKernels, device: torch.device) -> None:
        self._vocab_size, self._kernels, self._device = vocab_size, kernels, device
        self._piece_rows = max(1, PIECE_BYTES // (4 * vocab_size))
        self._num_top = np.full(max_slots, -1, dtype=np.int64)  # by slot: number of top tokens; -1 without log probabilities
        self._requesting: set[int] = set()  # slots whose requests ask for log probabilities of sampled tokens
        self._chosen: dict[int, I64] = {}  # by slot: token ids whose log probabilities are also returned
        self._labels: dict[int, I64] = {}  # label token ids by slot, for requests that ask for a score

    def admit(self, slot: SlotParams) -> None:
        params, index = slot.params, slot.slot
        self._num_top[index] = params.top_logprobs
        (self._requesting.add if params.top_logprobs >= 0 else self._requesting.discard)(index)
        self._chosen.pop(index, None)
        if params.logprob_token_ids:
            self._chosen[index] = np.array(params.logprob_token_ids, dtype=np.int64)
        self._labels.pop(index, None)
        if params.score is not None:
            self._labels[index] = np.array(params.score.label_token_ids, dtype=np.int64)

    # Sampled tokens

    def of_rows(self, slots: I32) -> OutputLogprobs | None:
        """Returns which log probabilities the requests of sampled rows ask for, or None if no request asks for any.

        Args:
            slots: int32[n], the slots of the sampled rows.
        """
        if not self._requesting:
            return None
        rows = np.flatnonzero(self._num_top[slots] >= 0).astype(np.int32)
        if not len(rows):
            return None
        wanted = slots[rows]
        assert self._requesting.issuperset(wanted.tolist()), (
            "each row with top tokens belongs to a request that asks for log probabilities"
        )
        return OutputLogprobs(rows, tuple(self._num_top[wanted].tolist()), tuple(self._ids_of(slot) for slot in wanted.tolist()))

    def sections(self, requested: OutputLogprobs) -> list[tuple[str, NDArray[np.generic]]]:
        """Returns the sections of the upload that measure_outputs() reads."""
        sizes = [len(ids) for ids in requested.ids]
        assert len(sizes) == len(requested.nums) == len(requested.rows), "each row has a number of top tokens and a list of ids"
        rows, indices = np.repeat(requested.rows, sizes), np.repeat(np.arange(len(requested.rows)), sizes)
        ids = np.concatenate([np.empty(0, np.int64), *requested.ids]).clip(0, self._vocab_size - 1)
        return [("measured_rows", requested.rows), ("chosen_rows", rows), ("chosen_indices", indices), ("chosen_ids", ids)]

    def measure_outputs(
        self,
        requested: OutputLogprobs,
        views: Mapping[str, Tensor],
        logits: Tensor,
        tokens: Tensor,
        readback: Readback,
        skipped: Tensor | None = None,
    ) -> None:
        """Launches the measurement of sampled tokens and adds the results to the readback.

        Args:
            views: the uploaded sections of sections().
            logits: raw logits, float32[n, V].
            tokens: int32[n], the sampled tokens.
            skipped: bool[n], whether the row was not sampled, so that it is not measured; None if all rows were sampled.
        """
        rows = views["measured_rows"]
        wanted = rows if skipped is None else rows.masked_fill(skipped.index_select(0, rows.long()), -1)
        measured = self.measure(logits, tokens.index_select(0, rows.long()), wanted, max(requested.nums))
        for name in COLUMNS:
            readback.add(f"output_{name}", getattr(measured, name))
        if len(views["chosen_ids"]):
            picked = logits[views["chosen_rows"].long(), views["chosen_ids"].long()]
            readback.add("output_chosen", picked - measured.mass[views["chosen_indices"].long()])

    def outputs(self, requested: OutputLogprobs, host: Mapping[str, Tensor], without: Collection[int]) -> dict[int, RowLogprobs]:
        """Returns the measured log probabilities by index of the sampled row.

        Args:
            without: indices of rows that get no log probabilities, because they have a fault or were not sampled.
        """
        own, top_ids, top = (host[f"output_{name}"].tolist() for name in COLUMNS[:3])
        chosen = host["output_chosen"].numpy() if "output_chosen" in host else np.empty(0, np.float32)
        result, at = {}, 0
        for index, (row, num, ids) in enumerate(zip(requested.rows.tolist(), requested.nums, requested.ids, strict=True)):
            values = self._without_unknown(chosen[at : at + len(ids)], ids)
            at += len(ids)
            if row not in without:
                count = min(num, self._vocab_size)
                tops = tuple(top_ids[index][:count]), tuple(top[index][:count])
                result[row] = RowLogprobs(own[index], *tops, tuple(values.tolist()))
        assert at == len(chosen), "all values for chosen ids belong to a row"
        return result

    # Prompt tokens

    def measure_prompts(
        self, plan: BatchPlan, input_ids: Tensor, logits: Logits, readback: Readback, prefix: str
    ) -> list[PromptPiece]:
        """Launches the measurement of the plan's prompt_logprob_rows, in pieces of at most PIECE_BYTES of logits.

        Args:
            input_ids: int64[T], the step's tokens on the device.
            prefix: beginning of the names in the readback.
        """
        pieces: list[PromptPiece] = []
        if not len(plan.prompt_logprob_rows):
            return pieces
        ends = np.cumsum(plan.num_tokens)
        columns = (plan.prompt_logprob_rows, plan.prompt_logprob_offsets, plan.prompt_logprob_nexts)
        for row, skipped, after in zip(*(column.tolist() for column in columns), strict=True):
            end = int(ends[row])
            first, slot = end - int(plan.num_tokens[row]) + skipped, int(plan.slots[row])
            targets = self._targets(input_ids[first + 1 : end], after)
            wanted = PromptPiece(row, max(0, int(self._num_top[slot])), self._ids_of(slot))
            for begin in range(0, max(1, len(targets)), self._piece_rows):
                piece = replace(wanted, name=f"prompt_{prefix}{len(pieces)}")
                self._measure_piece(piece, first + begin, targets[begin : begin + self._piece_rows], logits, readback)
                pieces.append(piece)
        return pieces

    def _targets(self, inside: Tensor, after: int) -> Tensor:
        """Returns the tokens to be measured, int32[n]: those inside the row, then `after` unless it is negative."""
        known = inside.to(torch.int32)
        if after < 0:
            return known
        return torch.cat((known, torch.full((1,), after, dtype=torch.int32, device=self._device)))

    def _measure_piece(self, piece: PromptPiece, first: int, targets: Tensor, logits: Logits, readback: Readback) -> None:
        count = len(targets)
        assert count <= self._piece_rows, "the logits of a piece have at most PIECE_BYTES"
        made = logits(torch.arange(first, first + count, device=self._device))
        rows = torch.arange(count, dtype=torch.int32, device=self._device)
        measured = self.measure(made, targets, rows, piece.num_top)
        for column in COLUMNS:
            readback.add(f"{piece.name}_{column}", getattr(measured, column))
        if len(piece.ids):
            columns = [made[:, token] for token in piece.ids.clip(0, self._vocab_size - 1).tolist()]
            readback.add(f"{piece.name}_chosen", torch.stack(columns, 1) - measured.mass[:, None])

    def prompts(
        self, pieces: Sequence[PromptPiece], host: Mapping[str, Tensor]
    ) -> tuple[dict[int, PromptLogprobs], dict[int, RowFault]]:
        """Returns log probabilities and faults by row of the plan. A row whose logits are not finite has both."""
        parts: dict[int, list[PromptPiece]] = {}
        for piece in pieces:
            parts.setdefault(piece.row, []).append(piece)
        values: dict[int, PromptLogprobs] = {}
        faults: dict[int, RowFault] = {}
        for row, of_row in parts.items():
            own, top_ids, top, mass = (np.concatenate([host[f"{p.name}_{c}"].numpy() for p in of_row]) for c in COLUMNS)
            ids, num_top = of_row[0].ids, min(of_row[0].num_top, self._vocab_size)
            chosen = np.empty((len(own), 0), np.float32)
            if len(ids):
                chosen = self._without_unknown(np.concatenate([host[f"{p.name}_chosen"].numpy() for p in of_row]), ids)
            assert len(own) == len(mass) == len(top_ids) == len(chosen), (
                "the joined pieces of a row have a value per token in each column"
            )
            values[row] = PromptLogprobs(own, top_ids[:, :num_top], top[:, :num_top], chosen)
            if not np.isfinite(mass).all():
                faults[row] = RowFault.NAN_LOGITS
        return values, faults

    # Scores at the end of prompts

    def scored_rows(self, plan: BatchPlan) -> ScoredRows | None:
        """Returns the rows that end a prompt whose request asks for a score, or None if there is no such row."""
        if not self._labels:
            return None
        extends = np.flatnonzero(plan.sample[: plan.num_extend]).tolist()
        rows = [row for row in extends if int(plan.slots[row]) in self._labels]
        if not rows:
            return None
        indices = np.cumsum(plan.num_tokens, dtype=np.int64)[rows] - 1
        return ScoredRows(np.array(rows, dtype=np.int64), indices, tuple(self._labels[int(plan.slots[row])] for row in rows))

    def score_sections(self, scored: ScoredRows) -> list[tuple[str, NDArray[np.generic]]]:
        """Returns the sections of the upload that measure_scores() reads."""
        ids = [labels.clip(0, self._vocab_size - 1) for labels in scored.labels]
        rows = np.repeat(np.arange(len(ids)), [len(labels) for labels in ids])
        firsts = np.array([labels[0] for labels in ids])
        sections = [("score_indices", scored.indices), ("score_firsts", firsts), ("score_rows", rows)]
        return [*sections, ("score_ids", np.concatenate(ids))]

    def measure_scores(
        self, scored: ScoredRows, views: Mapping[str, Tensor], logits: Logits, readback: Readback, prefix: str
    ) -> list[ScorePiece]:
        """Launches the measurement of the rows' labels, in pieces of at most PIECE_BYTES of logits.

        Args:
            views: the uploaded sections of score_sections().
            prefix: beginning of the names in the readback.
        """
        sizes = [len(labels) for labels in scored.labels]
        ends = np.cumsum(sizes)
        pieces: list[ScorePiece] = []
        for begin in range(0, len(sizes), self._piece_rows):
            end = min(begin + self._piece_rows, len(sizes))
            made = logits(views["score_indices"][begin:end].long())
            rows = torch.arange(end - begin, dtype=torch.int32, device=self._device)
            mass = self.measure(made, views["score_firsts"][begin:end], rows, 0).mass
            labels = slice(int(ends[begin]) - sizes[begin], int(ends[end - 1]))
            label_rows = views["score_rows"][labels].long() - begin
            name = f"score_{prefix}{begin}"
            readback.add(f"{name}_values", made[label_rows, views["score_ids"][labels].long()] - mass[label_rows])
            readback.add(f"{name}_mass", mass)
            pieces.append(ScorePiece(name, tuple(scored.rows[begin:end].tolist()), tuple(sizes[begin:end])))
        return pieces

    def scores(
        self, pieces: Sequence[ScorePiece], host: Mapping[str, Tensor]
    ) -> tuple[dict[int, NDArray[np.float32]], dict[int, RowFault]]:
        """Returns label log probabilities and faults by row of the plan. A row whose logits are not finite has only a fault."""
        values: dict[int, NDArray[np.float32]] = {}
        faults: dict[int, RowFault] = {}
        for piece in pieces:
            of_rows = np.split(host[f"{piece.name}_values"].numpy(), np.cumsum(piece.sizes)[:-1])
            are_finite = host[f"{piece.name}_mass"].isfinite().tolist()
            assert len(of_rows) == len(are_finite) == len(piece.rows), (
                "each scored row has label values and a log-sum-exp of its logits"
            )
            for row, own, is_finite in zip(piece.rows, of_rows, are_finite, strict=True):
                if is_finite:
                    values[row] = own.astype(np.float32, copy=True)
                else:
                    faults[row] = RowFault.NAN_LOGITS
        return values, faults

    def measure(self, logits: Tensor, tokens: Tensor, rows: Tensor, num_top: int) -> Measured:
        """Launches the measurement of rows of logits.

        Args:
            logits: float32[n, V].
            tokens: int32[m], the token whose log probability is measured in each of the rows.
            rows: int32[m], rows of `logits`; a negative row is not measured.
            num_top: number of top tokens, which is rounded up to a number in TOPS. A number above the largest entry of TOPS is
                not rounded.
        """
        assert len(tokens) == len(rows), "each row has a token whose log probability is measured"
        count, num_top = len(rows), next((size for size in TOPS if size >= num_top), num_top)

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=self._device)

        top_ids = torch.empty((count, num_top), dtype=torch.int32, device=self._device)
        measured = Measured(own=floats(count), top_ids=top_ids, top=floats(count, num_top), mass=floats(count))
        if count:
            self._kernels.measure_logprobs(measured, logits, tokens, rows)
        return measured

    def _ids_of(self, slot: int) -> I64:
        return self._chosen.get(slot, np.empty(0, np.int64))

    def _without_unknown(self, values: NDArray[np.float32], ids: I64) -> NDArray[np.float32]:
        """Returns a copy of the values, [..., m], with -inf for ids outside of the vocabulary."""
        out = values.astype(np.float32, copy=True)
        out[..., (ids < 0) | (ids >= self._vocab_size)] = -np.inf
        return out
