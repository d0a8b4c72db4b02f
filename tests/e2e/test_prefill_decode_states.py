"""Separate prefill and decode workers: each process is killed or stopped in each state of a request.

A test brings a request into a state by slowing down workers (docs/reference/control.md) or by stopping a prefill worker during a
read. Metrics show that the request is in the state. Only requests of a killed gateway may fail, and all pages must be freed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import httpx
import pytest

from rootstock_llm.services.local.ports import free_ports
from tests.e2e.system import CHOSEN_MODELS, MODELS, System, wait_until
from tests.e2e.test_prefill_decode import PAGE, bodies, ids_of, is_idle, is_ready, separate_system, workers
from tests.night import NIGHTLY

HOLD_S = 4.0  # seconds for which a prefill worker reserves KV that no decode worker has read
READ_S = 10.0  # time limit of a KV read, which a stopped worker exceeds
FREE_S = 1.0  # seconds after the last deadline until all pages must be free
PREFILL, DECODE = ("prefill-0",), ("decode-0", "decode-1")
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
STATES = ("queued", "computing", "held", "pulling", "published", "decoding")
CELLS = [(state, who, how) for state in STATES for who in ("prefill", "decode", "gateway") for how in (KILL, STOP)]
OF_THE_DAY = [("computing", "prefill", KILL), ("pulling", "decode", KILL)]
SLOW_S = 2.0
TRIES = 5  # attempts to bring a request into a state, for example to stop a worker during a read
SHORT, LONG = 12, 250  # prompt tokens of the other requests, and of the tested request

pytestmark = pytest.mark.timeout(900)  # seconds; a restart of a worker takes long on a slow machine
salts = count()


class Fleet:
    """A running system with one prefill worker, two decode workers and two gateways, and a thread pool of clients."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._clients = ThreadPoolExecutor(16)

    def ask(self, body: dict[str, Any], gateway: str = "gateway-0") -> Future[httpx.Response]:
        url = self.system.parts[gateway].url
        return self._clients.submit(lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=120))

    def slow(self, names: tuple[str, ...], seconds: float, but: str = "") -> None:
        def is_slow(name: str) -> bool:
            body = {"worker": name, "forward_sleep_time": seconds, "timeout_s": 5}
            return bool(httpx.post(f"{self.admin}/slow_down", json=body, timeout=60).json().get("success"))

        for name in names:
            if name != but:
                wait_until(lambda: is_slow(name), 60, f"{name} to apply its pace")  # noqa: B023

    @property
    def admin(self) -> str:
        flags = self.system.parts["gateway-0"].command.argv
        return f"http://127.0.0.1:{flags[flags.index('--admin-port') + 1]}"

    def of(self, name: str, metric: str) -> float:
        return self.system.metric(name, metric)

    def handovers(self) -> float:
        return sum(self.of(name, "rootstock_gateway_handovers_total") for name in self.alive("gateway-0", "gateway-1"))

    def alive(self, *names: str) -> list[str]:
        return [name for name in names if self.system.children[name].exit_code is None]

    def signal(self, name: str, how: signal.Signals) -> None:
        self.system.children[name].signal(how)

    def is_whole(self) -> bool:
        return workers(self.system) == 3 and all(is_ready(self.system.parts[name].url) for name in ("gateway-0", "gateway-1"))

    def is_idle(self) -> bool:
        return is_idle(self.system)

    def restore(self) -> None:
        """Restarts ended processes and continues stopped ones, waits until all are connected, and restores full speed."""
        for name in (*PREFILL, *DECODE, "gateway-0", "gateway-1"):
            if self.system.children[name].exit_code is not None:
                self.system.start(name)
            else:
                self.signal(name, signal.SIGCONT)
        wait_until(self.is_whole, 90, "all processes to be connected")
        self.slow((*PREFILL, *DECODE), 0.0)
        wait_until(self.is_idle, 60, "all pages to be free")

    def close(self) -> None:
        self._clients.shutdown(cancel_futures=True)


@pytest.fixture(scope="module", params=CHOSEN_MODELS)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    flags = f"--disaggregation-hold-s {HOLD_S} --chunked-prefill-size 64"
    more = {"gateways": 2, "admin_port": free_ports(1)[0], **MODELS[request.param]}
    with separate_system(tmp_path_factory.mktemp("states"), 1, 2, flags, **more) as system:
        made = Fleet(system)
        wait_until(made.is_whole, 60, "all processes to be connected")
        yield made
        made.close()


@pytest.fixture
def fleet(started: Fleet) -> Iterator[Fleet]:
    yield started
    started.restore()


def body(seed: int, length: int, tokens: int) -> dict[str, Any]:
    made = bodies(1, seed)[0]
    prompt = [(seed * 131 + at * at) % 1100 + 50 for at in range(length)]
    return {**made, "prompt": prompt, "max_tokens": tokens, "cache_salt": f"states {next(salts)}"}


class Case:
    """The tested request, other requests that run at the same time, and the expected token ids of all these requests.

    Args:
        through: gateways; each of them gets the tested request once.
    """

    def __init__(self, fleet: Fleet, through: tuple[str, ...] = ("gateway-0",)) -> None:
        self.fleet = fleet
        self._asked, self._others = body(5, LONG, 24), [body(10, SHORT, 30), body(11, SHORT, 30), body(12, LONG, 8)]
        self._expected, *self._of_others = [self._alone(each) for each in (self._asked, *self._others)]
        wait_until(fleet.is_idle, 60, "the fleet to be idle")
        self._before = {name: fleet.of(name, "rootstock_worker_pulled_tokens_total") for name in DECODE}
        self._handed = fleet.handovers()
        self._through = through
        self._answers: dict[str, Future[httpx.Response]] = {}
        self._beside: list[tuple[Future[httpx.Response], list[int]]] = []

    def _alone(self, asked: dict[str, Any]) -> list[int]:
        answer = self.fleet.ask({**asked, "cache_salt": f"alone {next(salts)}"}).result()
        assert answer.status_code == 200, answer.text
        return ids_of(answer.json())

    def begin(self) -> None:
        self._answers = {name: self.fleet.ask({**self._asked, "cache_salt": f"{next(salts)}"}, name) for name in self._through}

    def begin_beside(self, *others: int) -> None:
        """Starts other requests and waits until each runs on a different worker."""
        running = (*PREFILL, *DECODE)
        for other in others:
            before = sum(map(self._runs, running))
            self._beside.append((self.fleet.ask(self._others[other]), self._of_others[other]))
            wait_until(lambda: sum(map(self._runs, running)) > before, 60, "another request to run")  # noqa: B023
        assert max(map(self._runs, running)) == 1, "each request must run on a different worker"

    def _runs(self, name: str) -> float:
        return self.fleet.of(name, "sglang:num_running_reqs")

    def pulled(self, name: str) -> float:
        return self.fleet.of(name, "rootstock_worker_pulled_tokens_total") - self._before[name]

    def reader(self) -> str:
        """Waits until a decode worker queues or runs the request, or reads the request's pages. Returns the worker's name."""

        def has_it(name: str) -> bool:
            of = self.fleet.of
            waits = of(name, "rootstock_worker_importing_requests") + of(name, "sglang:num_queue_reqs")
            return waits > 0 or self.pulled(name) > 0 or self._runs(name) > 1

        wait_until(lambda: any(map(has_it, DECODE)), 60, "a decode worker to get the request")
        return next(filter(has_it, DECODE))

    def reach(self, state: str) -> str:
        """Brings the request into the state.

        Returns:
            Name of the decode worker that has or will get the request. For a queued request, any decode worker.
        """
        fleet, of = self.fleet, self.fleet.of
        if state in ("queued", "computing"):
            if state == "queued":  # other requests occupy all workers
                fleet.slow(DECODE, SLOW_S)
                self.begin_beside(0, 1)
            fleet.slow(PREFILL, SLOW_S if state == "queued" else SLOW_S / 2)
            if state == "queued":
                self.begin_beside(2)
                self.begin()
                wait_until(lambda: of("prefill-0", "sglang:num_queue_reqs") >= 1, 60, "the request to be queued")
                return DECODE[0]
            self.begin()
            self._wait_for_its_first_chunk()
            assert of("prefill-0", "sglang:num_running_reqs") >= 1, "the prefill worker must still compute the prompt"
            return self.reader()
        fleet.slow(DECODE, SLOW_S if state != "decoding" else 0.2)
        self.begin_beside(0, 1)
        self.begin()
        wait_until(self._is_handed_over, 60, "the handover to the decode worker")
        if state == "held":
            return self.reader()
        if state == "pulling":
            return self._stop_prefill_worker_during_a_read()
        wait_until(self._is_pulled, 60, "the decode worker to read the pages")
        reader = self.reader()
        if state == "decoding":
            wait_until(lambda: self._runs(reader) >= 2, 60, "the request to decode")
        return reader

    def _is_handed_over(self) -> bool:
        return self.fleet.handovers() == self._handed + len(self._answers)

    def _is_pulled(self) -> bool:
        return sum(map(self.pulled, DECODE)) >= LONG // PAGE * PAGE * len(self._answers)

    def _wait_for_its_first_chunk(self) -> None:
        """Waits until the prefill worker has computed the request's first chunk.

        A gateway with outdated loads may send the prompt to an idle decode worker. The request is then repeated.
        """
        for _ in range(TRIES):
            wait_until(lambda: self._has_reservation() or self._has_ended(), 60, "the first chunk of the prompt")
            if self._has_reservation():
                return
            self._repeat()
        raise AssertionError(f"none of {TRIES} requests used the prefill worker")

    def _has_reservation(self) -> bool:
        return self.fleet.of("prefill-0", "rootstock_worker_rooms") >= 1

    def _has_ended(self) -> bool:
        return all(answer.done() for answer in self._answers.values())

    def _repeat(self) -> None:
        """Checks the responses and repeats the request."""
        for answer in self._answers.values():
            assert answer.result().status_code == 200, answer.result().text
            assert ids_of(answer.result().json()) == self._expected
        self._handed = self.fleet.handovers()
        self._before = {name: self.fleet.of(name, "rootstock_worker_pulled_tokens_total") for name in DECODE}
        self.begin()

    def _stop_prefill_worker_during_a_read(self) -> str:
        """Stops the prefill worker during a read and returns the reading decode worker.

        If the read ends before the worker stops, repeats the request.
        """
        fleet = self.fleet

        def readers() -> list[str]:
            return [name for name in DECODE if fleet.of(name, "rootstock_worker_quarantined_tokens")]

        for _ in range(TRIES):
            fleet.signal("prefill-0", STOP)
            wait_until(lambda: bool(readers()) or self._is_pulled(), 60, "a KV read to begin")
            if found := readers():
                return found[0]
            fleet.signal("prefill-0", signal.SIGCONT)
            self._repeat()
            wait_until(self._is_handed_over, 60, "the handover to the decode worker")
        raise AssertionError(f"all {TRIES} reads ended before the prefill worker stopped")

    def end(self, lost_gateway: str = "") -> None:
        """Checks that all responses, except those through `lost_gateway`, have the expected token ids."""
        answers = [(answer, self._expected) for name, answer in self._answers.items() if name != lost_gateway]
        for answer, expected in (*answers, *self._beside):
            assert answer.result().status_code == 200, answer.result().text
            assert ids_of(answer.result().json()) == expected


@pytest.mark.parametrize(
    ("state", "who", "how"),
    CELLS if NIGHTLY else OF_THE_DAY,
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value,
)
def test_token_ids_stay_equal_when_a_process_is_lost_in_each_state_of_a_request(
    fleet: Fleet, state: str, who: str, how: signal.Signals
) -> None:
    lost_gateway = "gateway-1" if who == "gateway" else ""
    case = Case(fleet, ("gateway-0", "gateway-1") if lost_gateway else ("gateway-0",))
    reader = case.reach(state)
    victim = {"prefill": "prefill-0", "decode": reader, "gateway": "gateway-1"}[who]
    fleet.signal(victim, how)
    lost_at = time.monotonic()
    if state == "pulling" and victim != "prefill-0":
        fleet.signal("prefill-0", signal.SIGCONT)
    still = "prefill-0" if state == "pulling" and victim == "prefill-0" else victim
    fleet.slow((*PREFILL, *DECODE), 0.0, but=still)
    case.end(lost_gateway)
    assert_free(fleet, {victim, still}, lost_at)
    if how is KILL:
        wait_until(lambda: fleet.system.children[victim].exit_code is not None, 60, f"{victim} to end")
    fleet.restore()


def assert_free(fleet: Fleet, lost: set[str], lost_at: float) -> None:
    """Waits until the surviving workers are idle, at most FREE_S seconds after the last deadline of a reservation or a read."""
    survivors = [name for name in (*PREFILL, *DECODE) if name not in lost]
    answered_at = time.monotonic()
    until = max(lost_at + SLOW_S + READ_S, answered_at + HOLD_S) + FREE_S  # a slowed-down worker may begin its read SLOW_S later

    def is_free() -> bool:
        kept = ("rootstock_worker_rooms", "rootstock_worker_quarantined_tokens", "rootstock_worker_importing_requests")
        return not any(fleet.of(name, metric) for name in survivors for metric in (*kept, "sglang:kv_used_tokens"))

    wait_until(is_free, until - time.monotonic(), "the KV reservation to end")


def test_read_of_an_expired_kv_reservation_is_refused_once_and_the_prompt_is_computed(fleet: Fleet) -> None:
    case = Case(fleet)
    refused = {name: fleet.of(name, "rootstock_worker_refused_pulls_total") for name in DECODE}
    expired = fleet.of("prefill-0", "rootstock_worker_rooms_expired_total")
    fleet.slow(DECODE, 2 * HOLD_S)
    case.begin_beside(0, 1)
    case.begin()
    reader = case.reader()
    wait_until(
        lambda: fleet.of("prefill-0", "rootstock_worker_rooms_expired_total") == expired + 1,
        HOLD_S + 10,
        "the KV reservation to expire",
    )
    fleet.slow(DECODE, 0.0)
    case.end()
    assert fleet.of(reader, "rootstock_worker_refused_pulls_total") == refused[reader] + 1
    assert case.pulled(reader) == 0
    wait_until(fleet.is_idle, 60, "all pages to be free")
