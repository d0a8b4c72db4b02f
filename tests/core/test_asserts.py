"""Seeded faults in the core. Each one must violate an invariant that the core itself asserts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from rootstock_llm.services.worker.core.contracts.messages import SessionTurn
from rootstock_llm.services.worker.core.kv.memory import KVMemory, ReqToTokenPool, TokenToKVPool
from rootstock_llm.services.worker.core.kv.radix_cache import RadixCache
from rootstock_llm.services.worker.core.planning.committer import Committer, Intake
from rootstock_llm.services.worker.core.planning.extend_planner import ExtendPlanner
from rootstock_llm.services.worker.core.planning.planner import DecodePlanner
from rootstock_llm.services.worker.core.planning.step_rows import PrefillAdder, build_step
from rootstock_llm.services.worker.core.requests.gates import GrammarGate
from rootstock_llm.services.worker.core.requests.lifecycle import RequestLifecycle
from rootstock_llm.services.worker.core.requests.queues import RequestQueues
from rootstock_llm.services.worker.core.requests.request import SlotColumns
from rootstock_llm.services.worker.core.requests.sessions import SessionTable
from rootstock_llm.services.worker.core.requests.waiting_queue import WaitingQueue
from rootstock_llm.services.worker.core.scheduler import Scheduler
from tests.core.fake_grammar import spec
from tests.core.harness import Engine
from tests.core.seeded_faults import Fault, law_broken
from tests.core.test_scheduler_basic import make

Scenario = Callable[[], Engine]


def unchecked(overlap: bool = True, **changes: object) -> Engine:
    """Returns an engine whose invariants the harness does not check after each iteration.

    In addition, the fake executor does not check that a plan names all pages that its rows use.
    """
    engine = make(overlap, **changes)
    engine.checked = False
    engine.executor.page_table.fill(0)
    return engine


def crowd() -> Engine:
    """Runs forty requests with shared prefixes on too few pages: chunks, evictions, retractions and aborts."""
    engine = unchecked(num_pages=24, context_len=64)
    for handle in range(40):
        prompt = [handle % 3] * 8 + [handle % 5] * 8 + list(range(handle % 7))
        engine.submit(handle, prompt, max_new_tokens=1 + handle % 30)
        engine.turn()
        if handle % 9 == 8:
            engine.abort(handle - 1)
    engine.drain()
    return engine


def retracted() -> Engine:
    """Runs requests that are retracted repeatedly."""
    engine = unchecked(overlap=False, retract_interval=3)
    for handle in range(6):
        engine.submit(handle, [handle + 1] * 9, max_new_tokens=20, ignore_eos=True)
    engine.drain()
    return engine


def long_ones() -> Engine:
    """Runs requests that fill their context."""
    engine = unchecked(num_pages=64, context_len=32)
    for handle in range(4):
        engine.submit(handle, [handle] * 29, max_new_tokens=3, ignore_eos=True)
    engine.drain()
    return engine


def grammars() -> Engine:
    """Runs requests that wait for a grammar with forced tokens."""
    engine = unchecked(num_pages=128)
    for handle in range(6):
        engine.submit(handle, [handle + 1] * 6, max_new_tokens=40, grammar=spec(3, 60))
    for _ in range(3):
        engine.turn()
    engine.drain()
    return engine


def conversation() -> Engine:
    """Runs turns of a session. The last turn replaces the turns after its parent."""
    engine = unchecked()
    engine.open_session("s", capacity=50)
    for handle, turn in enumerate((SessionTurn("s"), SessionTurn("s"), SessionTurn("s", parent="r0", replace=True))):
        engine.submit(handle, [handle + 1] * 9, session=turn, max_new_tokens=6, ignore_eos=True)
        engine.drain()
    return engine


def scored() -> Engine:
    """Runs prompts with logprobs of more tokens than one step may compute."""
    engine = unchecked(max_prompt_logprob_tokens=8, chunked_prefill_size=0)
    for handle in range(3):
        engine.submit(handle, [handle + 1] * 30, max_new_tokens=3, prompt_logprobs_from=0, top_logprobs=0)
    engine.drain()
    return engine


def shared_beginning() -> Engine:
    """Runs requests that wait for an extend with their prefix."""
    engine = unchecked(num_pages=256, chunked_prefill_size=64)
    for handle in range(5):
        engine.submit(handle, [7] * 48 + [handle] * 4, max_new_tokens=4)
    engine.drain()
    return engine


FAULTS: list[tuple[Fault, Scenario]] = [
    (
        Fault(
            "one page too many is free again",
            TokenToKVPool.free,
            "self.num_free = end",
            "self.num_free = end + (end < self.num_pages)",
            "freed|total",
        ),
        crowd,
    ),
    (
        Fault(
            "a lease covers whole pages only",
            KVMemory.grow,
            "-(-num_tokens // self.page_size)",
            "num_tokens // self.page_size",
            "gets a first page",
        ),
        crowd,
    ),
    (
        Fault(
            "a lease takes a page too many",
            KVMemory.grow,
            "-(-num_tokens // self.page_size) - have",
            "-(-num_tokens // self.page_size) - have + 1",
            "at most the pages of a context",
        ),
        long_ones,
    ),
    (
        Fault(
            "a lease that ends frees shared pages too",
            KVMemory.release,
            "self.slots.page_table[slot, shared:have]",
            "self.slots.page_table[slot, :have]",
            "total",
        ),
        crowd,
    ),
    (
        Fault(
            "a slot's shared pages are not counted when it begins",
            KVMemory.lease,
            "self.slots.num_pages[slot] = self.slots.num_shared[slot] = hit.depth",
            "self.slots.num_pages[slot] = hit.depth",
            "ends at its lease's node",
        ),
        crowd,
    ),
    (
        Fault(
            "a published prefix keeps the lock of the one before it",
            KVMemory.publish,
            "self.tree.unlock(lease.node)",
            "pass",
            "each lease and each pin has a lock",
        ),
        crowd,
    ),
    (
        Fault(
            "a slot is given back twice",
            KVMemory.release,
            "self.slots.free(slot)",
            "self.slots.free(slot), self.slots.free(slot)",
            "slot was freed twice",
        ),
        crowd,
    ),
    (
        Fault("a slot is given out and stays free", ReqToTokenPool.alloc, "self._free.pop()", "self._free[-1]", "a slot each"),
        crowd,
    ),
    (
        Fault(
            "the upper part of a split edge ends where the whole edge ended",
            RadixCache._split,
            "parent.depth + num_pages",
            "node.depth",
            "depth of the lower part",
        ),
        crowd,
    ),
    (
        Fault(
            "locked leaves are evicted",
            RadixCache._is_evictable,
            "node.lock_ref == 0 and ",
            "",
            "only unlocked leaves are removed",
        ),
        crowd,
    ),
    (
        Fault(
            "a removed edge stays counted as evictable",
            RadixCache._remove,
            "self.num_evictable -= len(node.pages)",
            "pass",
            "only evictable pages are removed|all evictable pages",
        ),
        crowd,
    ),
    (Fault("a slot keeps its epoch", SlotColumns.end, "self.epoch[slot] += 1", "pass", "sent <= committed"), crowd),
    (
        Fault(
            "tokens of rows whose lease has ended are committed",
            Committer.commit,
            "fresh = plan.sample & live",
            "fresh = plan.sample",
            "sent <= committed",
        ),
        crowd,
    ),
    (
        Fault(
            "a result is applied to the newest step instead of the oldest",
            Scheduler._take_flight,
            "self._flight.pop(0)",
            "self._flight.pop()",
            "order of the plans",
        ),
        crowd,
    ),
    (
        Fault(
            "a request that has ended keeps its lease",
            RequestLifecycle.end,
            "self._release(request, lease)",
            "pass",
            "is in no queue",
        ),
        crowd,
    ),
    (
        Fault(
            "a retracted request is not queued",
            RequestQueues.retract,
            "self._wait(request, back=True)",
            "pass",
            "is in one queue",
        ),
        retracted,
    ),
    (Fault("a retracted request keeps its old key", RequestLifecycle.retract, "request.rekey()", "pass", "known"), retracted),
    (
        Fault(
            "a request decodes before its last chunk",
            ExtendPlanner._add,
            "last = start + count == target",
            "last = start + count >= target - 4",
            "last",
        ),
        crowd,
    ),
    (
        Fault(
            "a planned chunk does not advance the computed tokens",
            ExtendPlanner._add,
            "columns.computed[lease.slot] = start + count",
            "pass",
            "last chunk",
        ),
        crowd,
    ),
    (
        Fault(
            "rows get their pages one token late",
            DecodePlanner._candidates,
            "spare <= 0",
            "spare < 0",
            "at most the tokens of its pages",
        ),
        crowd,
    ),
    (
        Fault(
            "starts and counts are swapped",
            build_step,
            "_before(rows.counts",
            "_before(rows.starts",
            "a row ends at",
        ),
        crowd,
    ),
    (
        Fault(
            "the KV reserved for an unblocked request stays reserved",
            WaitingQueue.unblock,
            "add(-1, -request.blocked_tokens)",
            "add(-1, request.blocked_tokens)",
            "are reserved only for blocked requests",
        ),
        shared_beginning,
    ),
    (Fault("the gate counts requests that have left it", GrammarGate.leave, "self._size -= 1", "pass", "is in"), grammars),
    (
        Fault("the token key lacks tokens of the grammar", RequestLifecycle.extend_again, "request.rekey()", "pass", "known"),
        grammars,
    ),
    (
        Fault(
            "replaced turns are counted twice",
            SessionTable._forget_children,
            "-len(turn.added)",
            "len(turn.added)",
            "exceed the session's capacity",
        ),
        conversation,
    ),
    (
        Fault(
            "prompt logprobs have no budget",
            PrefillAdder.chunk,
            "budget = min(budget, self._logprobs)",
            "pass",
            "max_logprob_tokens",
        ),
        scored,
    ),
    (
        Fault(
            "a token is added twice",
            Intake.take,
            "for request, token in zip(requests, tokens.tolist(), strict=True):",
            "for request, token in zip(requests * 2, tokens.tolist() * 2, strict=True):",
            "after each token",
        ),
        long_ones,
    ),
]


@pytest.mark.by_day(one_in=2, seed=14)
@pytest.mark.parametrize("scenario", list(dict.fromkeys(scenario for _, scenario in FAULTS)))
def test_requests_get_the_models_tokens_when_no_fault_is_seeded(scenario: Scenario) -> None:
    engine = scenario()
    for handle in engine.submitted:
        engine.check_answer(handle)


@pytest.mark.parametrize(("fault", "scenario"), FAULTS, ids=[fault.name for fault, _ in FAULTS])
def test_seeded_fault_violates_an_assertion(fault: Fault, scenario: Scenario) -> None:
    assert re.search(fault.law, law_broken(fault, scenario))
