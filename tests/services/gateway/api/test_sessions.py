"""Tests of sessions: placement, opening and closing, and turns that reach the session's worker only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.routing.session_home import new_session_id, worker_index
from tests.services.gateway.api.test_sglang import Waiting
from tests.services.gateway.fakes import CONTEXT_LEN, SERVICERS, FakeWorker
from tests.services.gateway.system import System, events, wait_until

WORKERS = st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=6, unique=True)
NAMES = st.text(min_size=1, max_size=20)


class TestWorkerIndex:
    @given(NAMES, WORKERS, st.randoms())
    def test_worker_of_a_session_is_independent_of_the_order_of_workers(self, name: str, workers: list[str], random: Any) -> None:
        shuffled = random.sample(workers, len(workers))
        index, other = worker_index(name, workers), worker_index(name, shuffled)
        assert index is not None and other is not None
        assert workers[index] == shuffled[other]

    @given(NAMES, WORKERS, st.text(min_size=1, max_size=9))
    def test_sessions_move_only_to_the_new_worker_when_a_worker_is_added(self, name: str, workers: list[str], new: str) -> None:
        index, after = worker_index(name, workers), worker_index(name, [*workers, new])
        assert index is not None and after is not None
        assert after in (index, len(workers)) or workers[index] == new

    def test_sessions_spread_over_workers(self) -> None:
        places = [worker_index(f"session-{i}", ["a", "b", "c", "d"]) for i in range(400)]
        assert all(70 <= places.count(index) <= 130 for index in range(4))

    @given(WORKERS, WORKERS)
    def test_generated_session_id_stays_with_the_worker_when_the_other_workers_change(
        self, workers: list[str], others: list[str]
    ) -> None:
        name = new_session_id(workers)
        index = worker_index(name, workers)
        assert index is not None
        later = [*others, workers[index]]
        again = worker_index(name, later)
        assert again is not None and later[again] == workers[index]

    def test_generated_session_id_has_no_worker_index_when_the_worker_is_gone(self) -> None:
        assert worker_index(new_session_id(["a"]), ["b", "c"]) is None

    def test_session_has_no_worker_index_when_there_are_no_workers(self) -> None:
        assert worker_index("session", []) is None


class SessionWorker(FakeWorker):
    """A worker with sessions. It refuses turns of unknown sessions, as a real worker does."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sessions: dict[str, worker_pb2.OpenSessionRequest] = {}
        self.failure: grpc.StatusCode | None = None

    async def OpenSession(self, request: worker_pb2.OpenSessionRequest, context: Any) -> worker_pb2.OpenSessionResponse:
        if self.failure is not None:
            await context.abort(self.failure, "refused by the worker")
        if request.session_id in self.sessions:
            return worker_pb2.OpenSessionResponse(opened=False, message="session is open already")
        self.sessions[request.session_id] = request
        return worker_pb2.OpenSessionResponse(opened=True)

    async def CloseSession(self, request: worker_pb2.CloseSessionRequest, context: Any) -> worker_pb2.CloseSessionResponse:
        if self.failure is not None:
            await context.abort(self.failure, "refused by the worker")
        return worker_pb2.CloseSessionResponse(closed=self.sessions.pop(request.session_id, None) is not None)

    async def _read(self, requests: Any, running: Any, refused: Any) -> None:
        async def known() -> Any:
            async for message in requests:
                for submit in message.submits:
                    if submit.HasField("session") and submit.session.session_id not in self.sessions:
                        self.refuse.append((pb.ERROR_CODE_INVALID_ARGUMENT, "there is no such session", "session.session_id"))
                yield message

        await super()._read(known(), running, refused)


SERVICERS[SessionWorker] = SERVICERS[FakeWorker]


@pytest.fixture
def make_system() -> Iterator[Callable[[int], System]]:
    systems: list[System] = []

    def build(workers: int) -> System:
        system = System(workers=workers, down=("worker",), queue_timeout_s=1.0)
        systems.append(system)
        system.__enter__()
        for index, host in enumerate(system.workers):
            host.servicer = SessionWorker(f"worker-{index}")
            system.call(host.start())
        wait_until(lambda: system.gateway.dispatcher.connected() == workers, "the connections of the workers")
        wait_until(lambda: system.get("/readiness").status_code == 200, "readiness")
        return system

    yield build
    for system in systems:
        system.__exit__()


def pause(system: System, worker: int, paused: bool) -> None:
    servicer = system.workers[worker].servicer
    system.do(lambda: servicer.report_load(paused=paused))
    wait_until(lambda: system.links[worker].paused is paused, "the load report")


def open_session(system: System, **body: Any) -> httpx.Response:
    return system.post("/open_session", {"capacity_of_str_len": 1000, **body})


def close_session(system: System, session_id: str) -> httpx.Response:
    return system.post("/close_session", {"session_id": session_id})


def turn(system: System, session_id: str, **body: Any) -> httpx.Response:
    params = {"id": session_id, **body.pop("session", {})}
    return system.post("/generate", {"text": "Hi", "session_params": params, **body})


def host_of(system: System, session_id: str) -> Any:
    """Returns the host whose worker has the session."""
    (host,) = [host for host in system.workers if session_id in host.servicer.sessions]
    return host


class TestOpenAndClose:
    def test_route_open_session_returns_the_session_id(self, make_system: Callable[[int], System]) -> None:
        system = make_system(1)
        answer = open_session(system, session_id="mine", timeout=2.5)
        assert (answer.status_code, answer.json()) == (200, "mine")
        request = system.worker.sessions["mine"]  # type: ignore[attr-defined]
        assert (request.capacity_tokens, request.ttl_ms) == (1000, 2500)

    def test_session_with_a_generated_id_avoids_paused_workers(self, make_system: Callable[[int], System]) -> None:
        system = make_system(2)
        pause(system, 0, True)
        assert all(host_of(system, open_session(system).json()) is system.workers[1] for _ in range(8))
        pause(system, 1, True)
        assert open_session(system).status_code == 200, "a session opens on a paused worker if all workers are paused"

    def test_session_id_is_generated_when_absent(self, make_system: Callable[[int], System]) -> None:
        system = make_system(2)
        made = [open_session(system).json() for _ in range(8)]
        assert len(set(made)) == 8
        for session_id in made:
            assert not host_of(system, session_id).servicer.sessions[session_id].HasField("ttl_ms")

    def test_session_id_in_use_is_refused(self, make_system: Callable[[int], System]) -> None:
        system = make_system(2)
        assert open_session(system, session_id="mine").status_code == 200
        answer = open_session(system, session_id="mine")
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["message"]) == (400, "session_id", "session is open already")

    def test_closed_session_can_be_opened_again(self, make_system: Callable[[int], System]) -> None:
        system = make_system(2)
        open_session(system, session_id="mine")
        assert close_session(system, "mine").status_code == 200
        assert close_session(system, "mine").status_code == 404
        assert open_session(system, session_id="mine").status_code == 200

    def test_close_session_gets_404_when_the_model_is_unknown(self, system: System) -> None:
        answer = system.post("/close_session", {"session_id": "mine", "model": "nobody's"})
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"

    @pytest.mark.by_day(one_in=2, seed=6)
    @pytest.mark.parametrize(
        ("code", "status"),
        [
            (grpc.StatusCode.UNAVAILABLE, 503),
            (grpc.StatusCode.INVALID_ARGUMENT, 400),
            (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
            (grpc.StatusCode.INTERNAL, 500),
        ],
    )
    def test_worker_errors_become_http_errors(
        self, make_system: Callable[[int], System], code: grpc.StatusCode, status: int
    ) -> None:
        system = make_system(1)
        system.do(lambda: setattr(system.worker, "failure", code))
        assert open_session(system).status_code == status

    def test_request_to_open_a_session_gets_503_without_a_worker(self) -> None:
        with System(down=("worker",), queue_timeout_s=0.2) as system:
            answer = open_session(system)
            assert answer.status_code == 503 and "retry-after" in answer.headers

    @pytest.mark.by_day(one_in=3, seed=37)
    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, "capacity_of_str_len"),
            ({"capacity_of_str_len": -1}, "capacity_of_str_len"),
            ({"capacity_of_str_len": 1, "session_id": ""}, "session_id"),
            ({"capacity_of_str_len": 1, "session_id": 5}, "session_id"),
            ({"capacity_of_str_len": 1, "timeout": 0}, "timeout"),
            ({"capacity_of_str_len": 1, "streaming": True}, "streaming"),
        ],
    )
    def test_error_names_the_bad_field_of_open_session(self, shared: System, body: dict[str, Any], param: str) -> None:
        answer = shared.post("/open_session", body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param


class TestTurns:
    def test_turns_reach_the_worker_of_the_session(self, make_system: Callable[[int], System]) -> None:
        system = make_system(3)
        for session_id in [*(f"chosen-{i}" for i in range(6)), None]:
            opened = open_session(system, session_id=session_id).json()
            assert [turn(system, opened).status_code for _ in range(2)] == [200, 200]
            worker = host_of(system, opened).servicer
            assert [submit.session.session_id for submit in worker.submits[-2:]] == [opened, opened]

    def test_turn_fields_reach_the_worker(self, make_system: Callable[[int], System]) -> None:
        system = make_system(1)
        open_session(system, session_id="mine")
        assert turn(system, "mine", rid="t1").json()["meta_info"]["id"] == "t1"
        first = system.worker.submits[-1]
        assert first.request_id == "t1" and first.session == worker_pb2.SessionTurn(session_id="mine")
        session = {"rid": "t1", "offset": 3, "replace": True, "drop_previous_output": True}
        turn(system, "mine", session=session, sampling_params={"max_new_tokens": None})
        second = system.worker.submits[-1]
        assert second.session == worker_pb2.SessionTurn(
            session_id="mine", parent_request_id="t1", offset=3, replace=True, drop_previous_output=True
        )
        # The gateway sends no limit, because only the worker knows the length of the session's context.
        assert not second.sampling.HasField("max_new_tokens")

    def test_turn_with_a_parent_adds_no_begin_of_sequence_token(self, make_system: Callable[[int], System]) -> None:
        system = make_system(1)
        open_session(system, session_id="mine")
        turn(system, "mine", rid="t1")
        turn(system, "mine", session={"rid": "t1"})
        turn(system, "mine", session={"rid": "t1", "offset": 0})
        assert [call.add_special_tokens for call in system.tokenizer.calls] == [True, False, True]

    @pytest.mark.parametrize("offset", [None, -1])
    def test_turn_without_an_offset_continues_after_the_whole_parent(
        self, make_system: Callable[[int], System], offset: int | None
    ) -> None:
        system = make_system(1)
        open_session(system, session_id="mine")
        turn(system, "mine", session={"offset": offset})
        assert not system.worker.submits[-1].session.HasField("offset")

    def test_turn_can_be_streamed(self, make_system: Callable[[int], System]) -> None:
        system = make_system(1)
        open_session(system, session_id="mine")
        assert events(turn(system, "mine", stream=True).text)[-1]["text"] == "Hello, world!"

    def test_request_without_a_session_id_has_no_session_at_the_worker(self, shared: System) -> None:
        assert shared.post("/generate", {"text": "Hi", "session_params": {"id": None}}).status_code == 200
        assert not shared.worker.submits[-1].HasField("session")

    def test_turn_of_an_unknown_session_gets_404(self, make_system: Callable[[int], System]) -> None:
        system = make_system(2)
        answer = turn(system, "never opened")
        assert answer.status_code == 404 and "no such session" in answer.json()["error"]["message"]
        assert sum(len(host.servicer.submits) for host in system.workers) == 1

    def test_turn_is_refused_when_the_worker_is_full(self, make_system: Callable[[int], System]) -> None:
        system = make_system(2)
        open_session(system, session_id="mine")
        host = host_of(system, "mine")
        system.do(lambda: host.servicer.refuse.append((pb.ERROR_CODE_QUEUE_FULL, "full")))
        answer = turn(system, "mine")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
        assert sum(len(host.servicer.submits) for host in system.workers) == 1

    def test_turn_fails_when_the_worker_is_lost(self, make_system: Callable[[int], System]) -> None:
        system = make_system(2)
        open_session(system, session_id="mine")
        host = host_of(system, "mine")
        system.do(lambda: host.servicer.allow(2))
        waiting = Waiting(system, "/generate", {"text": "Hi", "session_params": {"id": "mine"}})
        wait_until(lambda: bool(host.servicer.running) and host.servicer.steps_left == 0, "two tokens")
        system.call(host.stop())
        answer = waiting.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "session_unavailable")
        assert "retry-after" in answer.headers
        assert sum(len(host.servicer.submits) for host in system.workers) == 1

    def test_turn_of_a_session_with_a_generated_id_is_refused_until_the_worker_returns(
        self, make_system: Callable[[int], System]
    ) -> None:
        system = make_system(2)
        session_id = open_session(system).json()
        host = host_of(system, session_id)
        system.call(host.stop())
        wait_until(lambda: system.gateway.dispatcher.connected() == 1, "the disconnection")
        answer = turn(system, session_id)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "session_unavailable")
        assert close_session(system, session_id).status_code == 503
        system.call(host.start())
        wait_until(lambda: system.gateway.dispatcher.connected() == 2, "the connection of the worker")
        assert turn(system, session_id).status_code == 200

    def test_turn_is_refused_when_the_text_fills_the_whole_context(self, shared: System) -> None:
        answer = turn(shared, "mine", text="x" * CONTEXT_LEN)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "text"
