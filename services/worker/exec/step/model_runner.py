"""Launches the steps of a model: updates of page table and slots, the forward pass, then sampling.

One thread launches all work, and the forward stream runs it in launch order. The host waits for the device in these cases:

- in result()
- in sample(), if penalties or DRY need tokens that are not on the host yet
- if all upload buffers are in use
- if a step does not fit into the device's memory
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

from rootstock_llm.kernels.contracts.step_ops import DevicePageTableUpdates, StepKernels
from rootstock_llm.services.worker.core.contracts.graph_limits import GraphLimits
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, RowFault, RowLogprobs, StepResult
from rootstock_llm.services.worker.exec.attention.backend import AttentionBackend, AttentionBatch
from rootstock_llm.services.worker.exec.contracts.draft_states import Replays
from rootstock_llm.services.worker.exec.contracts.protocol import NO_MASKS, DraftTokens, ExecutorStats, Masks
from rootstock_llm.services.worker.exec.contracts.step_data import (
    CudaGraph,
    ForwardBatch,
    PromptPiece,
    SampleBatch,
    SampleOrder,
    ScorePiece,
)
from rootstock_llm.services.worker.exec.contracts.step_parts import StepGraphs, StepSampler
from rootstock_llm.services.worker.exec.pools.embedding_pool import EmbeddingPool, finite_vectors
from rootstock_llm.services.worker.exec.pools.kv_pool import Arrivals
from rootstock_llm.services.worker.exec.step.passes import (
    POISON,
    SCRATCH,
    ForwardPass,
    Piece,
    UnwrittenToken,
    halves,
    select,
    whole,
)
from rootstock_llm.services.worker.exec.step.step_experts import ROUTED, StepExperts, routed_tokens
from rootstock_llm.services.worker.exec.streams.copies import Readback, UploadRing
from rootstock_llm.services.worker.exec.streams.cuda_streams import Streams

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]
TABLE, WINDOW = "table", "window"  # prefixes of the sections with updates of the page table and of the window table
UPLOAD_WORDS = 1 << 16  # words of an upload buffer for everything except token ids; the buffer grows if a step needs more


@dataclass(slots=True)
class StepRun:
    """A launched step.

    Any thread may use the fields plan, draft_tokens and result. The other fields belong to the thread that launches steps.
    """

    plan: BatchPlan
    readback: Readback  # results of the forward pass other than logits
    batches: list[SampleBatch] = field(default_factory=list)  # rows to sample, one batch per pass; sample() launches them
    graph: CudaGraph | None = None  # the graph that computed the step, or None for a step without a graph
    order: I64 | None = None  # see ForwardBatch.order
    # int32[tokens of the plan], ids of draft tokens, -1 for other tokens, or None without draft tokens. If the step is computed
    # in pieces, the rows of draft tokens are not computed.
    known: NDArray[np.int32] | None = None
    replays: Replays | None = None  # draft tokens that recurrent layers replay or save; None if there are none
    prompts: list[PromptPiece] = field(default_factory=list)  # prompt log probabilities in the readback
    embeddings: list[int] = field(default_factory=list)  # rows of the plan that have an embedding in the readback
    scores: list[ScorePiece] = field(default_factory=list)  # label log probabilities in the readback
    experts: StepExperts | None = None  # counts and ids of experts; None if the plan requests no experts
    faults: dict[int, RowFault] = field(default_factory=dict)  # rows that did not fit into memory, by row of the plan
    error: BaseException | None = None  # the reason why the step failed
    in_pieces: bool = False  # whether several passes computed the step
    scratch: int = 0  # scratch state, 0 or 1, that the last part of a row has written
    draft_tokens: Future[DraftTokens] = field(default_factory=Future)  # draft tokens by row of the plan, set by publish()
    result: Callable[[], StepResult] | None = None  # waits for the result; set by sample()

    def publish(self, draft_tokens: DraftTokens) -> None:
        """Makes the draft tokens available to Executor.draft_tokens(). Only the first call has an effect."""
        if not self.draft_tokens.done():
            self.draft_tokens.set_result(draft_tokens)


def _columns_of(table: str) -> tuple[str, ...]:
    """Returns the names of the sections with the updates of a table, in the order of DevicePageTableUpdates."""
    return tuple(f"{table}_{name}" for name in ("slots", "firsts", "counts", "offsets", "pages"))


def _table_sections(plan: BatchPlan) -> list[tuple[str, NDArray[np.generic]]]:
    """Returns the sections of an upload with the plan's updates of both tables; empty if there are none."""
    pages = _updates(TABLE, plan.table_slots, plan.table_firsts, plan.table_counts, plan.table_pages)
    return pages + _updates(WINDOW, plan.window_slots, plan.window_firsts, plan.window_counts, plan.window_units)


def _updates(
    table: str, slots: NDArray[np.int32], firsts: NDArray[np.int32], counts: NDArray[np.int32], entries: NDArray[np.int32]
) -> list[tuple[str, NDArray[np.generic]]]:
    if not len(slots):
        return []
    assert len(slots) == len(firsts) == len(counts), "each update of a table has a slot, a first index and a count"
    assert int(counts.sum()) == len(entries), "the updates have as many pages as their counts say"
    return list(zip(_columns_of(table), (slots, firsts, counts, np.cumsum(counts) - counts, entries), strict=True))


class DeviceRunner:
    """Launches steps of one model on the streams of its device. Belongs to the thread that launches steps."""

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
        """Stores the parts, and allocates upload buffers.

        Args:
            relay: int64[slots], see ForwardPass.
            unwritten: see ForwardPass.
            reclaim: returns the allocator's cached memory to the device. It is called before a piece of a step is computed.
            max_tokens: largest number of tokens of one pass. A step with more tokens is computed in pieces.
            max_wanted: largest number of tokens whose states or logits the model returns in one call.
            arrivals: loads that write pages of the pools layer by layer, in parallel with steps.
            cut_rows: whether a row may be cut into pieces. In an encoder, tokens attend to later tokens, so rows must stay whole.
        """
        self.streams, self.passes, self.attention, self.sampler = streams, passes, attention, sampler
        self._kernels, self._embeddings, self._relay, self._unwritten = kernels, embeddings, relay, unwritten
        self._reclaim = reclaim
        self._arrivals = arrivals
        self._prompt_only = np.zeros(relay.shape[0], dtype=np.bool_)  # whether the slot's request samples no token
        self._max_tokens = max_tokens
        self._max_wanted = max_wanted
        self._cut_rows = cut_rows
        self._ring = UploadRing(streams, 2 * max_tokens + UPLOAD_WORDS)
        self._unsampled: BatchPlan | None = None  # plan of the last forward pass until it is sampled, otherwise None
        self.graphs: StepGraphs | None = None
        self.graph_limits = GraphLimits()
        self.stats = ExecutorStats()

    def forward(self, run: StepRun) -> None:
        plan = run.plan
        assert self._unsampled is None, "a step is sampled before the next forward()"
        assert not run.batches, "forward() is called once per step"
        run.publish({})
        self._unsampled = plan
        try:
            graph = self._graph_for(plan, run.known is not None) if run.replays is None else None
            samples = self._samples(plan)
            columns, ids = self._columns(plan, graph, samples, run.known, run.replays)
            sections = self._sections(plan, columns, ids)
            views = self._ring.send(sections if run.known is None or graph is not None else [*sections, ("known", run.known)])
        except BaseException:  # an error of any type, such as no memory for a larger buffer; later plans may use the step's pages
            self.map_pages(plan)
            raise
        self.streams.forward_after_schedule()
        with self.streams.on_forward():
            self._arrivals.expect(plan.table_pages)
            self._begin(plan, views)
            if graph is not None and columns is not None:
                self._arrivals.wait_all()  # the layers of a graph cannot wait for single arrivals
                self._replay(run, graph, columns, views)
            elif columns is not None:
                self._eager(run, plan, columns, views)
            self._arrivals.wait_all()

    def sample(
        self, run: StepRun, masks: Masks, behind: Masks = NO_MASKS, order: Callable[[SampleBatch], SampleOrder] | None = None
    ) -> None:
        """Launches the sampling of the step and the copies of its results to the host.

        Args:
            masks: grammar masks by row of the plan.
            behind: must be empty, because DraftedSteps passes the masks of draft tokens in `masks`.
            order: returns the order of a batch's rows if they verify draft tokens, or None if no row depends on another.
        """
        assert not behind, "the masks of draft tokens are in `masks`"
        assert self._unsampled is run.plan, "sample() is called once per step, directly after its forward()"
        self._unsampled = None
        self.sampler.follow(run.plan)
        replay = run.graph.sample.replay if run.graph is not None else None
        for index, batch in enumerate(run.batches):
            run.batches[index] = self.sampler.launch(batch, masks, replay, None if order is None else order(batch))
        if self._unwritten is not None:
            with self.streams.on_forward():
                run.readback.add("unwritten", self._unwritten.clone())
        if run.experts is not None:
            run.experts.launch(run.readback)
        self.release(run)

    def map_pages(self, plan: BatchPlan) -> None:
        """Applies only the page-table updates of a plan.

        This is needed before forward() if a drafter computes in these pages, and for a failed step, because later steps use its
        pages.
        """
        if sections := _table_sections(plan):
            views = self._ring.send(sections)
            self.streams.forward_after_schedule()
            with self.streams.on_forward():
                self._arrivals.expect(plan.table_pages)
                self._update_tables(views)

    def copied_states(self, run: StepRun, of_pass: tuple[Tensor, ...], first: int, count: int) -> tuple[Tensor, ...]:
        """Copies the hidden states of the tokens first .. first + count - 1 of the plan. Called on the forward stream.

        Args:
            of_pass: hidden states of the pass that has just computed the whole plan, each [T, H], in the order of the pass.
        """
        if run.order is None:
            return tuple(each[first : first + count].clone() for each in of_pass)
        indices = np.argsort(run.order)[first : first + count].tolist()
        return tuple(torch.cat([each[index : index + 1] for index in indices]) for each in of_pass)

    def settle(self) -> None:
        """Makes the forward stream wait for all loads with pages in the tables of the launched step."""
        with self.streams.on_forward():
            self._arrivals.wait_all()

    def free_uploads(self) -> None:
        """Frees all upload buffers. The device must be idle."""
        mark = self.streams.mark_copy()
        self._ring.release(mark)
        self.sampler.ring.release(mark)

    def drop(self) -> None:
        """Releases the graphs. No other call may follow."""
        if self.graphs is not None:
            self.graphs.release()

    def release(self, run: StepRun) -> None:
        """Lets the step's upload buffers be reused as soon as the device has finished the step.

        This point is the end of the copy of the last sampled batch. If the readback has other results, or nothing is sampled, it
        is the end of the readback's copies, which are launched here.
        """
        self._unsampled = None
        sampled = [batch.readback.mark for batch in run.batches if batch.readback is not None]
        last = sampled[-1] if sampled and run.readback.empty else None
        mark = last or run.readback.launch()
        self._ring.release(mark)
        self.sampler.ring.release(mark)

    def result(self, run: StepRun) -> StepResult:
        """Waits for the step and returns its result.

        Raises:
            UnwrittenToken: reads of the relay are checked, and a row has read a slot that was never written.
        """
        plan, tokens = run.plan, np.zeros(run.plan.num_rows, dtype=np.int32)
        host = run.readback.host()
        if "unwritten" in host and int(host["unwritten"][0]):
            slots = plan.slots[plan.num_extend :].tolist()
            raise UnwrittenToken(
                f"step {plan.step_id} read an entry of the relay that was never written. The entry is of one of the slots {slots}"
            )
        prompts, faults = self.sampler.logprobs.prompts(run.prompts, host)
        vectors, vector_faults = finite_vectors({row: host[f"embedding_{row}"] for row in run.embeddings})
        scores, score_faults = self.sampler.logprobs.scores(run.scores, host)
        faults |= vector_faults | score_faults
        logprobs: dict[int, RowLogprobs] = {}
        for batch in run.batches:
            outcome, rows = self.sampler.outcome(batch), batch.rows
            assert len(outcome.tokens) == len(rows), "each row of a batch has a token"
            tokens[rows] = outcome.tokens
            faults |= {int(rows[index]): fault for index, fault in outcome.faults.items()}
            logprobs |= {int(rows[index]): values for index, values in outcome.logprobs.items()}
        faults |= run.faults
        expert_rows, routed = (None, {}) if run.experts is None else run.experts.results(host)
        results = (logprobs, prompts, vectors, scores)
        return StepResult(plan.step_id, tokens, faults, *results, expert_rows=expert_rows, routed_experts=routed)

    # Upload

    def _samples(self, plan: BatchPlan) -> NDArray[np.bool_]:
        """Records the admitted slots, and returns which rows sample a token, bool[rows]."""
        for slot in plan.admitted:
            self._embeddings.admit(slot)
            self._prompt_only[slot.slot] = not slot.params.samples
        return plan.sample & ~self._prompt_only[plan.slots] if plan.num_extend else plan.sample

    def _graph_for(self, plan: BatchPlan, drafted: bool) -> CudaGraph | None:
        """Returns the graph that computes the plan, or None if no graph can.

        A graph computes decode rows if all of them sample. It can also compute a few tokens of extend rows of running requests.

        Args:
            drafted: whether the plan has draft tokens. Then a slot may have several rows, and all of them need logits.
        """
        if self.graphs is None or not plan.sample[plan.num_extend :].all():
            return None
        if len(plan.state_before) and (plan.num_extend or drafted):
            return None  # the tokens of a row would be rows of the graph, which all read the same state
        if plan.num_extend and not self._extends_in_graph(plan):
            return None
        graph = self.graphs.for_rows(int(plan.num_tokens.sum()))
        if drafted and graph is not None and len(graph.batch.inputs.slots) < int(plan.sample.sum()):
            return None
        return graph

    def _extends_in_graph(self, plan: BatchPlan) -> bool:
        """Returns whether a graph may compute the plan's extend rows.

        A graph computes only the logits of sampled rows, so it cannot measure prompts or compute embeddings and scores.
        """
        if plan.admitted or len(plan.prompt_logprob_rows) or self._prompt_only[plan.slots[: plan.num_extend]].any():
            return False
        return self.graph_limits.hold(plan.starts, plan.num_tokens)

    def _columns(
        self,
        plan: BatchPlan,
        graph: CudaGraph | None,
        samples: NDArray[np.bool_],
        known: NDArray[np.int32] | None = None,
        replays: Replays | None = None,
    ) -> tuple[ForwardBatch | None, NDArray[np.int32]]:
        """Returns the columns of the pass and the token ids to upload.

        Args:
            graph: the graph that computes the plan, or None.
            samples: bool[rows], the rows that sample a token.
            known: see StepRun.
            replays: see StepRun.

        Returns:
            The columns, None if the plan has no rows, and the ids. The ids are those of the extend rows. If a graph computes
            extend rows or draft tokens, they are those of all rows of the graph, -1 for a row that reads the relay.
        """
        if not plan.num_rows:
            return None, plan.input_ids
        if graph is None:
            return ForwardBatch.of(plan, samples, self.passes.capacity, replays), plan.input_ids
        if plan.num_extend or known is not None:
            return ForwardBatch.of_known(plan, self.passes.capacity, graph.size, known)
        return ForwardBatch.of_decode(plan, self.passes.capacity, graph.size), plan.input_ids

    def _sections(
        self, plan: BatchPlan, columns: ForwardBatch | None, ids: NDArray[np.int32]
    ) -> list[tuple[str, NDArray[np.generic]]]:
        sections: list[tuple[str, NDArray[np.generic]]] = []
        if columns is not None:
            sections += [("columns", columns.words()), ("ids", ids)]
            if columns.states is not None:
                sections.append(("states", columns.states.ravel()))
            if columns.recurrent is not None:
                sections.append(("recurrent", columns.recurrent.words()))
            if len(plan.routed_rows):
                sections.append((ROUTED, routed_tokens(plan, columns)))
        sections += _table_sections(plan)
        if plan.admitted:
            sections += self.sampler.admission(plan.admitted).sections()
            sections.append(("admitted", np.array([slot.slot for slot in plan.admitted], dtype=np.int32)))
        if (scored := self.sampler.logprobs.scored_rows(plan)) is not None:
            sections += self.sampler.logprobs.score_sections(scored)
        return sections

    def _begin(self, plan: BatchPlan, views: Mapping[str, Tensor]) -> None:
        self._update_tables(views)
        if plan.admitted:
            self.sampler.admit(views)
            self._relay.index_fill_(0, views["admitted"].long(), POISON)
        if self._unwritten is not None:
            self._unwritten.zero_()

    def _update_tables(self, views: Mapping[str, Tensor]) -> None:
        for name, table in ((TABLE, self.passes.table), (WINDOW, self.passes.window_table)):
            if f"{name}_slots" in views:
                assert table is not None, "only plans for windowed layers have units of windows"
                self._kernels.update_page_table(table, DevicePageTableUpdates(*(views[each] for each in _columns_of(name))))

    # Forward pass

    def _replay(self, run: StepRun, graph: CudaGraph, columns: ForwardBatch, views: Mapping[str, Tensor]) -> None:
        assert self.graphs is not None, "a graph is replayed only if graphs are captured"
        assert columns.total == graph.size, "the columns are padded to the size of the graph"
        self.stats.graph_steps += 1
        graph.words.copy_(views["columns"])
        if graph.states is not None:
            graph.states.copy_(views["states"].view(graph.states.shape))
        self.graphs.set_known(graph, views["ids"] if run.plan.num_extend or run.known is not None else None)
        self.attention.plan(AttentionBatch(columns.starts, columns.num_tokens, 0, graph.rows, graph=graph.size))
        graph.forward.replay()
        self._add_experts(run, run.plan, np.arange(run.plan.num_rows), graph.size, views)
        run.graph, run.order = graph, columns.order
        slots = run.plan.slots if len(columns.rows) == run.plan.num_rows else run.plan.slots[columns.rows]
        run.batches = [replace(graph.batch, slots=slots, rows=columns.rows)] if len(slots) else []

    def _eager(self, run: StepRun, plan: BatchPlan, columns: ForwardBatch, views: Mapping[str, Tensor]) -> None:
        self.stats.eager_steps += 1
        if columns.total > self._max_tokens:
            self._in_pieces(run, plan)
            return
        try:
            self._compute(run, whole(plan), columns, views, copy_inputs=False)
        except torch.OutOfMemoryError as error:
            logger.warning("no memory for step %d of %d tokens; it is computed in pieces: %s", plan.step_id, columns.total, error)
            run.readback, run.batches, run.prompts, run.embeddings, run.scores = Readback(self.streams), [], [], [], []
            run.experts = None
        else:
            return
        self._in_pieces(run, plan)  # outside of the handler: there, the traceback would keep tensors alive

    def _compute(self, run: StepRun, piece: Piece, columns: ForwardBatch, views: Mapping[str, Tensor], copy_inputs: bool) -> None:
        """Launches the forward pass of a piece and the measurements that its tokens need.

        Args:
            copy_inputs: whether the inputs of sampling are copied. This is necessary if the step has more passes, because they
                run before sampling and overwrite the inputs.
        """
        assert columns.total <= self._max_tokens, "a pass has at most max_tokens tokens"
        plan, words = piece.plan, views["columns"]
        ids, rows = self.passes.fresh_rows(columns, words, views.get("states"), views.get("recurrent"))
        self.attention.plan(AttentionBatch(columns.starts, columns.num_tokens, columns.num_extend, rows))
        self.passes.run(ids, rows, columns, views["ids"], views.get("known"))
        prompts = self.sampler.logprobs.measure_prompts(plan, ids, self.passes.model.logits, run.readback, f"{len(run.prompts)}_")
        vectors = self._embeddings.pool(plan, self._states)
        scores = self._score(plan, views, run)
        batch = self._batch(piece, columns, words, copy_inputs)
        for row, vector in vectors.items():
            run.readback.add(f"embedding_{int(piece.rows[row])}", vector)
        run.embeddings += [int(piece.rows[row]) for row in vectors]
        run.prompts += [replace(prompt, row=int(piece.rows[prompt.row])) for prompt in prompts]
        run.scores += [replace(score, rows=tuple(piece.rows[list(score.rows)].tolist())) for score in scores]
        run.batches += [batch] if batch is not None else []
        self._add_experts(run, plan, piece.rows, columns.total, views)

    def _add_experts(self, run: StepRun, plan: BatchPlan, rows: I64, total: int, views: Mapping[str, Tensor]) -> None:
        """Launches the collection of the experts that the plan of a pass asks for.

        Args:
            plan: the plan of the pass.
            rows: row of the whole plan for each row of the plan.
            total: tokens of the pass, padding included.
            views: the upload of the pass.
        """
        if plan.counts_experts or len(plan.routed_rows):
            run.experts = run.experts or StepExperts()
            run.experts.add(plan, rows, *self.passes.routed_experts(total), views, run.readback)

    def _score(self, plan: BatchPlan, views: Mapping[str, Tensor], run: StepRun) -> list[ScorePiece]:
        logprobs, logits = self.sampler.logprobs, self.passes.model.logits
        scored = logprobs.scored_rows(plan)
        return [] if scored is None else logprobs.measure_scores(scored, views, logits, run.readback, f"{len(run.scores)}_")

    def _states(self, wanted: Tensor) -> Tensor:
        """Returns TokenModel.states() for any number of tokens. Mean pooling needs the states of a whole prompt."""
        model = self.passes.model
        if len(wanted) <= self._max_wanted:
            return model.states(wanted)
        return torch.cat([model.states(part).clone() for part in torch.split(wanted, self._max_wanted)])

    def _batch(self, piece: Piece, columns: ForwardBatch, words: Tensor, copy_inputs: bool) -> SampleBatch | None:
        """Returns the rows to sample, or None if no row samples.

        No call of the model's logits() may follow before the rows are sampled, because it would overwrite the logits.
        """
        if not len(columns.rows):
            return None
        slots, positions, indices = columns.sample_columns(words)
        logits = self.passes.model.logits(indices.long())
        if copy_inputs:
            logits, slots, positions = logits.clone(), slots.clone(), positions.clone()
        inputs = self.sampler.step_inputs(slots, positions)
        return SampleBatch.of(logits, inputs, columns.sample_slots, piece.rows[columns.rows])

    # Out of memory

    def _in_pieces(self, run: StepRun, plan: BatchPlan) -> None:
        """Computes a step in pieces. A piece that does not fit into memory is halved.

        If a piece cannot be halved and does not fit, the row with the longest context gets a fault, and the other pieces are
        tried again.
        """
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

    def _fits(self, run: StepRun, piece: Piece) -> bool:
        """Computes a piece. Returns False, and leaves `run` unchanged, if the piece does not fit into memory."""
        if piece.num_tokens > self._max_tokens:
            return False
        num_routed = 0 if run.experts is None else len(run.experts.parts)
        done = (len(run.prompts), len(run.embeddings), len(run.batches), len(run.scores))
        self._free_memory()
        piece, scratch = self._with_scratch(run, piece)
        try:
            columns, ids = self._columns(piece.plan, None, self._samples(piece.plan), replays=run.replays)
            assert columns is not None
            views = self._ring.send(self._sections(piece.plan, columns, ids))
            self.streams.forward_after_schedule()
            self._compute(run, piece, columns, views, copy_inputs=True)
        except torch.OutOfMemoryError:
            del run.prompts[done[0] :], run.embeddings[done[1] :], run.batches[done[2] :], run.scores[done[3] :]
            if run.experts is not None:
                del run.experts.parts[num_routed:]
            return False
        run.scratch = scratch
        return True

    def _with_scratch(self, run: StepRun, piece: Piece) -> tuple[Piece, int]:
        """Replaces the units SCRATCH of a part of a row by scratch states of the pool.

        The parts of a row are computed in their order. Each part reads the scratch state that the part before it has written, and
        writes the other one, so that the part can be repeated.

        Returns:
            The piece, and StepRun.scratch after it is computed.
        """
        plan = piece.plan
        if SCRATCH not in plan.state_before and SCRATCH not in plan.state_after:
            return piece, run.scratch
        assert plan.num_rows == 1, "only a part of one row has scratch states"
        first, before, after, left = self.passes.pool.num_states, plan.state_before, plan.state_after, run.scratch
        if SCRATCH in before:
            before = np.full(1, first + run.scratch, dtype=np.int32)
        if SCRATCH in after:
            left = 1 - run.scratch
            after = np.full(1, first + left, dtype=np.int32)
        return replace(piece, plan=replace(plan, state_before=before, state_after=after)), left

    def _free_memory(self) -> None:
        self.streams.synchronize()
        self._ring.release(self.streams.mark_copy())
        self._reclaim()

    def _without_largest(self, run: StepRun, pending: Sequence[Piece]) -> list[Piece]:
        """Gives the row with the longest context a fault, and returns the pieces without this row."""
        lengths = {
            int(row): int(start + count)
            for piece in pending
            for row, start, count in zip(piece.rows, piece.plan.starts, piece.plan.num_tokens, strict=True)
        }
        largest = max(lengths, key=lambda row: lengths[row])
        self.stats.given_up += 1
        self._relay[int(run.plan.slots[largest])].fill_(0)  # the next step may be planned already and read it
        logger.error(
            "no memory for a row of %d tokens in step %d: its request ends with an error", lengths[largest], run.plan.step_id
        )
        assert largest not in run.faults, "a row gets at most one fault"
        run.faults[largest] = RowFault.OUT_OF_MEMORY
        rest = [select(piece, np.flatnonzero(piece.rows != largest)) for piece in pending]
        return [piece for piece in rest if piece.plan.num_rows]
