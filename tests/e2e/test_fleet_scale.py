"""A fleet scales from zero workers to four and back while requests wait. Clients keep their fair share despite a greedy one.

Workers use the fake executor, whose steps take a fixed time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from tests.e2e.fleet import MODEL, Fleet
from tests.e2e.fleet_cases import COMPLETIONS, Case
from tests.e2e.fleet_clients import Clients, Exchange, Wave
from tests.e2e.system import wait_until
from tests.night import NIGHTLY

SMALL = {"gateways": 1, "tokenizers": 1, "detokenizers": 1, "dtype": "auto"}
SLOTS = 16  # concurrent requests of the only worker of the `shared` fleet
# Together, the modest clients need about half of the worker's slots.
MODEST = 9  # number of modest clients
ARRIVALS = 9  # requests per modest client
EVERY_S = 0.6  # seconds between two requests of a modest client
LATE_S = 1.5  # seconds after ARRIVALS * EVERY_S at which the responses are counted
TOKENS = 30
FAIR_SHARE = 0.9
GREED = 200  # concurrent requests of the greedy client; a modest client has about one


def completion(number: int, max_tokens: int) -> Case:
    """Returns a request that takes `max_tokens` decode steps."""
    body = {"model": MODEL, "prompt": [100 + number % 900] * 8, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return Case("completion", COMPLETIONS, orjson.dumps(body))


def all_answered(exchanges: list[Exchange], tokens: int) -> None:
    assert not (failed := [exchange.error for exchange in exchanges if exchange.error]), failed[:3]
    assert all(exchange.answer and exchange.answer.completion_tokens == tokens for exchange in exchanges)


def waiting(fleet: Fleet) -> float:
    return fleet.metric("gateway", "rootstock_gateway_queue_length")


def usable(fleet: Fleet) -> float:
    return fleet.metric("gateway", "rootstock_gateway_workers", state="usable")


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet whose gateway has the addresses of four workers. The workers are not started."""
    flags = {"worker_flags": "--executor fake --fake-step-s 0.02", "gateway_flags": "--grace-s 30"}
    down = tuple(f"worker-{index}" for index in range(4))
    with Fleet(tmp_path, down=down, workers=4, **SMALL, **flags) as started:
        started.wait_ready("redis", "tokenizer", "detokenizer")
        wait_until(lambda: started.is_listening("gateway"), 60, "the gateway to listen")
        yield started


def test_fleet_scales_from_zero_to_four_workers_and_back_to_zero(empty: Fleet) -> None:
    fleet, tokens = empty, 40
    with Clients(fleet.urls) as clients:

        def send(count: int) -> Wave:
            return clients.wave([completion(number, tokens) for number in range(count)])

        first = send(8)
        wait_until(lambda: waiting(fleet) > 0, 60, "requests to wait for the first worker")
        fleet.start("worker-0")
        all_answered(first.wait(), tokens)

        second = send(160)  # more requests than one worker runs at once
        for name in ("worker-1", "worker-2", "worker-3"):
            fleet.start(name)
        fleet.wait_ready(*fleet.workers)
        wait_until(lambda: usable(fleet) == 4, 60, "the gateway to connect to all four workers")
        third = send(160)
        all_answered(second.wait() + third.wait(), tokens)
        served = {name: fleet.metric(name, "sglang:num_requests_total") for name in fleet.workers}
        assert all(served.values()), f"a worker served no request: {served}"

        last = send(40)
        time.sleep(0.2)  # long enough for some requests to start, and too short for one to end
        for name in fleet.workers:
            fleet.term(name)
        late = send(4)
        wait_until(lambda: waiting(fleet) > 0, 60, "requests to wait while there is no worker")
        fleet.start("worker-0")
        all_answered(last.wait() + late.wait(), tokens)
    fleet.wait_quiet(60)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Fleet]:
    keys = ["greedy", *(f"modest-{number}" for number in range(MODEST))]
    file = tmp_path / "keys.json"
    file.write_bytes(orjson.dumps({"keys": [{"name": key, "key": key} for key in keys]}))
    flags = {
        "worker_flags": f"--executor fake --fake-step-s 0.02 --max-running-requests {SLOTS}",
        "gateway_flags": f"--api-keys-file {file}",
    }
    with Fleet(tmp_path, workers=1, **SMALL, **flags) as started:
        yield started


@pytest.mark.skipif(not NIGHTLY, reason="takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1")
def test_modest_clients_keep_a_fair_share_despite_a_greedy_client(shared: Fleet) -> None:
    """With the greedy client, the modest clients must get at least nine tenths of the responses that they get without it.

    served_to_the_modest() counts the responses at a fixed time after the first request.
    """
    with Clients(shared.urls) as clients:
        alone = served_to_the_modest(clients)
        over = threading.Event()
        greedy = clients.keep_asking([completion(number, TOKENS) for number in range(97)], GREED, over, key="greedy")
        wait_until(lambda: greedy.num_ended() > SLOTS, 60, "the greedy client to fill the worker")
        beside = served_to_the_modest(clients)
        over.set()
        greedy.wait()
    print(f"{MODEST} modest clients: {alone} responses before the count without the greedy client, {beside} with it")
    assert beside >= FAIR_SHARE * alone
    assert not [exchange.error for exchange in greedy.exchanges if exchange.error], (
        "requests of the greedy client must wait and succeed"
    )


def served_to_the_modest(clients: Clients) -> int:
    cases = [[completion(100 * number + index, TOKENS) for index in range(ARRIVALS)] for number in range(MODEST)]
    waves = [clients.arrive(asked, EVERY_S, key=f"modest-{number}") for number, asked in enumerate(cases)]
    time.sleep(ARRIVALS * EVERY_S + LATE_S)
    count = sum(wave.num_ended() for wave in waves)
    all_answered([exchange for wave in waves for exchange in wave.wait()], TOKENS)
    return count
