"""What a placement says to workers about pages that one of them keeps for another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from rootstock.v1 import worker_pb2
from services.gateway.dispatch.placement import Kept, Placement


@dataclass
class Link:
    """knows: what it was given has been sent."""

    knows: bool = True
    left: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    info: Any = field(default_factory=lambda: worker_pb2.WorkerInfo(role="decode", kv_layout=b"pages"))
    weights: Any = None

    def abort(self, handle: int) -> bool:
        self.aborted.append(handle)
        return not self.knows

    def leave_room(self, handle: int) -> None:
        self.left.append(handle)


@pytest.mark.parametrize(("knows", "left"), [(True, [8]), (False, [7])])
def test_who_keeps_pages_for_one_that_will_not_come_for_them_is_told(knows: bool, left: list[int]) -> None:
    """One that has heard of them, and is not lost, says itself that it does not want them any more."""
    unused: Any = None
    prefill, decode, copy = Link(), Link(knows), Link(knows=False)
    placement = Placement(unused, unused, unused)
    placement.choice = type("Choice", (), {"output": type("Output", (), {"ids": [1]})})()
    source = worker_pb2.KvSource()
    placement.hand_over(Kept(prefill, 7, source, b"pages"))  # type: ignore[arg-type]
    assert placement.take_source(decode, 12) is source  # type: ignore[arg-type]
    placement.place(decode, 12, 0, 0.0)  # type: ignore[arg-type]
    placement.copy_to(copy, 13)  # type: ignore[arg-type]
    placement.cancel_hedge()
    assert copy.aborted == [13] and prefill.left == [], "a copy reads nothing"
    again = Placement(unused, unused, unused)
    again.choice = placement.choice
    again.choice.trace = None
    again.hand_over(Kept(prefill, 8, source, b"pages"))  # type: ignore[arg-type]
    again.take_source(decode, 14)  # type: ignore[arg-type]
    again.lost(14, heard=knows)
    assert again.prefilled is not knows and again.source_layout == (b"" if knows else b"pages")
    placement.withdraw()
    assert decode.aborted == [12] and prefill.left == left
