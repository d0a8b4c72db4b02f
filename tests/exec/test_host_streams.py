"""The streams of a CPU: one thread runs all work in call order, and callers wait only for collected values."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from rootstock_llm.services.worker.exec.streams.cuda_streams import MOST_SPARE, SpareStreams
from rootstock_llm.services.worker.exec.streams.host_streams import HostStreams


@pytest.fixture
def streams() -> Iterator[HostStreams]:
    made = HostStreams(1)
    yield made
    made.close()


def test_launched_work_runs_in_call_order_without_blocking_the_caller(streams: HostStreams) -> None:
    gate, done = threading.Event(), list[int]()
    streams.launch(lambda: None if gate.wait(20) else done.append(-1))
    for number in range(5):
        streams.launch(lambda number=number: done.append(number))  # type: ignore[misc]
    value = streams.collect(lambda: list(done))
    streams.launch(lambda: done.append(5))
    assert done == [], "launch() must return before the work runs"
    gate.set()
    assert value() == [0, 1, 2, 3, 4]
    assert streams.collect(lambda: done[-1])() == 5


def test_exception_of_the_work_is_raised_when_the_result_is_collected(streams: HostStreams) -> None:
    def fail() -> int:
        raise ArithmeticError("made to fail")

    first, second = streams.collect(fail), streams.collect(lambda: 7)
    with pytest.raises(ArithmeticError, match="made to fail"):
        first()
    assert second() == 7


def test_work_runs_on_one_thread_in_inference_mode(streams: HostStreams) -> None:
    def where() -> tuple[int, bool, int]:
        return threading.get_ident(), torch.is_inference_mode_enabled(), torch.get_num_threads()

    found = {streams.collect(where)() for _ in range(3)}
    assert len(found) == 1 and (threading.get_ident(), True, 1) not in found
    assert found.pop()[1:] == (True, 1)


def test_closing_the_streams_waits_for_launched_work() -> None:
    streams, done = HostStreams(1), list[int]()
    for number in range(100):
        streams.launch(lambda number=number: done.append(number))  # type: ignore[misc]
    streams.close()
    assert done == list(range(100))


def test_host_streams_use_the_same_memory_for_host_and_device(streams: HostStreams) -> None:
    host, device = streams.staging(8)
    source = torch.arange(3)
    assert host is device and streams.to_host(source) is source


def test_synchronization_is_refused_outside_of_work_on_the_streams(streams: HostStreams) -> None:
    assert streams.collect(streams.synchronize)() is None
    with pytest.raises(AssertionError, match="called by work on the streams"):
        streams.synchronize()


def test_closed_streams_refuse_new_work() -> None:
    streams = HostStreams(1)
    streams.close()
    with pytest.raises(RuntimeError, match="called after close"):
        streams.collect(lambda: 1)
    streams.close()


def test_spare_streams_are_reused_and_are_shared_when_all_are_lent() -> None:
    made: list[int] = []

    def make(priority: int) -> int:
        made.append(priority)
        return len(made)

    streams = SpareStreams(make)
    for _ in range(100):
        with streams.lent(0) as alone, streams.lent(-1) as urgent:
            assert (alone, urgent) == (1, 2)
    with ExitStack() as stack:
        together = [stack.enter_context(streams.lent(0)) for _ in range(3 * MOST_SPARE)]
        assert len(set(together)) == MOST_SPARE and len(set(together[:MOST_SPARE])) == MOST_SPARE
    assert made == [0, -1, *[0] * (MOST_SPARE - 1)]
    with ExitStack() as stack:
        assert len({stack.enter_context(streams.lent(0)) for _ in range(MOST_SPARE)}) == MOST_SPARE, (
            "each lent stream must be returned for reuse only once"
        )
