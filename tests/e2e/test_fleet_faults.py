"""A fleet with concurrent streams (200 by night, 60 by day). Each test causes one fault while the streams run.

No request may fail, every text must equal the text of a run without faults, and the fleet must be idle afterwards.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.fleet_cases import Answer, Case, make_cases
from tests.e2e.fleet_clients import Clients, Wave, check
from tests.night import NIGHTLY

# Number of concurrent streams, number of generated requests, and KV tokens per worker.
STREAMS, NUM_CASES, POOL_TOKENS = (200, 96, 12_288) if NIGHTLY else (60, 33, 3_840)
RESTARTED_BY_NIGHT_ONLY = (
    "state",
    "worker-0",
    "worker-1",
    "worker-2",
    "gateway-1",
    "tokenizer-1",
    "detokenizer-1",
)  # processes that the restart test skips by day; it then restarts only one process of each kind
QUIET_S = 60.0  # time limit until the fleet must be idle; it usually takes a second
# Marks tests that run only by night, because a test by day has a similar fault.
by_night = pytest.mark.skipif(not NIGHTLY, reason="takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1")

Expected = Mapping[Case, Answer]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), max_total_tokens=POOL_TOKENS) as started:
        yield started


pytestmark = pytest.mark.timeout(900)  # seconds; a restart of all processes takes long on a slow machine


@pytest.fixture
def fleet(running: Fleet) -> Iterator[Fleet]:
    yield running
    running.restore()


@pytest.fixture(scope="module")
def clients(running: Fleet) -> Iterator[Clients]:
    with Clients(running.urls) as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(clients: Clients) -> Expected:
    """Results of all requests in a fleet without faults under a low load."""
    exchanges = clients.ask(make_cases(NUM_CASES, seed=5), concurrency=12)
    assert not (failed := [exchange.error for exchange in exchanges if exchange.error]), failed[:3]
    answers = {exchange.case: exchange.answer for exchange in exchanges if exchange.answer is not None}
    assert len(answers) > NUM_CASES // 2, "more than half of the cases must be distinct"
    return answers


def draw_cases(expected: Expected, seed: int) -> list[Case]:
    return random.Random(seed).choices(list(expected), k=STREAMS)


def survive(fleet: Fleet, clients: Clients, expected: Expected, what: str, fault: Callable[[Wave], None], cut: str = "") -> bool:
    """Starts all streams and causes the fault while they run. Then checks the results, and that the fleet becomes idle.

    Args:
        what: name of the fault in the printed line.
        fault: causes the fault; called when half of the streams have begun.
        cut: name of a gateway that may close its clients' connections; "" for none.

    Returns:
        True, so that a test can assert the call.

    Raises:
        AssertionError: a result is wrong, or the fleet is not idle within QUIET_S seconds.
    """
    begun = time.monotonic()
    wave = clients.wave(draw_cases(expected, seed=len(what)))
    wave.wait_begun(STREAMS // 2)
    assert wave.num_ended() < STREAMS // 2, "more than half of the streams must still run at the fault"
    fault(wave)
    line = check(wave.wait(), expected, cut)
    quiet_s = fleet.wait_quiet(QUIET_S)
    print(f"{what}: {line}; idle after {quiet_s:.2f} s; {time.monotonic() - begun:.1f} s in all")
    return quiet_s <= QUIET_S


@by_night
def test_fleet_returns_equal_results_under_load(fleet: Fleet, clients: Clients, expected: Expected) -> None:
    """Results must not depend on the load, on the other requests of a step, or on the gateway and worker of a request."""
    assert survive(fleet, clients, expected, "undisturbed", lambda wave: None)


@pytest.mark.parametrize("name", ["worker-0", "tokenizer-0", pytest.param("detokenizer-0", marks=by_night), "redis"])
def test_fleet_survives_the_kill_of_a_process(fleet: Fleet, clients: Clients, expected: Expected, name: str) -> None:
    def fault(wave: Wave) -> None:
        fleet.kill(name)
        wave.wait_begun(STREAMS * 3 // 4)
        fleet.start(name)

    assert survive(fleet, clients, expected, f"SIGKILL {name}", fault)


@by_night
def test_fleet_survives_a_stopped_worker(fleet: Fleet, clients: Clients, expected: Expected) -> None:
    """The stopped worker's requests move to other workers. When the worker continues, its late output must be ignored."""

    def fault(wave: Wave) -> None:
        fleet.stop("worker-1")
        wave.wait()
        fleet.cont("worker-1")

    assert survive(fleet, clients, expected, "SIGSTOP worker-1", fault)


def test_fleet_survives_a_partition_of_a_worker(fleet: Fleet, clients: Clients, expected: Expected) -> None:
    def fault(wave: Wave) -> None:
        fleet.cut()
        wave.wait()
        fleet.join()

    assert survive(fleet, clients, expected, f"partition of {fleet.far_worker}", fault)


@by_night
def test_fleet_survives_a_full_and_slow_redis(fleet: Fleet, clients: Clients, expected: Expected) -> None:
    def fault(wave: Wave) -> None:
        fleet.redis.config_set("maxmemory", 1_000_000)
        wave.wait_begun(STREAMS * 3 // 4)
        fleet.redis_proxy.delay_s = 0.5

    assert survive(fleet, clients, expected, "full and slow Redis", fault)


def test_fleet_survives_a_stopped_redis(fleet: Fleet, clients: Clients, expected: Expected) -> None:
    assert survive(fleet, clients, expected, "SIGSTOP redis", lambda wave: fleet.stop("redis"))


def test_fleet_survives_the_kill_of_a_gateway(fleet: Fleet, clients: Clients, expected: Expected) -> None:
    """Only the connections of the killed gateway's clients break, and the workers free all pages of the clients' requests."""
    assert survive(fleet, clients, expected, "SIGKILL gateway-1", lambda wave: fleet.kill("gateway-1"), cut="gateway-1")


def test_fleet_is_idle_when_clients_have_disconnected(fleet: Fleet, clients: Clients, expected: Expected) -> None:
    """Each client disconnects at a random time within 3 s, if its response is not complete by then."""
    rng = random.Random(11)
    waits = [rng.uniform(0.01, 3.0) for _ in range(STREAMS)]
    clients.leave(draw_cases(expected, seed=11), lambda index: waits[index])
    quiet_s = fleet.wait_quiet(QUIET_S)
    print(f"the fleet was idle {quiet_s:.2f} s after the last disconnect")
    assert not fleet.busy(), "the fleet must stay idle"


def test_fleet_serves_during_a_restart_of_all_processes(fleet: Fleet, clients: Clients, expected: Expected) -> None:
    """Under load, each process in turn gets SIGTERM, ends and is restarted, as in a rolling update."""
    names = [name for name in fleet.children if NIGHTLY or name not in RESTARTED_BY_NIGHT_ONLY]
    done = threading.Event()
    wave = clients.keep_asking(list(expected), clients=24 if NIGHTLY else 4, until=done, rest_s=1.0)
    try:
        for name in names:
            begun, ended = time.monotonic(), wave.num_ended()
            fleet.term(name)
            fleet.start(name)
            fleet.wait_ready(name)
            print(f"{name}: {time.monotonic() - begun:.1f} s, {wave.num_ended() - ended} requests completed meanwhile")
    finally:
        done.set()
    print(check(wave.wait(), expected))
    fleet.wait_quiet(QUIET_S)
