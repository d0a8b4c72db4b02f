"""The real core on FakeExecutor, with the invariants of docs/design/scheduler.md#invariants checked after every call."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.shared.index.prefix_index import BLOCK_TOKENS, END_MARK, BlockTier
from rootstock_llm.services.worker.core.contracts.cache_groups import CacheKind
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import (
    ErrorCode,
    Finish,
    FinishReason,
    PagesReady,
    SessionTurn,
    Submit,
    Verified,
)
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, SamplingParams
from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, KvSource
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.core.invariants import violations
from rootstock_llm.services.worker.core.kv.cache_events import CacheEventLog
from rootstock_llm.services.worker.core.kv.tree_node import TreeNode
from rootstock_llm.services.worker.core.requests.finish import first_stop
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.core.tiers.page_keys import SECRET_BYTES, PageKeys
from rootstock_llm.services.worker.exec.fake import (
    FakeExecutor,
    FakeRun,
    TimeModel,
    fake_embedding,
    fake_experts,
    fake_label_logprobs,
    first_allowed,
    hashed_token,
)
from tests.core.deployed_config import deployed_config
from tests.core.fake_grammar import SlowBook, masks_behind

POISON = -9


class LetterDecoder:
    """Decodes token `t` as the letter at index `t mod 26` of the alphabet."""

    def search(self, pattern: str, text: str) -> bool:
        return re.search(pattern, text) is not None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


class Engine:
    """A core and a fake executor. The test calls turn() for each iteration of the scheduler loop.

    `outputs` and `finishes` have the data that a gateway would get, by request handle.
    """

    def __init__(self, config: SchedulerConfig, overlap: bool = True, checked: bool = True, page_moved_s: float = 0.0) -> None:
        """Starts with an idle core.

        Args:
            config: configuration of the core.
            overlap: whether step N+1 is planned before step N is committed.
            checked: whether the invariants are checked, which takes most of the time.
            page_moved_s: seconds per page of operations between tiers.
        """
        self.config = config
        self.checked = checked
        self.book = SlowBook(config.vocab_size)
        self.events = CacheEventLog(config.page_size, chained, lambda namespace: namespace.encode())
        self.moves = config.host_pages > 0 or config.reads_peers
        keys = PageKeys(bytes(SECRET_BYTES), b"", config.page_size) if self.moves else None
        self.core = Scheduler(config, LetterDecoder(), self.book, self.events, keys=keys)
        self.control = SchedulerControl(self.core)
        self.now = 0.0
        self.executor = FakeExecutor(
            config.num_pages,
            config.page_size,
            config.max_running_requests,
            config.max_pages_per_request,
            config.vocab_size,
            time_model=TimeModel(per_page_moved=page_moved_s),
            clock=lambda: self.now,
            sleep=lambda seconds: None,
            groups=config.groups,
            experts=config.experts,
        )
        self.executor.early_s = 0.0
        self.overlap = overlap
        self.prev: FakeRun | None = None
        self.plans: list[BatchPlan] = []
        self.submitted: dict[int, Submit] = {}
        self.outputs: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.prompt_logprobs: dict[int, list[float]] = {}
        self.routed: dict[int, list[NDArray[np.uint16]]] = {}  # routed experts of each message, by handle
        self.ready: list[PagesReady] = []
        self.predicted: dict[int, Verified] = {}  # last reported results of verifying draft tokens, by handle
        self.index: set[bytes] = set()  # names of the blocks on the device, according to the cache events
        self.below: dict[bytes, BlockTier] = {}  # tiers of the blocks that only lower tiers have, according to the cache events
        self.contexts: dict[tuple[str, str], list[int]] = {}
        self.latest: dict[str, str] = {}
        self.turns_of_open_session: set[int] = set()
        self.num_turns = self.idle_turns = 0
        self.looked_ahead = 0  # number of masks for positions after draft tokens

    def _poison_freed_pages(self) -> None:
        """Overwrites the KV of free pages, so that a row that wrongly reads a free page computes a wrong token."""
        if isinstance(self.executor, FakeExecutor):
            self.executor.kv[self.core.memory.pages.free_pages()] = POISON
            units = self.core.memory.units
            if units is not None and units.windows is not None:
                self.executor.window_kv[units.windows.free_units()] = POISON
            if units is not None and units.states is not None:
                self.executor.states[units.states.free_units()] = -POISON

    def submit(
        self,
        handle: int,
        prompt: Sequence[int],
        peer: int = 0,
        stream: bool = True,
        salt: str = "",
        timeout_s: float = 0.0,
        priority: int = 0,
        session: SessionTurn | None = None,
        routing_key: str = "",
        output: Sequence[int] = (),
        payer: tuple[bytes, int, float] = (b"", 0, 1.0),
        hand_over: KvReservation | None = None,
        source: KvSource | None = None,
        prediction: Sequence[int] = (),
        routed_from: int = -1,
        **params: Any,
    ) -> None:
        """Submits a request.

        Args:
            output: output that another worker has sampled.
            payer: tenant, number of a batch of prompts, and weight of the tenant's share; see Submit.
            hand_over: see Submit.
            source: see Submit.
            prediction: see Submit.
            routed_from: see Submit.
        """
        ids, sampling = np.array(prompt, dtype=np.int32), SamplingParams(**params)
        more: dict[str, Any] = {"routing_key": routing_key, "session": session, "output_ids": tuple(output)}
        more |= dict(zip(("tenant", "batch", "weight"), payer, strict=True)) | {"hand_over": hand_over, "source": source}
        more |= {"prediction": np.array(prediction, dtype=np.int32), "routed_from": routed_from}
        message = Submit(peer, handle, f"r{handle}", ids, sampling, stream, salt, priority, timeout_s, **more)
        self.submitted[handle] = self._whole(message)
        if session is not None:
            self.turns_of_open_session.add(handle)
        self.core.submit(message, self.now)
        self.check()

    def _whole(self, message: Submit) -> Submit:
        """Returns the message with the whole prompt.

        A turn of a session gets the tokens of its parent in front of its own prompt. Other messages stay unchanged.
        """
        turn = message.session
        if turn is None:
            return message
        parent = turn.parent or self.latest.get(turn.session_id, "")
        before = self.contexts.get((turn.session_id, parent), [])
        before = before if turn.offset < 0 else before[: turn.offset]
        prompt = np.concatenate([np.array(before, dtype=np.int32), message.prompt_ids])
        budget = max(self.config.context_len - len(prompt), 1)
        params = replace(message.params, max_new_tokens=min(message.params.max_new_tokens, budget))
        return replace(message, prompt_ids=prompt, params=params)

    def open_session(self, name: str, capacity: int = 0, ttl_s: float = 0.0) -> bool:
        """Opens an empty session. Turns of an older session with this name are not part of it.

        Returns False if the core refuses the session.
        """
        refused = self.core.open_session(name, capacity, ttl_s, self.now)
        if not refused:
            self.contexts = {key: ids for key, ids in self.contexts.items() if key[0] != name}
            self.latest.pop(name, None)
            mine = {h for h in self.turns_of_open_session if (t := self.submitted[h].session) and t.session_id == name}
            self.turns_of_open_session -= mine
        return not refused

    def compile(self, count: int = 1) -> None:
        """Compiles the first `count` pending grammars."""
        for spec in list(self.book.pending)[:count]:
            del self.book.pending[spec]
            self.book.ready.add(spec)
            self.core.grammar_ready(spec)
            self.check()

    def abort(self, handle: int) -> None:
        self.core.abort(0, handle, self.now)
        self.check()

    def turn(self) -> bool:
        """Runs one iteration of the scheduler loop. Returns False if it planned no step and no step was in flight."""
        self.now += 0.01
        self.num_turns += 1
        if not self.overlap:
            self._commit()
        for fact in self.executor.facts():
            self.core.ended(fact, self.now)
            self.check()
        self.apply_releases()
        plan = self.core.plan(self.now)
        self.check()
        self._tell_rooms()
        run = None
        if plan is not None:
            self.plans.append(plan)
            self.executor.transfer(plan.operations)
            run = self.executor.forward(plan) if plan.num_rows else None
        moving = bool(self.moves and self.executor.num_moving)
        busy = plan is not None or self.prev is not None or not self.core.settled or moving
        if self.overlap:
            self._commit()
        if run is not None:
            matchers = self.core.matchers()
            guesses = self.executor.draft_tokens(run) if len(run.plan.drafts) else {}
            masks, behind = {row: matcher.mask() for row, matcher in matchers}, masks_behind(matchers, guesses)
            self.looked_ahead += sum(map(len, behind.values()))
            self.executor.sample(run, masks, behind)
        self.prev = run
        self._poison_freed_pages()
        self._check_cached_pages(self.core.memory.tree.nodes())  # the core has not changed since the last check
        self._take()
        waits_for_compiler = self.book.pending and self.core.stats().num_running == 0
        self.idle_turns = 0 if busy or self.core.idle or waits_for_compiler else self.idle_turns + 1
        return busy

    def apply_releases(self) -> None:
        while isinstance(self.executor, FakeExecutor) and self.executor.released_reservations:
            self.core.release_reservation(self.executor.released_reservations.pop())
            self.check()

    def _tell_rooms(self) -> None:
        events = self.core.take_reservation_events()
        if events is not None:
            self.executor.change_reservations(events)

    def drain(self, limit: int = 100_000) -> None:
        for _ in range(limit):
            self.compile()
            busy = self.turn()
            if self.core.idle and self.prev is None and (not busy or not self.moves):
                return
            assert self.idle_turns < 3, "the scheduler is stuck with requests waiting"
        raise AssertionError("livelock: the requests did not end")

    def expected(self, handle: int) -> list[int]:
        """Returns the output that the fake model gives for a request, up to the first token at which the request must end."""
        message = self.submitted[handle]
        params = message.params
        eos = () if params.ignore_eos else self.config.eos_token_ids
        out: list[int] = []
        if params.max_new_tokens == 0:
            return out
        matcher = self.book.matcher(params.grammar) if params.grammar else None
        while True:
            context = np.concatenate([message.prompt_ids, np.array(out, dtype=np.int32)])
            token = hashed_token(context, self.config.vocab_size)
            if matcher is not None:
                token = first_allowed(token, matcher.mask(), self.config.vocab_size)
                assert matcher.accept(token)
            out.append(token)
            if len(out) >= params.max_new_tokens or (matcher is not None and matcher.terminated):
                return out
            if len(out) >= params.min_new_tokens and token in (*params.stop_token_ids, *eos):
                return out
            if params.stop and first_stop(LetterDecoder().decode(out), params.stop):
                return out
            if any(re.search(pattern, LetterDecoder().decode(out)) for pattern in params.stop_regex):
                return out

    def check_answer(self, handle: int) -> None:
        finish, message = self.finishes[handle], self.submitted[handle]
        if finish.reason is FinishReason.EMBEDDED:
            assert finish.embedding is not None
            assert finish.embedding.tolist() == fake_embedding(message.prompt_ids).tolist()
            assert finish.completion_tokens == 0 and handle not in self.outputs
            return
        if finish.error is ErrorCode.INVALID_ARGUMENT:
            assert message.session is not None, finish
            return
        if finish.reason is FinishReason.SCORED:
            assert finish.label_logprobs is not None and message.params.score is not None
            labels = message.params.score.label_token_ids
            assert finish.label_logprobs.tolist() == fake_label_logprobs(message.prompt_ids, labels).tolist()
            assert finish.completion_tokens == 0 and handle not in self.outputs
            return
        self._check_routed(handle)
        given = len(message.output_ids)
        got, want = [*message.output_ids, *self.outputs.get(handle, [])], self.expected(handle)
        self._check_logprobs(handle, got[given:])
        if finish.reason is FinishReason.ABORT:
            expected = (ErrorCode.CANCELLED, ErrorCode.OUT_OF_MEMORY, ErrorCode.TIMEOUT, ErrorCode.QUEUE_FULL)
            assert finish.error in expected, finish
            assert got == want[: len(got)]
        elif finish.reason is FinishReason.HANDED_OVER:
            assert message.hand_over is not None
            assert got == want[: given + 1], "a handed-over request ends after one new token"
        elif message.session is not None and finish.reason is FinishReason.LENGTH:
            assert got == want[: len(got)], "the session's capacity may cut a turn short"
        else:
            assert got == want, f"request {handle}: {got} is not {want}"
            assert finish.completion_tokens == len(want)

    def _check_routed(self, handle: int) -> None:
        """Checks that each computed token from `routed_from` on has its experts once, in the order of positions.

        An aborted request may lack the experts of its last tokens.
        """
        message, shape = self.submitted[handle], self.config.experts
        if message.routed_from < 0 or shape is None:
            assert handle not in self.routed
            return
        output = [*message.output_ids, *self.outputs.get(handle, [])]
        computed = np.array([*message.prompt_ids, *output[:-1]], dtype=np.int32)[message.routed_from :]
        want = fake_experts(computed, message.routed_from, shape)
        got = np.concatenate([want[:0], *self.routed.get(handle, [])])
        aborted = self.finishes[handle].reason is FinishReason.ABORT
        assert got.tolist() == (want[: len(got)] if aborted else want).tolist()

    def _check_logprobs(self, handle: int, got: list[int]) -> None:
        """Checks that each token has its logprob, which is the negative token id in the fake model."""
        message = self.submitted[handle]
        params = message.params
        if params.top_logprobs >= 0:
            assert self.logprobs.get(handle, []) == [-float(token) for token in got]
        if params.prompt_logprobs_from >= 0:
            want = [-float(token) for token in message.prompt_ids[max(params.prompt_logprobs_from, 1) :]]
            seen = self.prompt_logprobs.get(handle, [])
            ended = bool(got) or (params.max_new_tokens == 0 and self.finishes[handle].reason is FinishReason.LENGTH)
            assert seen == ([] if message.output_ids else want if ended else want[: len(seen)])

    def check(self) -> None:
        if not self.checked:
            return
        found = violations(self.core.queues, self.core.memory, self.core.sessions, self.core.tiers)
        assert not found, found
        nodes = self.core.memory.tree.nodes()
        self._check_cached_pages(nodes)
        self._check_index(nodes)

    def _check_cached_pages(self, nodes: Sequence[TreeNode]) -> None:
        if self.checked and nodes:
            held = self.executor.kv_after_loads()[np.concatenate([node.pages for node in nodes])]
            wanted = b"".join(node.key for node in nodes)
            assert held.tobytes() == wanted, "a cached page has the tokens of its path in the tree"

    def _check_index(self, nodes: Sequence[TreeNode]) -> None:
        """Applies the cache events to `index`. Then checks that `index` has all cached whole blocks.

        The other entries of `index` must be end marks.
        """
        events = self.core.take_cache_events()
        while events is not None:
            if events.cleared:
                self.index, self.below = set(), {}
            reported = {
                BlockTier.DEVICE: events.stored,
                BlockTier.HOST: events.host,
                BlockTier.STORAGE: events.storage,
                None: events.removed,
            }
            assert not self.index & set(events.stored) and not set(events.removed) - self.index - self.below.keys()
            assert len({name for names in reported.values() for name in names}) == sum(map(len, reported.values()))
            self.index = self.index - {*events.removed, *events.host, *events.storage} | set(events.stored)
            self.below = {name: tier for name, tier in self.below.items() if name not in {*events.stored, *events.removed}}
            self.below |= {name: tier for tier in (BlockTier.HOST, BlockTier.STORAGE) for name in reported[tier]}
            events = self.core.take_cache_events()
        blocks = {name for node in nodes for name in node.blocks}
        assert blocks <= self.index
        self._check_end_marks(self.index - blocks, nodes)

    def _check_end_marks(self, marks: set[bytes], nodes: Sequence[TreeNode]) -> None:
        """Checks that each end mark belongs to a block with a possible hit: one that ends with the block or within the next one.

        If states are the only cache group, each block with a possible hit must have a mark.
        """
        units, size = self.core.memory.units, self.config.page_size
        possible: set[bytes] = set()
        for node in nodes if units is not None else ():
            path = [node]
            while path[0].parent is not None and path[0].parent.parent is not None:
                path.insert(0, path[0].parent)
            blocks = [name for each in path for name in each.blocks]
            has = [np.concatenate([each.units[index] for each in path]) >= 0 for index in range(len(node.units))]
            for end in range(node.depth - len(node.pages) + 1, node.depth + 1):
                window_from = max((end * size - self._window() + 1) // size, 0)
                first = {CacheKind.STATE: end - 1, CacheKind.WINDOW: window_from}
                fits = all(has[at][first[group.kind] : end].all() for at, group in enumerate(self.config.groups))
                if fits and end * size >= BLOCK_TOKENS:
                    possible.add(chained(blocks[end * size // BLOCK_TOKENS - 1], END_MARK))
        assert marks <= possible
        if [group.kind for group in self.config.groups] == [CacheKind.STATE]:
            assert marks == possible

    def _window(self) -> int:
        return next((group.window for group in self.config.groups if group.kind is CacheKind.WINDOW), 0)

    def _commit(self) -> None:
        if self.prev is not None:
            run, self.prev = self.prev, None
            self.core.commit(self.executor.wait(run), self.now)
            self.check()
            self._take()

    def _take(self) -> None:
        self._tell_rooms()
        outputs = self.core.take_output()
        for peer in outputs:
            at = 0
            self.ready += peer.ready
            for handle, count in zip(peer.handles, peer.counts, strict=True):
                assert handle not in self.finishes, "no token follows the finish of a request"
                self.outputs.setdefault(handle, []).extend(peer.tokens[at : at + count])
                at += count
            assert at == len(peer.tokens)
            for handle, verified in peer.predicted:
                num_sent = len(self.outputs.get(handle, []))
                assert verified.right_predicted <= max(num_sent - 1, 0), (
                    "accepted predicted tokens are not reported before the tokens themselves"
                )
                self.predicted[handle] = verified
            for handle, rows in peer.logprobs:
                self.logprobs.setdefault(handle, []).extend(row.sampled for row in rows)
            for handle, values in peer.prompt_logprobs:
                self.prompt_logprobs.setdefault(handle, []).extend(values.values.tolist())
            for handle, ids in peer.routed_experts:
                self.routed.setdefault(handle, []).append(ids)
                self._check_routed_count(handle)
            for finish in peer.finishes:
                assert finish.handle not in self.finishes, "a request has one finish"
                self.finishes[finish.handle] = finish
                self._remember_turn(finish)

    def _check_routed_count(self, handle: int) -> None:
        """Checks that the routed experts of a request with output end before the last of the output tokens that were sent."""
        message = self.submitted[handle]
        num_outputs = len(message.output_ids) + len(self.outputs.get(handle, []))
        seen = message.routed_from + sum(map(len, self.routed[handle]))
        if num_outputs:
            assert seen == len(message.prompt_ids) + num_outputs - 1

    def _remember_turn(self, finish: Finish) -> None:
        message = self.submitted[finish.handle]
        if finish.handle not in self.turns_of_open_session:
            return
        if message.session is not None and finish.reason is not FinishReason.ABORT:
            context = [*message.prompt_ids.tolist(), *self.outputs.get(finish.handle, [])]
            self.contexts[message.session.session_id, message.request_id] = context
            self.latest[message.session.session_id] = message.request_id


def small(overlap: bool = True, page_moved_s: float = 0.0, **changes: Any) -> Engine:
    """Returns an engine with chunks of four pages and with four slots; `changes` has other fields of the configuration."""
    values: dict[str, Any] = {"num_pages": 16, "page_size": 4, "context_len": 64, "vocab_size": 1000}
    values |= {"max_running_requests": 4, "chunked_prefill_size": 16, "page_bytes": 64}
    return Engine(deployed_config(**{**values, **changes}), overlap, page_moved_s=page_moved_s)


def slow(engine: Engine) -> Engine:
    """Records slow steps in the engine's rates, so that the core prefers reading pages to computing them. Returns the engine."""
    tiers = engine.core.tiers
    assert tiers is not None
    tiers.rates.computed(1000, 0, 1000.0)
    return engine


def chained(before: bytes, tokens: bytes) -> bytes:
    return hashlib.blake2b(tokens, key=before[:64], digest_size=8).digest()
