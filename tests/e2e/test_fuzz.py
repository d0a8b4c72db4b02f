"""Fuzzing of the whole system: each response is as documented, no process hangs or ends, and no memory or request leaks.

By day, one round with a fixed seed runs. With ROOTSTOCK_TEST_NIGHTLY=1, rounds with random seeds run for 20 minutes; the seeds
are printed.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

import pytest

from rootstock_llm.services.gateway.observe.access_log import End
from tests.e2e.fuzz_cases import Cases
from tests.e2e.fuzz_client import DEADLINE_S, Fuzzer
from tests.e2e.fuzz_rounds import rounds
from tests.e2e.system import System, wait_until
from tests.night import NIGHTLY

LASTS_S = 20 * 60.0 if NIGHTLY else 0.0  # 0: a single round
EXAMPLES, HEADS = (50, 300) if NIGHTLY else (16, 100)  # per round: examples per path, and connections with raw bytes
WARM_UP_SEED, DAY_SEED = 1, 2
SPARE_MB = 50.0  # MiB by which a process's memory may grow
SETTLE_S = 60.0  # time limit for requests to end and memory to shrink
GATEWAY = f"--request-timeout-s {DEADLINE_S} --tokenize-timeout-s {DEADLINE_S} --queue-timeout-s {DEADLINE_S}"
WORKER = "--context-len 256 --max-total-tokens 8192"  # small, so that the warm-up fills the KV pool
IDLE = {
    "gateway": ("rootstock_gateway_requests_in_flight", "rootstock_gateway_bodies_waiting"),
    "tokenizer": ("rootstock_tokenizer_in_flight", "rootstock_tokenizer_held_bytes"),
    "worker-0": ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
}


def seeds() -> Iterator[int]:
    """Yields an endless sequence of seeds: random by night, consecutive by day."""
    yield from (random.randrange(1 << 32) for _ in count()) if NIGHTLY else count(DAY_SEED)


pytestmark = [
    pytest.mark.timeout(LASTS_S + (600 if NIGHTLY else 300)),
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]


@dataclass(frozen=True)
class Fuzzed:
    """The system after all rounds."""

    system: System
    pids: Mapping[str, int]  # process ids at the start
    before: Mapping[str, float]  # resident MiB by process after the warm-up round
    answered: Mapping[str, int]  # responses by status; see Fuzzer


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    folder = tmp_path_factory.mktemp("fuzzed")
    with System(folder, gateway_flags=GATEWAY, worker_flags=WORKER, log_level="info") as system:
        fuzzer = Fuzzer(system.url)
        cases = Cases(fuzzer.document)
        pids = {name: child.pid for name, child in system.children.items()}
        begun = time.monotonic()
        rounds(fuzzer.faults, fuzzer.raw_faults, cases, WARM_UP_SEED, EXAMPLES // 2, HEADS // 2)
        before = {name: system.resident_mb(name) for name in pids}
        for number in seeds():
            print("seed", number, flush=True)
            rounds(fuzzer.faults, fuzzer.raw_faults, cases, number, EXAMPLES, HEADS)
            if time.monotonic() - begun > LASTS_S:
                break
        fuzzer.close()
        print(dict(fuzzer.answered), before)
        yield Fuzzed(system, pids, before, fuzzer.answered)


def test_fuzzed_responses_are_as_documented(fuzzed: Fuzzed) -> None:
    """The fixture fails at a wrong response. The test checks that many requests were served and many were refused."""
    assert min(fuzzed.answered["200"], fuzzed.answered["400"]) > 2 * EXAMPLES, "too few requests were served or refused"
    assert fuzzed.system.status("/health_generate") == 200


def test_fuzzing_ends_no_process_and_leaves_no_open_request(fuzzed: Fuzzed) -> None:
    idle = [(name, metric) for name, metrics in IDLE.items() for metric in metrics]
    wait_until(lambda: not any(fuzzed.system.metric(*each) for each in idle), SETTLE_S, "all requests to end")
    assert {name: child.pid for name, child in fuzzed.system.children.items() if child.running} == fuzzed.pids


def test_access_log_contains_no_text_of_clients(fuzzed: Fuzzed) -> None:
    """For any body, path, query and header, each string in the access log is an id or one of a fixed set."""
    lines = [json.loads(line) for line in fuzzed.system.log("access").splitlines()]
    assert len(lines) > 4 * EXAMPLES
    documented = set(Fuzzer(fuzzed.system.url).document["paths"]) | {"other"}
    texts = {name: {line[name] for line in lines if isinstance(line.get(name), str)} for line in lines for name in line}
    assert texts.pop("route") <= documented
    assert texts.pop("model") <= {"demo", ""} and texts.pop("key") == {""}
    assert texts.pop("end") <= set(End) and texts.pop("source") <= {"http", "batch", "background"}
    words = texts.pop("code") | texts.pop("method") | texts.pop("request_id") | texts.pop("trace_id", set())
    assert all(re.fullmatch(r"[A-Za-z0-9._:-]*", word) for word in words)
    assert {name for name, values in texts.items() if values} == {"ts", "level", "service", "logger", "msg"}


def test_fuzzing_does_not_leak_memory(fuzzed: Fuzzed) -> None:
    after: dict[str, float] = {}

    def settled() -> bool:
        after.update({name: fuzzed.system.resident_mb(name) for name in fuzzed.pids})
        return all(after[name] <= fuzzed.before[name] + SPARE_MB for name in after)

    try:
        wait_until(settled, SETTLE_S, "memory to shrink to its size before the rounds")
    finally:
        print(after)
    assert set(after) == set(fuzzed.pids), "every process must be measured"
