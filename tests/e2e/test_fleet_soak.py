"""Random faults for half an hour. No request fails, and the memory and open files of the surviving processes do not grow."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median

import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.fleet_cases import Case, make_cases
from tests.e2e.fleet_clients import Clients, check
from tests.e2e.fleet_index import index_faults
from tests.e2e.system import wait_until
from tests.night import NIGHTLY

SOAK_S = 1800.0
FAULT_EVERY_S = 10.0
FAULT_S = 4.0  # seconds from a fault to its repair
SAMPLE_S = 1.0
MAX_GROWTH = 0.05  # share by which resident memory may grow after the first third of the soak
MAX_MORE_FILES = 5
pytestmark = [
    pytest.mark.timeout(SOAK_S + 600),
    pytest.mark.skipif(not NIGHTLY, reason="takes half an hour; runs only with ROOTSTOCK_TEST_NIGHTLY=1"),
]
SURVIVORS = ("gateway-0", "tokenizer-0", "detokenizer-0", "worker-0")


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("soak")) as started:
        yield started


Fault = tuple[str, Callable[[], None], Callable[[], None]]  # name, function that causes the fault, function that repairs it


def faults_of(fleet: Fleet) -> list[Fault]:
    """Returns the faults of Redis and of all processes that are not in SURVIVORS."""

    def killed(name: str) -> Fault:
        return f"SIGKILL {name}", lambda: fleet.kill(name), lambda: fleet.start(name)

    def ended(name: str) -> Fault:
        return f"SIGTERM {name}", lambda: fleet.term(name), lambda: fleet.start(name)

    def stopped(name: str) -> Fault:
        return f"SIGSTOP {name}", lambda: fleet.stop(name), lambda: fleet.cont(name)

    def slow(delay_s: float) -> None:
        fleet.redis_proxy.delay_s = delay_s

    def full(limit: int) -> None:
        fleet.redis.config_set("maxmemory", limit)

    return [
        *(killed(name) for name in ("worker-1", "worker-2", fleet.far_worker, "tokenizer-1", "detokenizer-1", "redis")),
        *(ended(name) for name in ("worker-1", "tokenizer-1", "detokenizer-1", "gateway-1")),
        *(stopped(name) for name in ("worker-2", "redis")),
        ("partition", fleet.cut, fleet.join),
        ("slow Redis", lambda: slow(0.5), lambda: slow(0.0)),
        ("full Redis", lambda: full(1_000_000), lambda: full(0)),
    ]


def test_fleet_does_not_leak_under_random_faults(fleet: Fleet) -> None:
    rng = random.Random(17)
    with Clients(fleet.urls) as clients:
        cases = make_cases(66, seed=8)
        expected = {e.case: e.answer for e in clients.ask(cases, concurrency=12) if e.answer is not None}
        assert len(expected) == len(set(cases))
        warm_up_survivors(fleet, clients, cases)
        fleet.wait_quiet(60)
        files_before = {name: fleet.num_fds(name) for name in SURVIVORS}
        memory: dict[str, list[float]] = {name: [] for name in SURVIVORS}
        done = threading.Event()
        wave = clients.keep_asking(cases, clients=24, until=done, rest_s=0.5)
        try:
            soak(fleet, rng, memory)
        finally:
            done.set()
        line = check(wave.wait(), expected)
    fleet.restore()
    fleet.wait_quiet(60)
    files_after = {name: fleet.num_fds(name) for name in SURVIVORS}
    print(f"{line}; open files {files_before} -> {files_after}")
    for name, samples in memory.items():
        after_a_third, at_the_end = halves(samples)
        print(f"{name}: {after_a_third:.1f} -> {at_the_end:.1f} MB")
    for name, samples in memory.items():
        after_a_third, at_the_end = halves(samples)
        assert at_the_end < after_a_third * (1 + MAX_GROWTH), f"{name} grows: {samples[:: len(samples) // 20]}"
        assert files_after[name] <= files_before[name] + MAX_MORE_FILES, name
    wait_until(lambda: not index_faults(fleet), 60, f"a consistent index: {index_faults(fleet)}")


def warm_up_survivors(fleet: Fleet, clients: Clients, cases: list[Case]) -> None:
    """Sends all requests while the second tokenizer and detokenizer are down, so that the survivors serve all of them.

    So the survivors allocate the memory for this load before the soak, and this memory does not count as growth.
    """
    twins = ("tokenizer-1", "detokenizer-1")
    for name in twins:
        fleet.kill(name)
    clients.ask(cases, concurrency=24)
    for name in twins:
        fleet.start(name)
    fleet.wait_ready(*twins)


def soak(fleet: Fleet, rng: random.Random, memory: dict[str, list[float]]) -> None:
    """Causes a fault every FAULT_EVERY_S seconds, one at a time, and samples the resident memory of the survivors."""
    faults = faults_of(fleet)
    order: list[Fault] = []
    end = time.monotonic() + SOAK_S
    while time.monotonic() < end:
        begun = time.monotonic()
        order = order or rng.sample(faults, len(faults))  # each fault occurs once before one is repeated
        name, begin, repair = order.pop()
        begin()
        watch(fleet, memory, begun + FAULT_S)
        repair()
        watch(fleet, memory, min(end, begun + FAULT_EVERY_S))
        print(f"{name}: {time.monotonic() - begun:.1f} s")


def watch(fleet: Fleet, memory: dict[str, list[float]], until: float) -> None:
    while True:
        for name, samples in memory.items():
            samples.append(fleet.resident_mb(name))
        if time.monotonic() >= until:
            return
        time.sleep(SAMPLE_S)


def halves(samples: list[float]) -> tuple[float, float]:
    """Returns the median of the third sixth of the samples, and the median of the last sixth."""
    sixth = max(1, len(samples) // 6)
    return median(samples[2 * sixth : 3 * sixth]), median(samples[-sixth:])
