"""Samples the rows of a step on the device: uploads grammar masks and DRY losses, and launches the kernels.

kernels/contracts/sample_ops.py defines the operations for a row and their order. A loss is a value that is subtracted from a
logit because of DRY. PastTokens and LogprobRequests have the sampling state on the host. The host waits for sampled tokens only
if DRY losses or corrections of token counts depend on them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.kernels.contracts.sample_ops import NO_SLOT, SampleKernels, SampleRows
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, RowFault, SlotParams
from rootstock_llm.services.worker.exec.contracts.step_data import NOT_SAMPLED, Outcome, OutputLogprobs, SampleBatch, SampleOrder
from rootstock_llm.services.worker.exec.sampling.logprob_requests import LogprobRequests
from rootstock_llm.services.worker.exec.sampling.slots import (
    NO_LOSS,
    WORD_BITS,
    Admission,
    DeviceSlots,
    Loss,
    Losses,
    PastTokens,
    Words,
    merged_changes,
)
from rootstock_llm.services.worker.exec.streams.copies import Readback, UploadRing
from rootstock_llm.services.worker.exec.streams.cuda_streams import Streams

logger = logging.getLogger(__name__)

I32 = NDArray[np.int32]
EDITED_ROWS = 256  # largest number of rows whose edited logits are in memory at a time
MAX_LOSSES = 1 << 16  # largest number of losses of a step whose sampling is replayed as a graph


def _empty_inputs(max_rows: int, num_words: int, device: torch.device) -> SampleRows:
    """Returns inputs without masks and losses for max_rows rows. The inputs of all steps share these tensors read-only."""
    none = torch.empty(0, dtype=torch.int32, device=device)
    return SampleRows(
        slots=none,
        positions=none,
        mask_rows=torch.full((max_rows,), -1, dtype=torch.int32, device=device),
        masks=none.view(0, num_words),
        loss_offsets=torch.zeros(max_rows + 1, dtype=torch.int32, device=device),
        loss_ids=none,
        losses=none.view(torch.float32),
    )


def _part_of(rows: SampleRows, part: slice) -> SampleRows:
    """Returns a slice of the rows. The tensors of masks and losses stay whole, because rows refer to them by index."""
    offsets = rows.loss_offsets[part.start : part.stop + 1]
    return replace(
        rows, slots=rows.slots[part], positions=rows.positions[part], mask_rows=rows.mask_rows[part], loss_offsets=offsets
    )


class DeviceSampler:
    """Implements StepSampler. Belongs to the thread that launches steps."""

    def __init__(
        self, max_slots: int, vocab_size: int, kernels: SampleKernels, streams: Streams, relay: Tensor, max_rows: int = 0
    ) -> None:
        """Allocates the slots' table and the edited logits.

        Args:
            relay: int64[slots], the last token sampled for each slot. The sampler writes it, and the next pass reads it.
            max_rows: largest number of rows of a batch, if it is larger than max_slots.
        """
        self.max_slots = max_slots
        self._vocab_size, self._kernels, self._streams, self._relay = vocab_size, kernels, streams, relay
        device = streams.device
        self._slots = DeviceSlots(max_slots, vocab_size, device)
        self._past = PastTokens(vocab_size)
        self._logprobs = LogprobRequests(max_slots, vocab_size, kernels, device)
        self._num_words = -(-vocab_size // WORD_BITS)
        self._edited = torch.empty((min(max_slots, EDITED_ROWS), vocab_size), dtype=torch.float32, device=device)
        self._empty_inputs = _empty_inputs(max(max_slots, max_rows), self._num_words, device)
        self._ring = UploadRing(streams, 4 * max_slots + self._num_words)
        self._broken: set[int] = set()  # slots whose parameters or losses have failed, until their next admission
        self._unsettled: list[SampleBatch] = []  # launched batches whose tokens are not in PastTokens yet, oldest first
        self._dirty: set[int] = set()  # id() of the fixed inputs that have masks or losses of an earlier step

    @property
    def logprobs(self) -> LogprobRequests:
        return self._logprobs

    @property
    def num_words(self) -> int:
        """Number of 32-bit words of a mask."""
        return self._num_words

    @property
    def ring(self) -> UploadRing:
        return self._ring

    def admission(self, admitted: Sequence[SlotParams]) -> Admission:
        """Returns the sampling parameters of new slots as columns of an upload, which admit() reads.

        A slot whose parameters cannot be applied is left out, and its rows get RowFault.FAILED.
        """
        assert all(0 <= slot.slot < self.max_slots for slot in admitted), "slot numbers are below max_slots"
        self._broken.difference_update(slot.slot for slot in admitted)
        applied = [slot for slot in admitted if self._try_apply(slot, self._admit_on_host)]
        try:
            return self._slots.admission(applied)
        except Exception:  # an error of any type; each slot is tried separately to find the slot that causes it
            return self._slots.admission([slot for slot in applied if self._try_apply(slot, self._try_alone)])

    def _try_apply(self, slot: SlotParams, apply: Callable[[SlotParams], None]) -> bool:
        try:
            apply(slot)
        except Exception:  # an error of any type; the parameters of one slot must not fail other slots
            logger.exception("could not apply the sampling parameters of slot %d", slot.slot)
            self._broken.add(slot.slot)
            return False
        return True

    def _admit_on_host(self, slot: SlotParams) -> None:
        self._logprobs.admit(slot)
        self._past.admit(slot)

    def _try_alone(self, slot: SlotParams) -> None:
        self._slots.admission([slot])

    def admit(self, views: Mapping[str, Tensor]) -> None:
        self._slots.admit(views)

    def fixed_inputs(self, slots: Tensor, positions: Tensor) -> SampleRows:
        """Returns inputs with constant addresses for a graph, without masks and losses."""
        size, device = len(slots), self._streams.device
        return SampleRows(
            slots=slots,
            positions=positions,
            mask_rows=torch.full((size,), -1, dtype=torch.int32, device=device),
            masks=torch.zeros((size, self._num_words), dtype=torch.int32, device=device),
            loss_offsets=torch.zeros(size + 1, dtype=torch.int32, device=device),
            loss_ids=torch.zeros(MAX_LOSSES, dtype=torch.int32, device=device),
            losses=torch.zeros(MAX_LOSSES, dtype=torch.float32, device=device),
        )

    def step_inputs(self, slots: Tensor, positions: Tensor) -> SampleRows:
        """Returns inputs for one step that is not replayed as a graph, without masks and losses."""
        size, empty = len(slots), self._empty_inputs
        assert size == len(positions) < len(empty.loss_offsets), "a batch has at most max_rows rows"
        unmasked, lossless = empty.mask_rows[:size], empty.loss_offsets[: size + 1]
        return SampleRows(slots, positions, unmasked, empty.masks, lossless, empty.loss_ids, empty.losses)

    def follow(self, plan: BatchPlan) -> None:
        """Adds the tokens of the plan's extend rows to the token counts for penalties.

        Called once per plan, before its first launch().
        """
        if not self._past.follows(plan):
            return
        self.settle()
        slots, ids, changes = merged_changes(self._past.follow(plan))
        if len(slots):
            views = self._ring.send([("slots", slots), ("ids", ids), ("changes", changes)])
            self._streams.forward_after_schedule()
            with self._streams.on_forward():
                self._slots.adjust_counts(views["slots"], views["ids"], views["changes"])

    def launch(
        self,
        batch: SampleBatch,
        masks: Mapping[int, Words],
        replay: Callable[[], None] | None = None,
        order: SampleOrder | None = None,
    ) -> SampleBatch:
        """Launches the sampling of a batch and the copy of its results to the host.

        Args:
            masks: grammar masks by row of the plan.
            replay: replays the graph of a fixed batch, or None to launch the kernels here.
            order: the order of rows that verify draft tokens, or None if no row depends on another.

        Returns:
            The batch with its readback, and with the rows in `order`.
        """
        if order is not None:
            batch = replace(batch, slots=batch.slots[order.order], rows=batch.rows[order.order])
        index_of = {row: index for index, row in enumerate(batch.rows.tolist())} if masks else {}
        masked = {index_of[row]: mask for row, mask in masks.items() if row in index_of}
        requested = self._logprobs.of_rows(batch.slots)
        pasts = self._past.of_rows(batch.slots)
        lossy = any(past.repeats is not None for _, past in pasts)
        if lossy:
            self.settle()
        views = self._send(batch, masked, lossy, requested, order)
        readback = Readback(self._streams)
        if views:
            self._streams.forward_after_schedule()
        self._streams.forward_after_copy()  # earlier results may still be copied from the output
        with self._streams.on_forward():
            if order is not None:
                batch = self._reordered(batch, order, views)
            filled, skipped = self._filled(batch, views), None
            if order is not None:
                self._run_in_order(filled, order, views)
                skipped = filled.faults == NOT_SAMPLED
            elif replay is None or filled is not batch:
                self.run_kernels(filled)
            else:
                replay()
            readback.add("sampled", filled.out)
            if requested is not None:
                self._logprobs.measure_outputs(requested, views, filled.logits, filled.tokens, readback, skipped)
        launched = replace(filled, readback=readback, requested=requested, pasts=pasts, broken=frozenset(self._broken))
        self._ring.release(readback.launch())
        if pasts:
            self._unsettled.append(launched)
        return launched

    def run_kernels(self, batch: SampleBatch) -> None:
        """Launches the sampling kernels for all rows of the inputs on the current stream. The call can be captured."""
        self._run(batch.logits, batch.inputs, batch.tokens, batch.faults)

    def _run(self, logits: Tensor, rows: SampleRows, tokens: Tensor, faults: Tensor) -> None:
        count = len(rows.slots)
        assert count <= len(logits), "each row to sample has logits"
        if count <= len(self._edited):
            self._run_piece(logits, rows, tokens, faults)
            return
        for first in range(0, count, EDITED_ROWS):
            part = slice(first, min(first + EDITED_ROWS, count))
            self._run_piece(logits[first:], _part_of(rows, part), tokens[part], faults[part])

    def _run_piece(self, logits: Tensor, rows: SampleRows, tokens: Tensor, faults: Tensor) -> None:
        count, table = len(rows.slots), self._slots.table
        assert count <= len(self._edited), "the rows fit into the memory for edited logits"
        values, edited = logits if len(logits) == count else logits[:count], self._edited[:count]
        self._kernels.edit_logits(edited, values, rows, table)
        self._kernels.select_tokens(tokens, faults, values, edited, rows, table, self._relay)

    def _reordered(self, batch: SampleBatch, order: SampleOrder, views: Mapping[str, Tensor]) -> SampleBatch:
        """Returns a batch whose logits, slots and positions have the order of `order`. The fault of each row is NOT_SAMPLED."""
        rows, logits, count = batch.inputs, batch.logits, len(order.order)
        if order.in_order:
            logits, slots, positions = logits[:count], rows.slots[:count], rows.positions[:count]
        else:
            indices = views["order"].long()
            logits, slots, positions = (each.index_select(0, indices) for each in (logits, rows.slots, rows.positions))
        reordered = SampleBatch.of(logits, self.step_inputs(slots, positions), batch.slots, batch.rows)
        reordered.faults.fill_(NOT_SAMPLED)
        return reordered

    def _run_in_order(self, batch: SampleBatch, order: SampleOrder, views: Mapping[str, Tensor]) -> None:
        """Samples row 0 of all runs, then row 1 of the runs that have one, and so on.

        After a rejected draft token, the faults of the run's later rows stay NOT_SAMPLED. The host does not read values of a GPU.
        On a CPU, it stops as soon as all runs have ended.
        """
        logits, rows, (tokens, faults), draft_tokens = batch.logits, batch.inputs, batch.out, views["draft_tokens"]
        before = at = known = 0
        for index, size in enumerate(order.sizes):
            part = slice(at, at + size)
            piece = _part_of(rows, part)
            if index == 0:
                self._run(logits[part], piece, tokens[part], faults[part])
            else:
                last = slice(before, before + size)
                alive = (tokens[last] == draft_tokens[known : known + size]) & (faults[last] == 0)
                if self._streams.on_host and not alive.any():
                    return
                piece = replace(piece, slots=piece.slots.masked_fill(~alive, NO_SLOT))
                self._run(logits[part], piece, tokens[part], faults[part])
                faults[part].masked_fill_(~alive, NOT_SAMPLED)
                known += size
            before, at = at, at + size

    def outcome(self, batch: SampleBatch) -> Outcome:
        """Waits for the launched batch and returns its tokens, faults and log probabilities."""
        assert batch.readback is not None, "outcome() is called after launch()"
        self.settle()
        host, count = batch.readback.host(), len(batch.slots)
        tokens, codes = host["sampled"].numpy()[:, :count]
        assert len(tokens) == len(codes) == count, "each row has a token and a code"
        tokens, coded = tokens.copy(), np.flatnonzero(codes).tolist()
        faults = {index: RowFault(int(codes[index])) for index in coded if codes[index] != NOT_SAMPLED}
        for index, slot in enumerate(batch.slots.tolist() if batch.broken else ()):
            if slot in batch.broken:
                faults[index] = RowFault.FAILED
        without = {*faults, *coded}
        tokens[list(without)] = 0
        logprobs = self._logprobs.outputs(batch.requested, host, without) if batch.requested is not None else {}
        return Outcome(tokens, faults, logprobs)

    def settle(self) -> None:
        """Adds the tokens of all launched batches to PastTokens. Waits for tokens that are not on the host yet."""
        while self._unsettled:
            launched = self._unsettled.pop(0)  # removed before a call that may raise, so that no token is added twice
            assert launched.readback is not None, "an unsettled batch is launched"
            tokens, faults = launched.readback.host()["sampled"].tolist()
            assert all(index < len(tokens) for index, _ in launched.pasts), "each recorder belongs to a row of the batch"
            for index, past in launched.pasts:
                if not faults[index]:
                    past.add(tokens[index])

    def _send(
        self,
        batch: SampleBatch,
        masked: Mapping[int, Words],
        lossy: bool,
        requested: OutputLogprobs | None,
        order: SampleOrder | None,
    ) -> dict[str, Tensor]:
        sections: list[tuple[str, NDArray[np.generic]]] = []
        size = len(batch.inputs.slots) if order is None else len(order.order)
        if masked:
            mask_rows = np.full(size, -1, dtype=np.int32)
            assert max(masked) < len(batch.slots) <= size, "masks belong to rows that are not padding"
            mask_rows[list(masked)] = np.arange(len(masked))
            sections += [("mask_rows", mask_rows), ("masks", np.stack(list(masked.values())))]
        if lossy:
            slots = np.full(size, -1, dtype=np.int32)
            slots[: len(batch.slots)] = batch.slots
            losses = Losses.of([self._loss(slot) for slot in slots.tolist()] if order is None else self._losses(slots, order))
            sections += [("loss_offsets", losses.offsets), ("loss_ids", losses.ids), ("losses", losses.values)]
        if requested is not None:
            sections += self._logprobs.sections(requested)
        if order is not None:
            sections += [("order", order.order), ("draft_tokens", order.draft_tokens)]
        return self._ring.send(sections) if sections else {}

    def _loss(self, slot: int) -> Loss:
        """Returns the losses of a slot, none for a padding slot. If they cannot be computed, the slot's rows get a fault."""
        try:
            return self._past.losses_of(slot)
        except Exception:  # an error of any type, as in _try_apply()
            logger.exception("could not compute the DRY penalties of slot %d", slot)
            self._broken.add(slot)
            return NO_LOSS

    def _losses(self, slots: I32, order: SampleOrder) -> list[Loss]:
        """Returns the losses of rows that verify draft tokens.

        The losses of a row depend on the tokens before it. These are known here, because a later row of a run is sampled only if
        all draft tokens before it are accepted.
        """
        losses = [self._loss(slot) for slot in slots[: order.sizes[0]].tolist()]
        after = [self._losses_after(int(slots[row]), order.draft_tokens_of(row)) for row in range(max((0, *order.sizes[1:])))]
        for index, size in enumerate(order.sizes[1:]):
            losses += [after[row][index] for row in range(size)]
        return losses

    def _losses_after(self, slot: int, draft_tokens: Sequence[int]) -> list[Loss]:
        try:
            return self._past.losses_after(slot, draft_tokens)
        except Exception:  # an error of any type, as in _try_apply()
            logger.exception("could not compute the DRY penalties of slot %d after its draft tokens", slot)
            self._broken.add(slot)
            return [NO_LOSS] * len(draft_tokens)

    def _filled(self, batch: SampleBatch, views: Mapping[str, Tensor]) -> SampleBatch:
        """Returns the batch with the step's masks and losses.

        Fixed inputs are filled in place if they have memory for the losses. Otherwise, the result refers to the uploaded tensors.
        """
        rows, rows_id = batch.inputs, id(batch.inputs)
        masks = views["masks"].view(-1, self._num_words) if "masks" in views else None
        if batch.fixed and rows_id in self._dirty:
            rows.mask_rows.fill_(-1)
            rows.loss_offsets.zero_()
            self._dirty.discard(rows_id)
        if not batch.fixed or ("loss_ids" in views and len(views["loss_ids"]) > MAX_LOSSES):
            return self._with_uploaded(batch, views, masks)
        if masks is not None:
            assert len(masks) <= len(rows.masks), "fixed inputs have memory for a mask per row"
            rows.mask_rows.copy_(views["mask_rows"])
            rows.masks[: len(masks)].copy_(masks)
            self._dirty.add(rows_id)
        if "loss_ids" in views:
            count = len(views["loss_ids"])
            rows.loss_offsets.copy_(views["loss_offsets"])
            rows.loss_ids[:count].copy_(views["loss_ids"])
            rows.losses[:count].copy_(views["losses"].view(torch.float32))
            self._dirty.add(rows_id)
        return batch

    def _with_uploaded(self, batch: SampleBatch, views: Mapping[str, Tensor], masks: Tensor | None) -> SampleBatch:
        rows = batch.inputs
        if masks is None and "loss_ids" not in views:
            return batch
        changed = SampleRows(
            slots=rows.slots,
            positions=rows.positions,
            mask_rows=rows.mask_rows if masks is None else views["mask_rows"],
            masks=rows.masks if masks is None else masks,
            loss_offsets=views.get("loss_offsets", rows.loss_offsets),
            loss_ids=views.get("loss_ids", rows.loss_ids),
            losses=views["losses"].view(torch.float32) if "losses" in views else rows.losses,
        )
        return replace(batch, inputs=changed)
