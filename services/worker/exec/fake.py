"""An executor without a model. Its KV is token ids, and the next token is a function of the KV that a row reads.

A row that reads a wrong, stale or unwritten page therefore samples a wrong token. If a step reads from the relay (future_map)
before a token was written there, forward() raises ExecutorError. The duration of a step is computed from its size. wait() sleeps
until this duration has passed on the given clock.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.cache_groups import CacheGroup, CacheKind
from rootstock_llm.services.worker.core.contracts.experts import ExpertShape
from rootstock_llm.services.worker.core.contracts.graph_limits import GraphLimits, step_rereads
from rootstock_llm.services.worker.core.contracts.plan import (
    BatchPlan,
    PromptLogprobs,
    RowFault,
    RowLogprobs,
    SamplingParams,
    StepResult,
)
from rootstock_llm.services.worker.core.contracts.reservations import (
    OpenReservation,
    ReservationEvents,
    ReservationReleased,
    proof,
)
from rootstock_llm.services.worker.core.contracts.transfers import (
    EARLY_S,
    NO_PAGES,
    UNASKED,
    Deleted,
    Fact,
    OperationKind,
    PageOperation,
    Pull,
)
from rootstock_llm.services.worker.core.tiers.page_keys import tag_of
from rootstock_llm.services.worker.exec.contracts.operations import (
    DeleteStored,
    Operation,
    OperationRefused,
    ReleaseMemory,
    StartProfile,
    StopProfile,
)
from rootstock_llm.services.worker.exec.contracts.protocol import NO_MASKS, DraftTokens, ExecutorError, Masks, Run

I32 = NDArray[np.int32]
FAKE_EMBEDDING_SIZE = 4
TORN = -7  # content of a unit that was put together from parts of several units


@dataclass(frozen=True, slots=True)
class TimeModel:
    """A linear model of the duration of a step, in seconds.

    A step takes base + per_prefill_token * extend tokens + per_row * rows + per_context_token * sum of the rows' lengths. KV that
    a graph reads again counts as context. If there are graphs, a step that no graph can compute takes eager_step longer: a step
    that admits a request, or exceeds graph_rows or graph_rereads.
    """

    base: float = 0.0  # seconds of every step; with graphs, of every replayed step
    per_prefill_token: float = 0.0  # seconds per token of the extend rows
    per_row: float = 0.0  # seconds per row
    per_context_token: float = 0.0  # seconds per token that a row attends to
    per_page_moved: float = 0.0  # seconds per page of a page operation, which runs in parallel with steps
    eager_step: float = 0.0  # additional seconds of a step without a graph
    graph_rows: int = 0  # rows of the largest graph, 0 for no graphs
    graph_rereads: int = 0  # see GraphLimits.rereads

    @property
    def graphs(self) -> GraphLimits:
        return GraphLimits(self.graph_rows, self.graph_rereads, self.eager_step / self.base if self.base else 0.0)

    def seconds(self, plan: BatchPlan) -> float:
        context = float((plan.starts + plan.num_tokens).sum())
        launched = 0.0
        if self.graph_rows:
            if not plan.admitted and self.graphs.hold(plan.starts, plan.num_tokens):
                context += step_rereads(plan.starts, plan.num_tokens)
            else:
                launched = self.eager_step
        return (
            self.base
            + launched
            + self.per_prefill_token * len(plan.input_ids)
            + self.per_row * plan.num_rows
            + self.per_context_token * context
        )


def hashed_token(context: I32, vocab_size: int) -> int:
    """Returns the next token of the fake model, in [0, vocab_size), which depends on every token of the context."""
    return zlib.crc32(context.tobytes()) % vocab_size


def first_allowed(token: int, mask: NDArray[np.uint32], vocab_size: int) -> int:
    """Returns the first allowed token from `token` on, wrapping at the end of the vocabulary; `token` if none is allowed."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
    allowed = np.flatnonzero(np.roll(bits, -token))
    return (token + int(allowed[0])) % vocab_size if len(allowed) else token


def fake_logprobs(token: int, top: int, chosen: int) -> RowLogprobs:
    return RowLogprobs(-float(token), (token,) * top, (-float(token),) * top, (-float(token),) * chosen)


def fake_embedding(context: I32) -> NDArray[np.float32]:
    """Returns an embedding, float32[FAKE_EMBEDDING_SIZE], that depends on every token."""
    return np.frombuffer(zlib.crc32(context.tobytes()).to_bytes(4, "little"), dtype=np.uint8).astype(np.float32)


def fake_label_logprobs(context: I32, label_token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Returns label log probabilities from -8 to -1, float32[labels]. Each depends on all tokens of the context and the label."""
    digest = zlib.crc32(context.tobytes())
    return np.array([-1.0 - zlib.crc32(b"%d" % label, digest) % 8 for label in label_token_ids], dtype=np.float32)


def fake_experts(tokens: I32, first: int, shape: ExpertShape) -> NDArray[np.uint16]:
    """Returns the experts that the fake model chooses, uint16[tokens, layers, chosen], by token, position and layer.

    Args:
        tokens: int32[n], tokens at consecutive positions.
        first: position of the first token.
        shape: the experts of the model.
    """
    positions = np.arange(first, first + len(tokens))
    start = (tokens * 7 + positions * 3)[:, None, None] + np.array(shape.layers)[None, :, None] * 5
    ids: NDArray[np.int64] = start + np.arange(shape.num_chosen)
    return (ids % shape.num_experts).astype(np.uint16)


@dataclass(slots=True)
class FakeRun:
    """A launched step of the fake executor. sample() adds the results."""

    plan: BatchPlan
    counts: I32  # [rows], tokens that each row sampled; 1 before sample()
    ready_at: float  # time on the clock at which the step ends
    faults: dict[int, RowFault]  # by row of the plan
    predicted: NDArray[np.bool_]  # bool[rows], whether the row's draft tokens came from the request's prediction
    wrong: set[int]  # rows that read window units or a state with other content than their context
    sampled: bool = False
    tokens: I32 = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    embeddings: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    label_logprobs: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    expert_rows: I32 | None = None  # see StepResult
    routed_experts: dict[int, NDArray[np.uint16]] = field(default_factory=dict)


def _own(run: Run) -> FakeRun:
    assert isinstance(run, FakeRun), "a run is passed back to the executor that returned it"
    return run


class FakeExecutor:
    """Implements contracts.protocol.Executor without a device. Tests and simulators set its public attributes."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_slots: int,
        pages_per_request: int,
        vocab_size: int,
        next_token: Callable[[I32, int], int] = hashed_token,
        draft: Callable[[I32, int], I32] | None = None,
        time_model: TimeModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        groups: Sequence[CacheGroup] = (),
        experts: ExpertShape | None = None,
    ) -> None:
        """Allocates the fake KV.

        Args:
            pages_per_request: pages of a slot's row in the page table.
            next_token: (context int32[n], vocab_size) -> the next token.
            draft: (context, number) -> `number` draft tokens. It is called if the request's prediction has too few tokens left.
                None for a function that drafts the model's own next token about half of the time. At output token i, the draft
                tokens from a prediction begin with token i of the prediction.
            time_model: duration of steps and page operations. None if they take no time.
            clock: returns seconds.
            sleep: waits for a number of seconds on that clock, until a step has ended.
            experts: experts that the executor pretends to have; None for a model without experts.
        """
        self._experts = experts
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._next_token = next_token
        self._draft = draft or self._half_right
        self._time = time_model or TimeModel()
        self._clock, self._sleep = clock, sleep
        self._busy_until = 0.0
        self.kv: I32 = np.full((num_pages, page_size), -1, dtype=np.int32)
        self.page_table: I32 = np.full((num_slots, pages_per_request), -1, dtype=np.int32)
        self._kinds = [group.kind for group in groups]
        units = {group.kind: group.num_units for group in groups}
        self._window = next((group.window for group in groups if group.kind is CacheKind.WINDOW), 0)
        self.window_kv: I32 = np.full((units.get(CacheKind.WINDOW, 0), page_size), -1, dtype=np.int32)
        self.window_table: I32 = np.full_like(self.page_table, -1)
        # Units of the STATE group: each is the checksum of all tokens of a sequence.
        self.states: NDArray[np.uint32] = np.zeros(units.get(CacheKind.STATE, 0), dtype=np.uint32)
        # Saved inputs of draft tokens by slot: (first position, tokens) of the last two rows with draft tokens, newest first.
        self._saved: dict[int, list[tuple[int, I32]]] = {}
        self.future_map: I32 = np.full(num_slots, -1, dtype=np.int32)
        self.lengths: I32 = np.zeros(num_slots, dtype=np.int32)  # number of tokens with valid KV, by slot
        # Host tier by host page: the tokens of a page, or a part of a unit, see parts().
        self.host: dict[int, I32] = {}
        self.storage: dict[bytes, I32] = {}  # storage tier by page key or key of a part, with the same values
        self.peers: dict[str, FakeExecutor] = {}  # remote workers by the address at which their KV is read
        self.open_reservations: dict[int, OpenReservation] = {}
        self.released_reservations: list[ReservationReleased] = []  # reservations that their readers have released
        self._moving: list[tuple[float, PageOperation]] = []  # (end time, operation), in the order of their ends
        self._moving_until = 0.0  # end time of the last operation
        # Loads that were reported early and whose pages are not copied yet: (end time, operation, number of pages).
        self._landing: list[tuple[float, PageOperation, int]] = []
        self._loaded: list[
            tuple[float, Fact]
        ] = []  # loads that were reported early and copied: (end time, fact with the duration)
        self.early_s = EARLY_S  # seconds before the end of a load at which its fact is reported
        self._params: dict[int, SamplingParams] = {}  # by slot
        self._drafted_for: dict[int, bool] = {}  # SlotParams.drafted_for by slot
        self._predictions: dict[int, tuple[int, I32]] = {}  # (position of the first output token, prediction) by slot
        self.fail_steps: set[int] = set()  # ids of steps whose wait() raises
        # Returns the number of pages that an operation moves before it fails. By default, all operations move all pages.
        self.pages_moved: Callable[[PageOperation], int] = lambda operation: len(operation.keys)
        self.row_faults: dict[int, dict[int, RowFault]] = {}  # faults to report: by step id, then by row

    def forward(self, plan: BatchPlan) -> FakeRun:
        assert len(plan.starts) == len(plan.num_tokens) == len(plan.sample) == plan.num_rows, (
            "all columns of the plan have one element per row"
        )
        self._busy_until = max(self._busy_until, self._land(plan.table_pages))
        _apply_table(self.page_table, plan.table_slots, plan.table_firsts, plan.table_counts, plan.table_pages)
        _apply_table(self.window_table, plan.window_slots, plan.window_firsts, plan.window_counts, plan.window_units)
        wrong: set[int] = set()
        for admitted in plan.admitted:
            self.future_map[admitted.slot] = -1
            self._params[admitted.slot], self._drafted_for[admitted.slot] = admitted.params, admitted.drafted_for
            self._predictions[admitted.slot] = admitted.num_prompt_tokens, admitted.prediction
        at, predicted = 0, np.zeros(plan.num_rows, dtype=np.bool_)
        for row in range(plan.num_rows):
            slot, start, count = int(plan.slots[row]), int(plan.starts[row]), int(plan.num_tokens[row])
            if row < plan.num_extend:
                self.lengths[slot] = start
                ids = plan.input_ids[at : at + count]
                at += count
            else:
                ids = self.future_map[slot : slot + 1]
                if ids[0] < 0:
                    raise ExecutorError(f"step {plan.step_id}: slot {slot} reads a token from the relay that was never sampled")
                before, start = start, int(self.lengths[slot])
                assert start <= before if len(plan.drafts) else start == before, (
                    "a decode row begins at the first position without KV"
                )
            self._write(slot, start, ids)
            if count > len(ids):
                assert self._drafted_for[slot], "draft tokens are planned only for requests that were admitted with drafted_for"
                draft_tokens, predicted[row] = self._proposed(slot, self._read(slot, start + 1), count - 1)
                self._write(slot, start + 1, draft_tokens)
                ids = np.concatenate((ids, draft_tokens))
            if not self._advance_units(plan, row, slot, start, ids):
                wrong.add(row)
        assert at == len(plan.input_ids), "each position of an extend row has a token"
        begin = max(self._busy_until, self._clock())
        self._busy_until = begin + self._time.seconds(plan)
        counts = np.ones(plan.num_rows, dtype=np.int32)
        return FakeRun(plan, counts, self._busy_until, self.row_faults.get(plan.step_id, {}), predicted, wrong)

    def _advance_units(self, plan: BatchPlan, row: int, slot: int, start: int, ids: I32) -> bool:
        """Writes a row's window units and states. Returns whether the units and the state that the row reads match its context.

        Args:
            ids: the row's tokens, with draft tokens.
        """
        fits = True
        context = self._read(slot, start + len(ids))
        if len(self.window_kv):
            positions = np.arange(max(0, start - self._window + 1), start + len(ids))
            units = self.window_table[slot, positions // self._page_size]
            new = positions >= start
            assert units[new].min() >= 0, "a row writes to window units that a plan has named"
            self.window_kv[units[new], positions[new] % self._page_size] = ids
            fits = bool((self.window_kv[units, positions % self._page_size] == context[positions]).all() and units.min() >= 0)
        return fits and (not len(self.states) or self._advance_state(plan, row, slot, start, context, ids))

    def _advance_state(self, plan: BatchPlan, row: int, slot: int, start: int, context: I32, ids: I32) -> bool:
        """Replays accepted draft tokens and writes a row's states. Returns whether the state that it reads fits its context."""
        before, after, cut = int(plan.state_before[row]), int(plan.state_after[row]), int(plan.state_cuts[row])
        stands_at, is_extend, saved = int(plan.state_starts[row]), row < plan.num_extend, self._saved.setdefault(slot, [])
        state = int(self.states[before]) if before >= 0 else 0
        fits = state == zlib.crc32(context[:stands_at].tobytes())
        if stands_at < start:
            replayed = next((tokens for first, tokens in saved if first == stands_at), None)
            assert replayed is not None and len(replayed) >= start - stands_at, "replayed tokens have saved inputs"
            if 0 < cut <= start - stands_at and not is_extend:
                self.states[plan.state_at_cut[row]] = zlib.crc32(replayed[:cut].tobytes(), state)
            state = zlib.crc32(replayed[: start - stands_at].tobytes(), state)
        if is_extend and cut:
            self.states[plan.state_at_cut[row]] = zlib.crc32(ids[:cut].tobytes(), state)
        if len(plan.drafts) and plan.drafts[row]:
            self.states[after] = state
            self._saved[slot] = [(start, ids), *saved[:1]]
        else:
            self.states[after] = zlib.crc32(ids.tobytes(), state)
        if is_extend:
            saved.clear()
        return fits

    def _proposed(self, slot: int, context: I32, number: int) -> tuple[I32, bool]:
        """Returns draft tokens of a slot, and whether they come from its prediction."""
        output_at, prediction = self._predictions[slot]
        predicted = prediction[len(context) - output_at :][:number]
        return (predicted, True) if len(predicted) == number else (self._draft(context, number), False)

    def draft_tokens(self, run: Run) -> DraftTokens:
        plan, found = _own(run).plan, {}
        for row in np.flatnonzero(plan.drafts).tolist():
            slot, drafted = int(plan.slots[row]), int(plan.drafts[row])
            known = int(self.lengths[slot]) + 1
            found[row] = self._read(slot, known + drafted)[known:].tolist()
        return found

    def sample(self, run: Run, masks: Masks, behind: Masks = NO_MASKS) -> None:
        run = _own(run)
        plan = run.plan
        assert not run.sampled, "a step is sampled once"
        assert masks.keys() <= set(plan.mask_rows.tolist()), "only mask rows have a mask"
        run.sampled = True
        tokens: list[int] = []
        for row in range(plan.num_rows):
            params = self._params[int(plan.slots[row])]
            samples = bool(plan.sample[row]) and params.samples
            own = self._sample_row(plan, row, masks.get(row), behind.get(row)) if samples else [-1]
            own = [(token + 1) % self._vocab_size for token in own] if row in run.wrong and samples else own
            if params.top_logprobs >= 0 and samples:
                top, chosen = params.top_logprobs, len(params.logprob_token_ids)
                run.logprobs |= {len(tokens) + index: fake_logprobs(token, top, chosen) for index, token in enumerate(own)}
            if plan.sample[row] and not params.samples:
                self._end_with_prompt(run, row, params)
            tokens += own
            run.counts[row] = len(own)
        run.tokens = np.array(tokens, dtype=np.int32)
        for i, row in enumerate(plan.prompt_logprob_rows.tolist()):
            run.prompt_logprobs[row] = self._prompt_logprobs(plan, i, row)
        if plan.counts_experts or len(plan.routed_rows):
            assert self._experts is not None, "only plans for a model with experts ask for them"
            self._route(run, self._experts)

    def wait(self, run: Run) -> StepResult:
        run = _own(run)
        assert run.sampled, "a step is sampled before wait()"
        if (left := run.ready_at - self._clock()) > 0:
            self._sleep(left)
        if run.plan.step_id in self.fail_steps:
            raise ExecutorError(f"step {run.plan.step_id} is in fail_steps")
        drafted = run.plan.drafts if len(run.plan.drafts) else None
        counts = None if drafted is None else run.counts
        predicted = run.predicted if run.predicted.any() else None
        results = (run.logprobs, run.prompt_logprobs, run.embeddings, run.label_logprobs, counts, drafted, predicted)
        seconds = self._time.seconds(run.plan)
        experts = run.expert_rows, run.routed_experts
        return StepResult(run.plan.step_id, run.tokens, run.faults, *results, *experts, seconds=seconds)

    def transfer(self, operations: Sequence[PageOperation]) -> None:
        """Queues the operations, which run one after another. Each takes the time of its pages and moves them when it ends.

        The fact of a load is reported early_s seconds before its end. The first step whose page-table updates have a page of the
        load waits for the whole load.
        """
        for operation in operations:
            begin = max(self._moving_until, self._busy_until, self._clock())
            self._moving_until = begin + self._time.per_page_moved * len(operation.keys)
            self._moving.append((self._moving_until, operation))

    @property
    def num_moving(self) -> int:
        """Number of page operations that have not ended."""
        return len(self._moving) + len(self._landing) + len(self._loaded)

    def kv_after_loads(self) -> I32:
        """Returns a copy of the KV with the pages of all loads that were reported early."""
        kv = self.kv.copy()
        for _, operation, count in self._landing:
            kv[operation.pages[:count]] = [self.host[page] for page in operation.host_pages[:count].tolist()]
        return kv

    def _land(self, pages: I32 | None = None) -> float:
        """Copies the pages of early-reported loads, up to the last load that has ended or whose pages a step needs now.

        Args:
            pages: pages that a step needs now, or None to copy the pages of all loads.

        Returns:
            The latest end time of the copied loads, 0 if no load was copied.
        """
        if not self._landing:
            return 0.0
        waited, now = 0.0, self._clock()
        awaited = [pages is None or until <= now or bool(np.isin(pages, op.pages).any()) for until, op, _ in self._landing]
        # Loads end in order. The loads before the last needed one are therefore copied, too, even if their pages are reused.
        count = max((at + 1 for at, is_awaited in enumerate(awaited) if is_awaited), default=0)
        landing, self._landing = self._landing[:count], self._landing[count:]
        for until, operation, num_pages in landing:
            self._load(operation, num_pages)
            self._loaded.append((until, Fact(UNASKED, loaded=(num_pages, self._time.per_page_moved * num_pages))))
            waited = max(waited, until)
        return waited

    def wake_on_facts(self, wake: Callable[[], None]) -> None:
        """Does nothing, because the clock alone decides when an operation ends."""

    def change_reservations(self, events: ReservationEvents) -> None:
        for closed in events.closed:
            self.open_reservations.pop(closed.number, None)
        self.open_reservations |= {opened.reservation.number: opened for opened in events.opened}
        for source in events.released:
            peer = self.peers.get(source.address)
            opened = None if peer is None else peer.open_reservations.get(source.reservation.number)
            if peer is not None and opened is not None and opened.reservation == source.reservation:
                peer.released_reservations.append(ReservationReleased(opened.reservation, opened.opening))

    def facts(self) -> list[Fact]:
        self._land(NO_PAGES)
        done = [fact for until, fact in self._loaded if until <= self._clock()]
        self._loaded = [(until, fact) for until, fact in self._loaded if until > self._clock()]
        while self._moving and self._report_at(*self._moving[0]) <= self._clock():
            until, operation = self._moving.pop(0)
            done.append(self._load_fact(until, operation) if operation.kind is OperationKind.LOAD else self._moved(operation))
        return done

    def _report_at(self, until: float, operation: PageOperation) -> float:
        return until - self.early_s if operation.kind is OperationKind.LOAD and not operation.group else until

    def _load_fact(self, until: float, operation: PageOperation) -> Fact:
        """Returns the fact of a load. If the load has ended, its pages are copied first; otherwise, the fact is an early one."""
        count = self.pages_moved(operation)
        if count and until > self._clock() and not operation.group:
            self._landing.append((until, operation, count))
            return Fact(operation.op_id, count, early=True)
        self._land()
        self._load(operation, count)
        return Fact(operation.op_id, count, self._time.per_page_moved * count)

    def _load(self, operation: PageOperation, count: int) -> None:
        if count:
            self._put(operation, [self.host[page] for page in operation.host_pages[:count].tolist()])

    def _put(self, operation: PageOperation, rows: Sequence[I32]) -> None:
        """Writes the first pages of an operation, or its first units of which all parts are in `rows`."""
        if not operation.group:
            self.kv[operation.pages[: len(rows)]] = rows
            return
        size = operation.num_parts
        for at, unit in enumerate(operation.pages[: len(rows) // size].tolist()):
            parts = rows[at * size : (at + 1) * size]
            heads = [part[:2].tolist() for part in parts]
            contents = {part[2:].tobytes() for part in parts}
            is_whole = heads == [[operation.group, part] for part in range(size)] and len(contents) == 1
            self._units_of(operation.group)[unit] = parts[0][2:] if is_whole else TORN

    def _rows(self, operation: PageOperation) -> list[I32]:
        """Returns the contents of an operation's pages, or of the parts of its units."""
        if not operation.group:
            return list(self.kv[operation.pages].copy())
        return self.parts(operation.group, operation.pages, operation.num_parts)

    def parts(self, group: int, units: I32, num_parts: int) -> list[I32]:
        """Returns the parts of units. To detect mixed parts, each has the group, the part number and the unit's whole content."""
        contents = self._units_of(group)[units]
        return [np.array([group, part, *content], dtype=np.int32) for content in contents for part in range(num_parts)]

    def _units_of(self, group: int) -> I32:
        """Returns int32[units, n], a view of the units of a group (PageOperation.group)."""
        is_window = self._kinds[group - 1] is CacheKind.WINDOW
        return self.window_kv if is_window else self.states.view(np.int32)[:, None]

    def _moved(self, operation: PageOperation) -> Fact:
        """Moves the pages of an operation that is not a load, and returns its fact."""
        self._land()
        count = self.pages_moved(operation)
        if operation.pull is not None and count:
            count = self._pulled(operation, operation.pull, count)
        keys, host_pages = operation.keys[:count], operation.host_pages[:count].tolist()
        stored: tuple[bytes, ...] = ()
        match operation.kind:
            case OperationKind.BACK_UP:
                self.host |= zip(host_pages, self._rows(operation)[:count], strict=True)
            case OperationKind.STORE:
                stored = tuple(key for key in keys if key not in self.storage)
                self.storage |= zip(keys, [self.host[page] for page in host_pages], strict=True)
            case OperationKind.FETCH if count:
                self._put(operation, [self.storage[key] for key in keys])
        return Fact(operation.op_id, count, self._time.per_page_moved * count, stored)

    def _pulled(self, operation: PageOperation, pull: Pull, count: int) -> int:
        """Copies pages or parts of units from the fake executor of a remote worker. Returns their number: `count` or 0."""
        peer, reservation = self.peers.get(pull.source.address), pull.source.reservation
        opened = None if peer is None else peer.open_reservations.get(reservation.number)
        if peer is None or opened is None or opened.reservation != reservation:
            return 0
        group, size = operation.group, operation.num_parts
        rows = pull.first + count
        end = opened.units_end if group else rows
        has_rows = rows <= (len(opened.units[group - 1]) * size if opened.units else 0) if group else rows <= len(opened.pages)
        tokens = opened.tokens[: end * self._page_size * self.kv.itemsize]
        if not has_rows or proof(reservation.secret, opened.tree, tokens) != pull.proof:
            return 0
        if group:
            self._put(operation, peer.parts(group, opened.units[group - 1], size)[pull.first : rows])
        else:
            self._put(operation, list(peer.kv[opened.pages[pull.first : rows]]))
        return count

    def apply(self, operation: Operation) -> None:
        match operation:
            case ReleaseMemory(kv=True):
                self.kv.fill(-1)
            case DeleteStored(which, done):
                gone = [key for key in self.storage if which.tag in (None, tag_of(key))]
                for key in gone:
                    del self.storage[key]
                if done.set_running_or_notify_cancel():
                    done.set_result(Deleted(len(gone), tuple(gone)))
            case StartProfile() | StopProfile():
                raise OperationRefused("the fake executor cannot be profiled, because it computes nothing")

    def close(self) -> None:
        self.kv = np.empty((0, self._page_size), dtype=np.int32)

    def _end_with_prompt(self, run: FakeRun, row: int, params: SamplingParams) -> None:
        slot = int(run.plan.slots[row])
        self.lengths[slot] += run.plan.num_tokens[row]
        context = self._read(slot, int(self.lengths[slot]))
        if params.embedding is not None:
            run.embeddings[row] = fake_embedding(context)
        if params.score is not None:
            run.label_logprobs[row] = fake_label_logprobs(context, params.score.label_token_ids)

    def _sample_row(
        self, plan: BatchPlan, row: int, mask: NDArray[np.uint32] | None, behind: NDArray[np.uint32] | None
    ) -> list[int]:
        """Returns the row's accepted draft tokens and the next sampled token."""
        ahead = [] if behind is None else list(behind)
        slot, drafted = int(plan.slots[row]), int(plan.drafts[row]) if len(plan.drafts) else 0
        if row in plan.mask_rows:
            drafted = min(drafted, len(ahead))
        if row < plan.num_extend:
            self.lengths[slot] += plan.num_tokens[row]
        else:
            self.lengths[slot] += 1
        tokens: list[int] = []
        written = self._read(slot, int(self.lengths[slot]) + drafted)
        while True:
            context = written[: int(self.lengths[slot])]
            token = self._next_token(context, self._vocab_size)
            if mask is not None:
                token = first_allowed(token, mask, self._vocab_size)
            tokens.append(token)
            mask = None if len(tokens) > len(ahead) else ahead[len(tokens) - 1]
            if len(tokens) > drafted or token != written[len(context)]:
                break
            self.lengths[slot] += 1
        self.future_map[slot] = tokens[-1]
        return tokens

    def _half_right(self, context: I32, number: int) -> I32:
        """Returns draft tokens of which about half are the model's own next tokens."""
        for index in range(number):
            token = self._next_token(context, self._vocab_size)
            wrong = zlib.crc32(context.tobytes() + b"draft") % 2
            context = np.append(context, np.int32((token + wrong) % self._vocab_size))
            assert len(context) > index, "the context has all earlier draft tokens"
        return context[len(context) - number :]

    def _prompt_logprobs(self, plan: BatchPlan, index: int, row: int) -> PromptLogprobs:
        """Returns log probabilities of prompt tokens: the negative of each token's id."""
        slot, start, count = int(plan.slots[row]), int(plan.starts[row]), int(plan.num_tokens[row])
        first, following = int(plan.prompt_logprob_offsets[index]), int(plan.prompt_logprob_nexts[index])
        assert 0 <= first < count, "the row computes the logits of the first requested prompt token"
        ids = self._read(slot, start + count)[start + first + 1 :]
        if following >= 0:
            ids = np.append(ids, np.int32(following))
        params = self._params[slot]
        k, chosen = max(params.top_logprobs, 0), len(params.logprob_token_ids)
        values = -ids.astype(np.float32)
        top_ids = np.repeat(ids[:, None], k, axis=1)
        return PromptLogprobs(values, top_ids, np.repeat(values[:, None], k, axis=1), np.repeat(values[:, None], chosen, axis=1))

    def _route(self, run: FakeRun, shape: ExpertShape) -> None:
        """Adds the experts that the plan of a sampled step asks for."""
        plan = run.plan
        if plan.counts_experts:
            every = np.concatenate([self._routed(run, row, shape) for row in range(plan.num_rows)])
            counts = [np.bincount(layer.ravel(), minlength=shape.num_experts) for layer in every.swapaxes(0, 1)]
            run.expert_rows = np.array(counts, dtype=np.int32)
        for row, offset in zip(plan.routed_rows.tolist(), plan.routed_offsets.tolist(), strict=True):
            run.routed_experts[row] = self._routed(run, row, shape)[offset:]

    def _routed(self, run: FakeRun, row: int, shape: ExpertShape) -> NDArray[np.uint16]:
        """Returns the experts of a sampled row's tokens without rejected draft tokens, uint16[tokens, layers, chosen]."""
        slot, is_extend = int(run.plan.slots[row]), row < run.plan.num_extend
        count = int(run.plan.num_tokens[row]) if is_extend else int(run.counts[row])
        start = int(run.plan.starts[row]) if is_extend else int(self.lengths[slot]) - count
        return fake_experts(self._read(slot, start + count)[start:], start, shape)

    def _write(self, slot: int, start: int, ids: I32) -> None:
        positions = np.arange(start, start + len(ids))
        pages = self.page_table[slot, positions // self._page_size]
        assert pages.min() >= 0, "a row writes only to pages in the page table"
        self.kv[pages, positions % self._page_size] = ids

    def _read(self, slot: int, length: int) -> I32:
        pages = self.page_table[slot, : -(-length // self._page_size)]
        assert len(pages) and pages.min() >= 0, "a row reads only pages in the page table"
        return self.kv[pages].reshape(-1)[:length].copy()


def _apply_table(table: I32, slots: I32, firsts: I32, counts: I32, entries: I32) -> None:
    """Applies a plan's updates to a table of the slots. `entries` has the new values of all updates, in their order."""
    slots_of, firsts_of = np.repeat(slots, counts), np.repeat(firsts, counts)
    assert len(slots_of) == len(entries), "the updates have an entry for each index that they change"
    if not len(entries):
        return
    ends = np.cumsum(counts)
    indices = firsts_of + np.arange(len(entries)) - np.repeat(ends - counts, counts)
    width = table.shape[1]
    assert 0 <= indices.min() <= indices.max() < width, "updates stay within a slot's row of the table"
    changed = slots_of.astype(np.int64) * width + indices
    assert len(np.unique(changed)) == len(changed), "a plan updates each entry of a table at most once"
    table[slots_of, indices] = entries
