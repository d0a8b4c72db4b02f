"""What the executor launches for each step: tables and slots brought up to date, the forward pass, then sampling.

Everything is launched from one thread and ordered by the forward stream; the host waits in result() alone, and where the
device had no room for a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.contracts.step_ops import DevicePageTableUpdates, StepKernels
from services.worker.core.contracts.graph_limits import GraphLimits
from services.worker.core.contracts.plan import BatchPlan, RowFault, RowLogprobs, StepResult
from services.worker.exec.attention.backend import AttentionBackend, AttentionBatch
from services.worker.exec.contracts.executor_stats import ExecutorStats
from services.worker.exec.contracts.protocol import NO_MASKS, Guesses, Masks
from services.worker.exec.contracts.step_data import Batch, CudaGraph, Places, PromptPiece, ScorePiece
from services.worker.exec.contracts.step_parts import Launched, StepGraphs, StepSampler
from services.worker.exec.pools.arrivals import Arrivals
from services.worker.exec.pools.embedding_pool import EmbeddingPool, embedded
from services.worker.exec.step.forward_batch import DeviceBatch, ForwardBatch
from services.worker.exec.step.passes import POISON, ForwardPass, UnwrittenToken
from services.worker.exec.step.plan_pieces import Piece, halves, select, whole
from services.worker.exec.streams.cuda_streams import Streams
from services.worker.exec.streams.readback import Readback
from services.worker.exec.streams.upload import UploadRing

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]
TABLE_COLUMNS = ("table_slots", "table_firsts", "table_counts", "table_offsets", "table_pages")
UPLOAD_WORDS = 1 << 16  # of a step beside its tokens; more costs a larger buffer, once


@dataclass(slots=True)
class DeviceRun:
    """A launched step. batches: to sample, one unless the step was computed in pieces. graph: that which computed it. order: see
    ForwardBatch. known: int32[tokens], ids of decode rows that nothing has sampled, else -1; None where there are none; in
    pieces their rows are left out. readback: of what the forward
    pass gave beside logits. faults: of rows that were given up, by row of the plan. guesses: at what comes behind its decode
    rows. in_pieces: several passes have computed it. result: gives what came of it. All but plan, guesses and result belongs to
    what runs on the streams."""

    plan: BatchPlan
    readback: Readback
    batches: list[Batch] = field(default_factory=list)
    graph: CudaGraph | None = None
    order: I64 | None = None
    known: NDArray[np.int32] | None = None
    prompts: list[PromptPiece] = field(default_factory=list)
    embeddings: list[int] = field(default_factory=list)
    scores: list[ScorePiece] = field(default_factory=list)
    faults: dict[int, RowFault] = field(default_factory=dict)
    launched: list[Launched] = field(default_factory=list)
    error: BaseException | None = None
    in_pieces: bool = False
    guesses: Future[Guesses] = field(default_factory=Future)
    result: Callable[[], StepResult] | None = None

    def guess(self, guesses: Guesses) -> None:
        """Says them to whoever asks, once; what comes later is not heard."""
        if not self.guesses.done():
            self.guesses.set_result(guesses)


def _table_sections(plan: BatchPlan) -> list[tuple[str, NDArray[np.generic]]]:
    """Of an upload; none where no page is mapped."""
    if not len(plan.table_slots):
        return []
    offsets = np.cumsum(plan.table_counts) - plan.table_counts
    assert len(plan.table_slots) == len(plan.table_firsts) == len(plan.table_counts), "columns of updates are equally long"
    assert int(plan.table_counts.sum()) == len(plan.table_pages), "each page belongs to one update"
    columns = (plan.table_slots, plan.table_firsts, plan.table_counts, offsets, plan.table_pages)
    return list(zip(TABLE_COLUMNS, columns, strict=True))


class DeviceRunner:
    """reclaim: gives memory that is free inside the process back to the device, before a step is tried in pieces. max_tokens:
    of one pass, for which buffers are reserved; a step with more is computed in pieces. cut_rows: a row may be computed in
    pieces too; a model whose tokens see later ones (an encoder) needs it whole. max_wanted: tokens whose states or logits may be
    asked for at once. arrivals: what comes into the pools by layers."""

    def __init__(
        self,
        streams: Streams,
        passes: ForwardPass,
        attention: AttentionBackend,
        kernels: StepKernels,
        sampler: StepSampler,
        embeddings: EmbeddingPool,
        relay: Tensor,
        unwritten: Tensor | None,
        reclaim: Callable[[], None],
        max_tokens: int,
        max_wanted: int,
        arrivals: Arrivals,
        cut_rows: bool = True,
    ) -> None:
        self.streams, self.passes, self.attention, self.sampler = streams, passes, attention, sampler
        self._kernels, self._embeddings, self._relay, self._unwritten = kernels, embeddings, relay, unwritten
        self._reclaim = reclaim
        self._arrivals = arrivals
        self._silent = np.zeros(relay.shape[0], dtype=np.bool_)  # slots whose requests end with their prompt, unsampled
        self._max_tokens = max_tokens
        self._max_wanted = max_wanted
        self._cut_rows = cut_rows
        self._ring = UploadRing(streams, 2 * max_tokens + UPLOAD_WORDS)
        self._unsampled: BatchPlan | None = None  # of the forward pass that was launched last, until it is sampled
        self.graphs: StepGraphs | None = None
        self.graph_limits = GraphLimits()
        self.stats = ExecutorStats()

    def forward(self, run: DeviceRun) -> None:
        plan = run.plan
        assert self._unsampled is None, "a step is sampled before the next one's forward pass"
        assert not run.batches and not run.launched, "a step is launched once"
        run.guess({})
        self._unsampled = plan
        try:
            graph = self._graph_for(plan, run.known is not None)
            samples = self._samples(plan)
            columns, given = self._columns(plan, graph, samples, run.known)
            sections = self._sections(plan, columns, given)
            views = self._ring.send(sections if run.known is None or graph is not None else [*sections, ("known", run.known)])
        except BaseException:  # of any kind, no memory for a larger buffer say: a later step may be planned with these pages
            self.map_pages(plan)
            raise
        self.streams.forward_after_schedule()
        with self.streams.on_forward():
            self._arrivals.expect(plan.table_pages)
            self._begin(plan, views)
            if graph is not None and columns is not None:
                self._arrivals.wait_all()  # a graph's layers wait for nobody
                self._replay(run, graph, columns, views)
            elif columns is not None:
                self._eager(run, plan, columns, views)
            self._arrivals.wait_all()

    def sample(
        self, run: DeviceRun, masks: Masks, behind: Masks = NO_MASKS, places: Callable[[Batch], Places] | None = None
    ) -> None:
        """Launches what is left of the step, and its way back to the host. places: of a batch's rows; None: no row waits for
        another."""
        assert not behind, "a runner verifies no guesses"
        assert self._unsampled is run.plan, "a step is sampled after its own forward pass, once"
        self._unsampled = None
        self.sampler.follow(run.plan)
        replay = run.graph.sample.replay if run.graph is not None else None
        for batch in run.batches:
            run.launched.append(self.sampler.launch(batch, masks, replay, None if places is None else places(batch)))
        if self._unwritten is not None:
            with self.streams.on_forward():
                run.readback.add("unwritten", self._unwritten.clone())
        self.release(run)

    def map_pages(self, plan: BatchPlan) -> None:
        """Ahead of the rest of a step, for who computes something before it."""
        if sections := _table_sections(plan):
            views = self._ring.send(sections)
            self.streams.forward_after_schedule()
            with self.streams.on_forward():
                self._arrivals.expect(plan.table_pages)
                self._update_table(views)

    def kept(self, run: DeviceRun, of_pass: tuple[Tensor, ...], first: int, count: int) -> tuple[Tensor, ...]:
        """Copies of what the model keeps of tokens first .. first + count - 1 of the plan. of_pass: [T, H] each, of the one pass
        that has just computed it. On the forward stream."""
        if run.order is None:
            return tuple(each[first : first + count].clone() for each in of_pass)
        places = np.argsort(run.order)[first : first + count].tolist()
        return tuple(torch.cat([each[place : place + 1] for place in places]) for each in of_pass)

    def settle(self) -> None:
        """No step waits any more for what was on its way into the pools."""
        with self.streams.on_forward():
            self._arrivals.wait_all()

    def free_uploads(self) -> None:
        """Once the device has done everything: all that was sent may be overwritten."""
        mark = self.streams.mark_copy()
        self._ring.release(mark)
        self.sampler.ring.release(mark)

    def drop(self) -> None:
        """Lets graphs and memory go; no call may follow."""
        if self.graphs is not None:
            self.graphs.release()

    def release(self, run: DeviceRun) -> None:
        """What the step has sent may be overwritten once the device is past this point: the last results' on the copy stream, or
        one more."""
        self._unsampled = None
        last = run.launched[-1].readback.mark if run.launched and run.readback.empty else None
        mark = last or run.readback.launch()
        self._ring.release(mark)
        self.sampler.ring.release(mark)

    def result(self, run: DeviceRun) -> StepResult:
        """Waits. Raises UnwrittenToken where relayed tokens are checked."""
        plan, tokens = run.plan, np.zeros(run.plan.num_rows, dtype=np.int32)
        host = run.readback.host()
        if "unwritten" in host and int(host["unwritten"][0]):
            raise UnwrittenToken(f"no token was written for one of the slots {plan.slots[plan.num_extend :].tolist()}")
        prompts, faults = self.sampler.wishes.prompts(run.prompts, host)
        vectors = embedded({row: host[f"embedding_{row}"] for row in run.embeddings})
        scores, unsound = self.sampler.wishes.scores(run.scores, host)
        faults |= vectors.faults | unsound
        logprobs: dict[int, RowLogprobs] = {}
        for launched in run.launched:
            outcome, rows = self.sampler.outcome(launched), launched.batch.rows
            assert len(outcome.tokens) == len(rows), "each row that was sampled has a token"
            tokens[rows] = outcome.tokens
            faults |= {int(rows[index]): fault for index, fault in outcome.faults.items()}
            logprobs |= {int(rows[index]): values for index, values in outcome.logprobs.items()}
        faults |= run.faults
        return StepResult(plan.step_id, tokens, faults, logprobs, prompts, vectors.vectors, scores)

    # What a step needs on the device

    def _samples(self, plan: BatchPlan) -> NDArray[np.bool_]:
        """bool[rows]: those that want a token, once the plan's slots are admitted."""
        for slot in plan.admitted:
            self._embeddings.admit(slot)
            self._silent[slot.slot] = not slot.params.samples
        return plan.sample & ~self._silent[plan.slots] if plan.num_extend else plan.sample

    def _graph_for(self, plan: BatchPlan, guessed: bool) -> CudaGraph | None:
        """For decode rows, which all sample, and beside them what is known of begun requests, if it is little. guessed: slots
        have several rows, and all want logits."""
        if self.graphs is None or not plan.sample[plan.num_extend :].all():
            return None
        if plan.num_extend and not self._extends_in_graph(plan):
            return None
        graph = self.graphs.for_rows(int(plan.num_tokens.sum()))
        if guessed and graph is not None and len(graph.space.rows.slots) < int(plan.sample.sum()):
            return None
        return graph

    def _extends_in_graph(self, plan: BatchPlan) -> bool:
        """A graph gives nothing but the logits of sampled rows."""
        if plan.admitted or len(plan.prompt_logprob_rows) or self._silent[plan.slots[: plan.num_extend]].any():
            return False
        return self.graph_limits.hold(plan.starts, plan.num_tokens)

    def _columns(
        self, plan: BatchPlan, graph: CudaGraph | None, samples: NDArray[np.bool_], known: NDArray[np.int32] | None = None
    ) -> tuple[ForwardBatch | None, NDArray[np.int32]]:
        """With the ids that the plan gives, as the pass reads them: of the extend rows, or of all tokens, those of `known` among
        them, where a graph needs them."""
        if not plan.num_rows:
            return None, plan.input_ids
        if graph is None:
            return ForwardBatch.of(plan, samples, self.passes.capacity), plan.input_ids
        if plan.num_extend or known is not None:
            return ForwardBatch.of_known(plan, self.passes.capacity, graph.size, known)
        return ForwardBatch.of_decode(plan, self.passes.capacity, graph.size), plan.input_ids

    def _sections(
        self, plan: BatchPlan, columns: ForwardBatch | None, given: NDArray[np.int32]
    ) -> list[tuple[str, NDArray[np.generic]]]:
        sections: list[tuple[str, NDArray[np.generic]]] = []
        if columns is not None:
            sections += [("columns", columns.words()), ("given", given)]
        sections += _table_sections(plan)
        if plan.admitted:
            sections += self.sampler.admission(plan.admitted).sections()
            sections.append(("admitted", np.array([slot.slot for slot in plan.admitted], dtype=np.int32)))
        if (scored := self.sampler.wishes.of_prompts(plan)) is not None:
            sections += self.sampler.wishes.score_sections(scored)
        return sections

    def _begin(self, plan: BatchPlan, views: Mapping[str, Tensor]) -> None:
        if len(plan.table_slots):
            self._update_table(views)
        if plan.admitted:
            self.sampler.admit(views)
            self._relay.index_fill_(0, views["admitted"].long(), POISON)
        if self._unwritten is not None:
            self._unwritten.zero_()

    def _update_table(self, views: Mapping[str, Tensor]) -> None:
        self._kernels.update_page_table(self.passes.table, DevicePageTableUpdates(*(views[name] for name in TABLE_COLUMNS)))

    # The forward pass

    def _replay(self, run: DeviceRun, graph: CudaGraph, columns: ForwardBatch, views: Mapping[str, Tensor]) -> None:
        assert self.graphs is not None, "a graph is one of these"
        assert columns.total == graph.size, "a graph is replayed with all of its rows"
        self.stats.graph_steps += 1
        graph.words.copy_(views["columns"])
        self.graphs.tell(graph, views["given"] if run.plan.num_extend or run.known is not None else None)
        self.attention.plan(AttentionBatch(columns.starts, columns.num_tokens, 0, graph.rows, graph=graph.size))
        graph.forward.replay()
        run.graph, run.order = graph, columns.order
        slots = run.plan.slots if len(columns.rows) == run.plan.num_rows else run.plan.slots[columns.rows]
        run.batches = [Batch(slots, columns.rows, graph.logits, graph.space, fixed=True)] if len(slots) else []

    def _eager(self, run: DeviceRun, plan: BatchPlan, columns: ForwardBatch, views: Mapping[str, Tensor]) -> None:
        self.stats.eager_steps += 1
        if columns.total > self._max_tokens:
            self._in_pieces(run, plan)
            return
        try:
            self._compute(run, whole(plan), columns, views, kept=False)
        except torch.OutOfMemoryError as error:
            logger.warning("no memory for step %d of %d tokens, computed in pieces: %s", plan.step_id, columns.total, error)
            run.readback, run.batches, run.prompts, run.embeddings, run.scores = Readback(self.streams), [], [], [], []
        else:
            return
        self._in_pieces(run, plan)  # outside of the handler, whose traceback holds tensors

    def _compute(self, run: DeviceRun, piece: Piece, columns: ForwardBatch, views: Mapping[str, Tensor], kept: bool) -> None:
        """kept: other passes follow before sampling, so what it reads must be copied out of their way."""
        assert columns.total <= self._max_tokens, "no pass is larger than what was reserved"
        plan, device = piece.plan, DeviceBatch.of(views["columns"], piece.plan.num_rows)
        ids, rows = self.passes.fresh_rows(columns, device)
        self.attention.plan(AttentionBatch(columns.starts, columns.num_tokens, columns.num_extend, rows))
        self.passes.run(ids, rows, columns, views["given"], views.get("known"))
        prompts = self.sampler.wishes.measure_prompts(plan, ids, self.passes.model.logits, run.readback, f"{len(run.prompts)}_")
        vectors = self._embeddings.pool(plan, self._states)
        scores = self._score(plan, views, run)
        batch = self._batch(piece, columns, device, kept)
        for row, vector in vectors.items():
            run.readback.add(f"embedding_{int(piece.rows[row])}", vector)
        run.embeddings += [int(piece.rows[row]) for row in vectors]
        run.prompts += [replace(prompt, row=int(piece.rows[prompt.row])) for prompt in prompts]
        run.scores += [replace(score, rows=tuple(piece.rows[list(score.rows)].tolist())) for score in scores]
        run.batches += [batch] if batch is not None else []

    def _score(self, plan: BatchPlan, views: Mapping[str, Tensor], run: DeviceRun) -> list[ScorePiece]:
        wishes, logits = self.sampler.wishes, self.passes.model.logits
        scored = wishes.of_prompts(plan)
        return [] if scored is None else wishes.measure_scores(scored, views, logits, run.readback, f"{len(run.scores)}_")

    def _states(self, wanted: Tensor) -> Tensor:
        """See TokenModel.states. A mean wants those of a whole prompt."""
        model = self.passes.model
        if len(wanted) <= self._max_wanted:
            return model.states(wanted)
        return torch.cat([model.states(part).clone() for part in torch.split(wanted, self._max_wanted)])

    def _batch(self, piece: Piece, columns: ForwardBatch, device: DeviceBatch, kept: bool) -> Batch | None:
        """Asks for the logits last: each request for logits overwrites the one before."""
        if not len(columns.rows):
            return None
        logits = self.passes.model.logits(device.sample_indices.long())
        slots, positions = device.sample_slots, device.sample_positions
        if kept:
            logits, slots, positions = logits.clone(), slots.clone(), positions.clone()
        space = self.sampler.passing_space(slots, positions)
        return Batch(columns.sample_slots, piece.rows[columns.rows], logits, space, fixed=False)

    # Out of memory

    def _in_pieces(self, run: DeviceRun, plan: BatchPlan) -> None:
        """Halves what does not fit until it does. Where one token (or a row that stays whole) does not, the row with the longest
        context ends, and the others are tried again."""
        run.in_pieces = True
        piece = whole(plan)
        if run.known is not None:
            piece = select(piece, np.flatnonzero(run.known[np.cumsum(plan.num_tokens) - plan.num_tokens] < 0))
        pending = list(halves(piece, self._cut_rows) or (piece,))
        while pending:
            piece = pending.pop(0)
            if self._fits(run, piece):
                self.stats.pieces += 1
            elif (cut := halves(piece, self._cut_rows)) is not None:
                pending[:0] = cut
            else:
                pending = self._without_largest(run, [piece, *pending])

    def _fits(self, run: DeviceRun, piece: Piece) -> bool:
        if piece.num_tokens > self._max_tokens:
            return False
        done = (len(run.prompts), len(run.embeddings), len(run.batches), len(run.scores))
        self._make_room()
        try:
            columns, given = self._columns(piece.plan, None, self._samples(piece.plan))
            assert columns is not None
            views = self._ring.send(self._sections(piece.plan, columns, given))
            self.streams.forward_after_schedule()
            self._compute(run, piece, columns, views, kept=True)
        except torch.OutOfMemoryError:
            del run.prompts[done[0] :], run.embeddings[done[1] :], run.batches[done[2] :], run.scores[done[3] :]
            return False
        return True

    def _make_room(self) -> None:
        self.streams.synchronize()
        self._ring.release(self.streams.mark_copy())
        self._reclaim()

    def _without_largest(self, run: DeviceRun, pending: Sequence[Piece]) -> list[Piece]:
        lengths = {
            int(row): int(start + count)
            for piece in pending
            for row, start, count in zip(piece.rows, piece.plan.starts, piece.plan.num_tokens, strict=True)
        }
        largest = max(lengths, key=lambda row: lengths[row])
        self.stats.given_up += 1
        self._relay[int(run.plan.slots[largest])].fill_(0)  # a step that is planned already may gather it
        logger.error("no memory for a row of %d tokens of step %d: its request ends", lengths[largest], run.plan.step_id)
        assert largest not in run.faults, "a row is given up once"
        run.faults[largest] = RowFault.OUT_OF_MEMORY
        rest = [select(piece, np.flatnonzero(piece.rows != largest)) for piece in pending]
        return [piece for piece in rest if piece.plan.num_rows]
