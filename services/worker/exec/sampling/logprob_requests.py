"""Log probabilities that requests ask for: launched on the device, unpacked on the host."""

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
Logits = Callable[[Tensor], Tensor]
PIECE_BYTES = 64 << 20  # largest number of bytes of a prompt's float32 logits at a time, so that long chunks need no more memory
COLUMNS = ("own", "top_ids", "top", "mass")
TOPS = (0, 5, MAX_TOP_LOGPROBS)  # numbers of top tokens that are measured; kernels are compiled for each number


class LogprobRequests:
    """The log probabilities for which each slot's request asks. Belongs to the thread that launches steps.

    `Logits` is a function from token indices in the pass, int64[n], to their raw logits, float32[n, V].
    """

    def __init__(self, max_slots: int, vocab_size: int, kernels: SampleKernels, device: torch.device) -> None:
        self._vocab_size, self._kernels, self._device = vocab_size, kernels, device
        self._piece_rows = max(1, PIECE_BYTES // (4 * vocab_size))
        self._num_top = np.full(max_slots, -1, dtype=np.int64)  # top tokens by slot; -1: no log probabilities
        self._wanting: set[int] = set()  # slots whose number of top tokens is not -1
        self._chosen: dict[int, I64] = {}  # by slot: further token ids whose log probabilities are returned
        self._labels: dict[int, I64] = {}  # label token ids by slot, for requests that ask for a score

    def admit(self, slot: SlotParams) -> None:
        params, index = slot.params, slot.slot
        self._num_top[index] = params.top_logprobs
        (self._wanting.add if params.top_logprobs >= 0 else self._wanting.discard)(index)
        self._chosen.pop(index, None)
        if params.logprob_token_ids:
            self._chosen[index] = np.array(params.logprob_token_ids, dtype=np.int64)
        self._labels.pop(index, None)
        if params.score is not None:
            self._labels[index] = np.array(params.score.label_token_ids, dtype=np.int64)

    # Sampled tokens

    def of_rows(self, slots: I32) -> OutputLogprobs | None:
        """Returns the log probabilities for which the sampled rows' requests ask, or None if no request asks for any.

        Args:
            slots: int32[n], the slots of the sampled rows.
        """
        if not self._wanting:
            return None
        rows = np.flatnonzero(self._num_top[slots] >= 0).astype(np.int32)
        if not len(rows):
            return None
        wanted = slots[rows]
        assert self._wanting.issuperset(wanted.tolist()), "only requests that ask for log probabilities are measured"
        return OutputLogprobs(rows, tuple(self._num_top[wanted].tolist()), tuple(self._ids_of(slot) for slot in wanted.tolist()))

    def sections(self, wish: OutputLogprobs) -> list[tuple[str, NDArray[np.generic]]]:
        """Returns the sections of an upload that measure_outputs() reads."""
        sizes = [len(ids) for ids in wish.ids]
        assert len(sizes) == len(wish.nums) == len(wish.rows), "each row has a number and ids"
        rows, places = np.repeat(wish.rows, sizes), np.repeat(np.arange(len(wish.rows)), sizes)
        ids = np.concatenate([np.empty(0, np.int64), *wish.ids]).clip(0, self._vocab_size - 1)
        return [("measured_rows", wish.rows), ("chosen_rows", rows), ("chosen_places", places), ("chosen_ids", ids)]

    def measure_outputs(
        self,
        wish: OutputLogprobs,
        views: Mapping[str, Tensor],
        logits: Tensor,
        tokens: Tensor,
        readback: Readback,
        skipped: Tensor | None = None,
    ) -> None:
        """Launches the measurement of sampled tokens and adds the results to the readback.

        Args:
            views: the sections of sections() on the device.
            logits: float32[n, V], raw.
            tokens: int32[n], the sampled tokens.
            skipped: bool[n], whether the row was not sampled and is not measured, or None if all rows were sampled.
        """
        rows = views["measured_rows"]
        wanted = rows if skipped is None else rows.masked_fill(skipped.index_select(0, rows.long()), -1)
        measured = self.measure(logits, tokens.index_select(0, rows.long()), wanted, max(wish.nums))
        for name in COLUMNS:
            readback.add(f"output_{name}", getattr(measured, name))
        if len(views["chosen_ids"]):
            picked = logits[views["chosen_rows"].long(), views["chosen_ids"].long()]
            readback.add("output_chosen", picked - measured.mass[views["chosen_places"].long()])

    def outputs(self, wish: OutputLogprobs, host: Mapping[str, Tensor], without: Collection[int]) -> dict[int, RowLogprobs]:
        """Returns the measured log probabilities by index of the sampled row.

        Args:
            without: indices of rows without a result, because they have a fault or were not sampled.
        """
        own, top_ids, top = (host[f"output_{name}"].tolist() for name in COLUMNS[:3])
        chosen = host["output_chosen"].numpy() if "output_chosen" in host else np.empty(0, np.float32)
        result, at = {}, 0
        for index, (row, num, ids) in enumerate(zip(wish.rows.tolist(), wish.nums, wish.ids, strict=True)):
            values = self._outside(chosen[at : at + len(ids)], ids)
            at += len(ids)
            if row not in without:
                kept = slice(min(num, self._vocab_size))
                tops = tuple(top_ids[index][kept]), tuple(top[index][kept])
                result[row] = RowLogprobs(own[index], *tops, tuple(values.tolist()))
        assert at == len(chosen), "each chosen value belongs to a row"
        return result

    # Prompt tokens

    def measure_prompts(
        self, plan: BatchPlan, input_ids: Tensor, logits: Logits, readback: Readback, prefix: str
    ) -> list[PromptPiece]:
        """Launches the measurement of prompt tokens in the plan's prompt_logprob_rows, in pieces of bounded memory.

        Args:
            input_ids: int64[T], the step's tokens on the device.
            prefix: of the names in the readback.
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
        """Returns the predicted tokens, int32[n]: the tokens inside the row, then `after` unless it is negative."""
        known = inside.to(torch.int32)
        if after < 0:
            return known
        return torch.cat((known, torch.full((1,), after, dtype=torch.int32, device=self._device)))

    def _measure_piece(self, piece: PromptPiece, first: int, targets: Tensor, logits: Logits, readback: Readback) -> None:
        count = len(targets)
        assert count <= self._piece_rows, "a piece has at most PIECE_BYTES of logits"
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
        """Returns log probabilities and faults by row of the plan. A row whose logits are not finite is in both."""
        parts: dict[int, list[PromptPiece]] = {}
        for piece in pieces:
            parts.setdefault(piece.row, []).append(piece)
        values: dict[int, PromptLogprobs] = {}
        faults: dict[int, RowFault] = {}
        for row, of_row in parts.items():
            own, top_ids, top, mass = (np.concatenate([host[f"{p.name}_{c}"].numpy() for p in of_row]) for c in COLUMNS)
            ids, kept = of_row[0].ids, slice(min(of_row[0].num_top, self._vocab_size))
            chosen = np.empty((len(own), 0), np.float32)
            if len(ids):
                chosen = self._outside(np.concatenate([host[f"{p.name}_chosen"].numpy() for p in of_row]), ids)
            assert len(own) == len(mass) == len(top_ids) == len(chosen), "pieces of a row join to equally long columns"
            values[row] = PromptLogprobs(own, top_ids[:, kept], top[:, kept], chosen)
            if not np.isfinite(mass).all():
                faults[row] = RowFault.NAN_LOGITS
        return values, faults

    # Scores at the end of prompts

    def of_prompts(self, plan: BatchPlan) -> ScoredRows | None:
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
        """Returns sections of an upload, which measure_scores() reads."""
        ids = [labels.clip(0, self._vocab_size - 1) for labels in scored.labels]
        places = np.repeat(np.arange(len(ids)), [len(labels) for labels in ids])
        firsts = np.array([labels[0] for labels in ids])
        sections = [("score_indices", scored.indices), ("score_firsts", firsts), ("score_places", places)]
        return [*sections, ("score_ids", np.concatenate(ids))]

    def measure_scores(
        self, scored: ScoredRows, views: Mapping[str, Tensor], logits: Logits, readback: Readback, prefix: str
    ) -> list[ScorePiece]:
        """Launches the measurement of the rows' labels, in pieces of bounded memory.

        Args:
            views: the sections of score_sections() on the device.
            prefix: of the names in the readback.
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
            places = views["score_places"][labels].long() - begin
            name = f"score_{prefix}{begin}"
            readback.add(f"{name}_values", made[places, views["score_ids"][labels].long()] - mass[places])
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
            sound = host[f"{piece.name}_mass"].isfinite().tolist()
            assert len(of_rows) == len(sound) == len(piece.rows), "each scored row has values and a mass"
            for row, own, finite in zip(piece.rows, of_rows, sound, strict=True):
                if finite:
                    values[row] = own.astype(np.float32, copy=True)
                else:
                    faults[row] = RowFault.NAN_LOGITS
        return values, faults

    def measure(self, logits: Tensor, tokens: Tensor, rows: Tensor, num_top: int) -> Measured:
        """Launches the measurement of rows of logits.

        Args:
            logits: float32[n, V].
            tokens: int32[m], the token of each measured row.
            rows: int32[m], rows of `logits`; a negative row is not measured.
            num_top: smallest number of top tokens; it is rounded up to a number in TOPS.
        """
        assert len(tokens) == len(rows), "each row is measured at a token"
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

    def _outside(self, values: NDArray[np.float32], ids: I64) -> NDArray[np.float32]:
        """Returns the values, [..., m], with -inf for ids outside the vocabulary."""
        out = values.astype(np.float32, copy=True)
        out[..., (ids < 0) | (ids >= self._vocab_size)] = -np.inf
        return out
