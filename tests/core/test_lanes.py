"""Tests when lanes give up late import operations. The operations of one lane run one after another."""

from __future__ import annotations

from rootstock_llm.services.worker.core.contracts.transfers import NO_PAGES, OperationKind, PageOperation, Tier
from rootstock_llm.services.worker.core.kv.other_tiers import Wanted
from rootstock_llm.services.worker.core.tiers.lanes import HOST, STORAGE, Lanes, Place, RunningImport
from rootstock_llm.services.worker.core.tiers.rates import Rates
from tests.core.test_rules_tiers import tiered

PAGE_BYTES, PAGE_SIZE = 1000, 4
READ_S, COMPUTE_S = 3.0, 4.0  # seconds per page


class TestLate:
    def test_late_import_is_given_up_when_no_request_waits_for_the_pages_after_it(self) -> None:
        """The first operation is late, so the request stops waiting.

        Pages after the second operation would justify a longer wait, but only for a waiting request. So the same call also marks
        the second operation as late.
        """
        rates = Rates(PAGE_BYTES, PAGE_SIZE)
        for tier in (Tier.HOST, Tier.STORAGE):
            for _ in range(200):
                rates.moved(tier, 4, 4 * READ_S)
        rates.computed(1000, 0, 1000 * COMPUTE_S / PAGE_SIZE)
        memory = tiered().core.memory
        root = memory.match("", b"", 0)
        wanted = Wanted(0, "", b"", 12)

        def running(op_id: int, place: Place, first: int, began: float) -> RunningImport:
            keys = tuple(bytes([page]) * 16 for page in range(first, first + 4))
            kind = OperationKind.LOAD if place is HOST else OperationKind.FETCH
            operation = PageOperation(op_id, kind, keys, memory.quarantine(4), NO_PAGES)
            each = RunningImport(operation, place, wanted, root, first, memory, began)
            lanes.begin(each)
            return each

        lanes = Lanes(rates)
        first, second = running(1, HOST, 0, began=0.0), running(2, STORAGE, 4, began=7.0)
        lanes.wait_for(first, wanted)
        assert lanes.give_up_late(23.0, lambda other: other is wanted) == [] and not second.late
        assert lanes.give_up_late(25.0, lambda other: other is wanted) == [wanted]
        assert first.late and second.late and not lanes.is_awaited(wanted)
