"""Tests that a response comes from one model version.

A request with output continues on a worker of the same model version, or fails with the error code weights_not_served.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rootstock_llm.protos import common_pb2 as pb
from tests.services.gateway.dispatch.test_dispatch_endpoints import discover
from tests.services.gateway.dispatch.test_dispatch_hedging import AFTER_S, allow, hedged
from tests.services.gateway.dispatch.test_dispatch_lost import begun, stopped
from tests.services.gateway.dispatch.test_dispatch_paused import report_load
from tests.services.gateway.dispatch.test_faults import ANSWER, Pending, content_of
from tests.services.gateway.fakes import FakeWorker, Host, ids_of
from tests.services.gateway.system import RawClient, System, wait_until

GONE = '"code":"weights_not_served"'
LONG_S = 600.0  # long, so that no request ends by a timeout


def with_revisions(*revisions: str) -> Callable[[list[FakeWorker]], None]:
    """Returns a function that gives the workers these model versions. They compute no step until allow()."""

    def configure(workers: list[FakeWorker]) -> None:
        stopped(workers)
        for worker, revision in zip(workers, revisions, strict=True):
            worker.info.revision = revision

    return configure


def leave_only(system: System, host: Host) -> None:
    """Removes all other workers from discovery."""
    discover(system, **{f"w{system.workers.index(host)}": True})


def refusals(system: System) -> float:
    return system.metric("rootstock_gateway_refusals_total", reason="weights_not_served")


def test_request_with_output_moves_to_a_worker_of_the_same_model_version() -> None:
    with System(workers=3, configure=with_revisions("old", "new", "old"), queue_timeout_s=LONG_S) as system:
        pending = [Pending(system, stream=True) for _ in range(3)]
        wait_until(lambda: system.running() == [1, 1, 1], "a request on each worker")
        (pool,) = system.gateway.dispatcher.fleet.pools.values()
        assert pool.model.revision == "old", "block hashes begin with the version of most workers"
        system.allow(5)
        wait_until(lambda: system.has_tokens(5), "five tokens of each")
        system.call(system.workers[0].stop())
        wait_until(lambda: len(system.workers[2].servicer.submits) == 2, "the submit to the other worker")
        system.allow(None)
        assert [content_of(one.result().text) for one in pending] == [ANSWER] * 3
        moved = system.workers[2].servicer.submits[1]
        assert (moved.revision, list(moved.output_ids)) == ("old", ids_of(ANSWER[:5]))
        assert len(system.workers[1].servicer.submits) == 1


def test_request_with_output_fails_after_the_queue_timeout_when_no_worker_has_the_model_version() -> None:
    """The lost worker may return with the version within the queue timeout."""
    with System(workers=2, configure=with_revisions("old", "new"), queue_timeout_s=0.3) as system:
        pending = Pending(system, stream=True)
        first = begun(system, 5)
        system.call(first.stop())
        system.allow(None)
        text = pending.result().text
        assert GONE in text and "[DONE]" not in text and refusals(system) == 1
        assert sum(system.submits()) == 1 and system.num_waiting == 0


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_request_with_output_fails_when_the_worker_returns_with_another_model_version(stream: bool) -> None:
    with System(configure=with_revisions("old"), queue_timeout_s=LONG_S) as system:
        pending = Pending(system, stream=stream)
        begun(system, 5)
        system.call(system.workers[0].stop())
        wait_until(lambda: system.num_waiting == 1, "the request in the gateway's queue")
        system.worker.info.revision = "new"
        system.call(system.workers[0].start())
        answer = pending.result()
        assert GONE in answer.text and answer.status_code == (200 if stream else 503)
        assert system.submits() == [1] and refusals(system) == 1


def test_request_with_output_fails_when_no_address_of_the_model_version_is_left() -> None:
    """Discovery removes the old addresses and the new pods have another version, as in a rollout."""
    with System(workers=2, configure=with_revisions("old", "new"), queue_timeout_s=LONG_S) as system:
        pending = Pending(system, stream=True)
        first = begun(system, 5)
        system.call(first.stop())
        wait_until(lambda: system.num_waiting == 1, "the request in the gateway's queue")
        leave_only(system, system.workers[1 - system.workers.index(first)])
        assert GONE in pending.result().text
        assert sum(system.submits()) == 1


@pytest.mark.parametrize("num_others", [0, 1], ids=["no worker", "worker of another model"])
def test_request_with_output_waits_while_discovery_finds_no_worker_of_the_model(num_others: int) -> None:
    """The only worker restarts: discovery has no address until the worker is back with the same model version."""

    def another_model(workers: list[FakeWorker]) -> None:
        with_revisions(*["old"] * len(workers))(workers)
        for worker in workers[1:]:
            worker.info.model = "another"

    with System(workers=1 + num_others, configure=another_model, queue_timeout_s=LONG_S) as system:
        pending = Pending(system, stream=True)
        first = begun(system, 5)
        system.call(first.stop())
        wait_until(lambda: system.num_waiting == 1, "the request in the gateway's queue")
        discover(system, **{f"w{1 + index}": True for index in range(num_others)})
        system.do(system.gateway.dispatcher._on_tick)
        assert system.num_waiting == 1 and refusals(system) == 0
        system.call(first.start())
        system.allow(None)
        discover(system, **{f"w{index}": True for index in range(1 + num_others)})
        assert content_of(pending.result().text) == ANSWER


def test_request_with_output_does_not_move_to_a_worker_with_a_shorter_context() -> None:
    """The worker with the shorter context was not connected when the response began."""

    def shorter(workers: list[FakeWorker]) -> None:
        with_revisions("old", "old")(workers)
        workers[1].info.context_len = 4

    with System(workers=2, configure=shorter, queue_timeout_s=0.3) as system:
        system.call(system.workers[1].stop())
        wait_until(lambda: system.gateway.dispatcher.connected() == 1, "the disconnection")
        pending = Pending(system, stream=True)
        first = begun(system, 5)
        system.call(system.workers[1].start())
        wait_until(lambda: system.gateway.dispatcher.connected() == 2, "the reconnection")
        system.call(first.stop())
        assert GONE in pending.result().text and system.submits() == [1, 0]


def test_request_with_output_gets_error_code_paused_when_the_only_worker_of_the_model_version_is_paused() -> None:
    with System(workers=3, configure=with_revisions("old", "old", "new"), queue_timeout_s=0.3) as system:
        report_load(system, 2, paused=True)
        pending = Pending(system, stream=True)
        first = begun(system, 5)
        report_load(system, 1 - system.workers.index(first), paused=True)
        report_load(system, 2, paused=False)
        system.call(first.stop())
        assert '"code":"paused"' in pending.result().text and refusals(system) == 0


def test_second_hello_message_of_a_worker_changes_the_model_version() -> None:
    with System(workers=2, configure=with_revisions("old", "old"), queue_timeout_s=LONG_S) as system:
        pending = Pending(system, stream=True)
        first = begun(system, 5)
        second = next(host for host in system.workers if host is not first)
        system.do(lambda: second.servicer.renew("new"))
        link = system.gateway.dispatcher.fleet.links[second.address]
        wait_until(lambda: link.info is not None and link.info.revision == "new", "the hello")
        system.call(first.stop())
        wait_until(lambda: system.num_waiting == 1, "the request in the gateway's queue")
        leave_only(system, second)
        assert GONE in pending.result().text
        system.allow(None)
        assert not any(submit.output_ids for submit in second.servicer.submits)
        assert system.chat().status_code == 200
        assert second.servicer.submits[-1].revision == "new" and len(second.servicer.contexts) == 1
        (pool,) = system.gateway.dispatcher.fleet.pools.values()
        assert pool.model.revision == "new", "block hashes begin with the new version"


def test_second_hello_message_with_another_worker_id_breaks_the_stream() -> None:
    """A stream has one worker id, because sessions are placed by this id."""
    with System(configure=with_revisions("old")) as system:
        system.allow(None)
        system.do(lambda: setattr(system.worker.info, "worker_id", "another"))
        system.do(lambda: system.worker.renew("new"))
        wait_until(lambda: len(system.worker.contexts) == 2, "a new stream")
        assert system.chat().status_code == 200


def test_submit_is_sent_again_when_the_model_version_changes_in_transit() -> None:
    with System(configure=with_revisions("old")) as system:
        system.allow(None)
        system.do(lambda: setattr(system.worker.info, "revision", "new"))  # the worker sends a new hello and then refuses
        assert system.chat().json()["choices"][0]["message"]["content"] == ANSWER
        assert [submit.revision for submit in system.worker.submits] == ["old", "new"]
        assert system.metric("rootstock_gateway_moves_total", cause="weights", state="new") == 1


def test_session_turn_fails_when_the_model_version_changes_in_transit() -> None:
    with System(configure=with_revisions("old")) as system:
        system.allow(None)
        system.do(lambda: setattr(system.worker.info, "revision", "new"))
        answer = system.post("/generate", {"text": "Hi", "session_params": {"id": "mine"}})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "session_unavailable"
        assert "weights" in answer.json()["error"]["message"] and system.submits() == [1]


def test_request_fails_when_a_worker_refuses_the_model_version_that_the_worker_reported() -> None:
    with System(configure=with_revisions("old")) as system:
        system.allow(None)
        system.do(lambda: system.worker.refuse.extend([(pb.ERROR_CODE_OTHER_WEIGHTS, "others")] * 3))
        assert system.chat().status_code == 500 and system.submits() == [2]


def test_hedged_request_keeps_the_model_version_of_the_copy_with_the_first_output() -> None:
    with System(workers=2, configure=with_revisions("old", "new"), hedge_after_s=AFTER_S, queue_timeout_s=0.5) as system:
        pending = Pending(system, stream=True)
        first, second = hedged(system)
        allow(system, second, 5)
        wait_until(lambda: not first.servicer.running and second.servicer.steps_left == 0, "the abort")
        system.call(second.stop())
        system.allow(None)
        assert GONE in pending.result().text
        assert len(first.servicer.submits) == 1


def test_waiting_request_with_output_is_released_when_the_client_leaves() -> None:
    with System(workers=2, configure=with_revisions("old", "new"), queue_timeout_s=LONG_S) as system:
        client = RawClient(system, "/v1/completions", {"prompt": "Hi"})
        first = begun(system, 5)
        system.call(first.stop())
        wait_until(lambda: system.num_waiting == 1, "the request in the gateway's queue")
        client.vanish()
        wait_until(lambda: system.num_waiting == 0, "the release of the request")
        assert refusals(system) == 0
