"""Tests of workers that send nothing over an open connection."""

from __future__ import annotations

import time

from tests.services.gateway.dispatch.test_dispatch_lost import begun, stopped
from tests.services.gateway.dispatch.test_faults import ANSWER, Pending, content_of
from tests.services.gateway.fakes import FakeWorker
from tests.services.gateway.system import System, wait_until

SILENCE_S = 0.4  # seconds without a message after which a worker is lost


def test_silent_worker_is_lost() -> None:
    with System(workers=2, configure=stopped, worker_silence_s=SILENCE_S) as system:
        pending = Pending(system, stream=True)
        first = begun(system, 3)
        system.do(lambda: first.servicer.report_load(num_open=1))
        other = next(host for host in system.workers if host is not first)
        wait_until(lambda: len(other.servicer.submits) == 1, "the submit to the other worker")
        system.allow(None)
        assert content_of(pending.result().text) == ANSWER
        assert len(other.servicer.submits[0].output_ids) == 3
        assert not first.servicer.running  # the worker aborts the requests of an ended stream


def test_silent_worker_that_sends_no_load_reports_stays_connected() -> None:
    with System(workers=2, configure=stopped, worker_silence_s=0.1) as system:
        pending = Pending(system, stream=True)
        begun(system, 3)
        time.sleep(0.4)
        assert sum(system.submits()) == 1
        system.allow(None)
        assert content_of(pending.result().text) == ANSWER and sum(system.submits()) == 1


def test_load_reports_keep_a_worker_connected() -> None:
    def configure(workers: list[FakeWorker]) -> None:
        stopped(workers)
        workers[0].beat_s = 0.05
        workers[0].report_load()

    with System(configure=configure, worker_silence_s=0.3) as system:
        pending = Pending(system)
        begun(system, 3)
        time.sleep(0.9)
        system.allow(None)
        assert pending.result().status_code == 200 and system.submits() == [1]


def test_blocked_event_loop_of_the_gateway_does_not_count_as_silence_of_the_worker() -> None:
    def configure(workers: list[FakeWorker]) -> None:
        stopped(workers)
        for worker in workers:
            worker.beat_s = 0.05
            worker.report_load()

    with System(workers=2, configure=configure, worker_silence_s=0.5) as system:
        pending = Pending(system)
        begun(system, 3)
        for _ in range(2):
            system.do(lambda: time.sleep(0.7))
        system.allow(None)
        assert pending.result().status_code == 200 and sum(system.submits()) == 1
