"""Separate prefill and decode workers in whole systems. Results equal those of one worker, even if a process is lost.

Workers are deterministic, so that the comparison with a system of one worker is bitwise.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rootstock_llm.services.worker.settings import WorkerSettings
from tests.e2e.mixed_asks import KINDS, ask_all, asks_of, essence, hot, repeated
from tests.e2e.plain_answers import PlainAnswers
from tests.e2e.system import CHOSEN_MODELS, MODELS, System, wait_until
from tests.exec.remote_kv.certificates import Authority
from tests.night import NIGHTLY

ASKS = asks_of([*KINDS, hot, repeated], 15 if NIGHTLY else 1)
CROWD = "--retract-interval 7 --enable-priority-scheduling --chunked-prefill-size 64 --max-running-requests 10"
PAGE = 16  # tokens per KV page
ROUNDS = 24 if NIGHTLY else 1  # rounds of each kind of loss
TRIES = 12
AT_ONCE = 6


def separate_system(folder: Path, prefill: int = 1, decode: int = 1, worker_flags: str = "", **settings: Any) -> System:
    flags = f"--deterministic --page-size {PAGE} {worker_flags}"
    more = {"gateway_flags": "--disaggregation-min-tokens 24", "log_level": "info"}
    return System(folder, prefill_workers=prefill, decode_workers=decode, worker_flags=flags, **(more | settings))


def pulled(system: System, name: str = "decode-0") -> float:
    return system.metric(name, "rootstock_worker_pulled_tokens_total")


def workers(system: System) -> float:
    """Returns the number of workers to which the first gateway is connected."""
    name = next(name for name in system.parts if name.startswith("gateway"))
    return system.metric(name, "rootstock_gateway_connected", service="worker")


def test_prefill_and_decode_workers_give_mixed_requests_the_results_of_one_worker(
    tmp_path: Path, plain_answers: PlainAnswers
) -> None:
    assert WorkerSettings.model_fields["page_size"].default == PAGE, "PAGE must be the default page size"
    expected = plain_answers.of(ASKS)
    with separate_system(tmp_path, worker_flags=CROWD) as system:
        wait_until(lambda: workers(system) == 2, 120, "both workers to be connected")
        order = random.Random(7).sample(range(len(ASKS)), len(ASKS))
        answers = asyncio.run(ask_all(system, [ASKS[index] for index in order], 10))
        wrong = [ASKS[index].kind for index, got in zip(order, answers, strict=True) if essence(got) != expected[index]]
        assert wrong == []
        assert system.metric("decode-0", "rootstock_worker_kv_read_bytes_total", transport="shm") > 0
        # Scores, embeddings and an echo without output end with their prompt, so they are not handed over. Short prompts are not
        # handed over either.
        generating = [ask for ask in ASKS if ask.kind not in ("score", "embedding", "echo")]
        assert pulled(system) > 0
        assert system.metric("gateway", "rootstock_gateway_handovers_total") >= len(generating) / 3
        assert system.metric("prefill-0", "rootstock_worker_sessions") == 0, "only decode workers may have sessions"
        assert system.metric("prefill-0", "rootstock_worker_rooms_expired_total") == 0
        for name in ("prefill-0", "decode-0"):
            assert '"level":"error"' not in system.log(name), "a worker must log no failed step and no broken invariant"


def bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns requests with random prompts of different lengths and without a common prefix."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(4, 1200) for _ in range(rng.randrange(40, 260))] for _ in range(count)]
    return [
        {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": 24,
            "temperature": 1,
            "seed": at,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for at, prompt in enumerate(prompts)
    ]


def ids_of(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


@pytest.mark.needs("openssl")
def test_decode_worker_reads_each_whole_page_once_over_tls(tmp_path: Path) -> None:
    """The decode worker reads each whole page of a prompt once, some pages while the prompt is still computed.

    It computes the tokens after the last whole page, and the output.
    """
    certificate, key, authority = Authority(tmp_path / "authority").files("workers")
    tls = f"--disaggregation-tls-cert-file {certificate} --disaggregation-tls-key-file {key}"
    tls += f" --disaggregation-tls-ca-file {authority} --disaggregation-shm-dir ''"
    asked = bodies(12, 1)
    with separate_system(tmp_path / "apart", worker_flags=f"--chunked-prefill-size 64 {tls}") as system:
        wait_until(lambda: workers(system) == 2, 120, "both workers to be connected")
        for body in asked:
            status, answer = system.post("/v1/completions", body)
            assert status == 200, answer
        pages = [len(body["prompt"]) // PAGE for body in asked]
        assert pulled(system) == PAGE * sum(pages)
        assert 0 < system.metric("decode-0", "rootstock_worker_prefetched_tokens_total") < pulled(system)
        assert system.metric("decode-0", "rootstock_worker_refused_pulls_total") == 0
        read = system.metric("decode-0", "rootstock_worker_kv_read_bytes_total", transport="tls")
        assert read == system.metric("prefill-0", "rootstock_worker_kv_served_bytes_total") > 0
        assert read % pulled(system) == 0, "the bytes per token must be a whole number; a page that is read twice breaks this"
        wait_until(lambda: system.metric("prefill-0", "rootstock_worker_rooms") == 0, 60, "the KV reservations to end")
        prefill = system.metric("prefill-0", "sglang:prompt_tokens_total")
        assert prefill == sum(len(body["prompt"]) for body in asked)


@pytest.fixture(scope="module", params=CHOSEN_MODELS)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder, more = tmp_path_factory.mktemp("fleet"), MODELS[request.param]
    with separate_system(folder, 1, 2, "--disaggregation-hold-s 2", gateways=2, **more) as system:
        wait_until(lambda: workers(system) == 3, 120, "all workers to be connected")
        yield system


async def _answers(system: System, asked: list[dict[str, Any]], url: str = "") -> list[httpx.Response]:
    """Sends all requests, at most AT_ONCE at a time, and returns the responses.

    Args:
        url: URL of the gateway; "" for the first one.
    """
    limit = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url or system.url, timeout=150) as http:

        async def one(body: dict[str, Any]) -> httpx.Response:
            async with limit:
                return await http.post("/v1/completions", json=body)

        return await asyncio.gather(*(one(body) for body in asked))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("who", ["prefill-0", "decode-0"])
def test_token_ids_stay_equal_when_a_prefill_or_decode_worker_is_lost(fleet: System, who: str, how: signal.Signals) -> None:
    """The worker is lost at a random time. Requests are then in all states: queued, computed, reserved, read and decoded."""
    for turn in range(ROUNDS):
        asked = bodies(18, 100 + turn)
        expected = [ids_of(answer.json()) for answer in asyncio.run(_answers(fleet, asked))]

        async def under_loss(asked: list[dict[str, Any]] = asked, turn: int = turn) -> list[httpx.Response]:
            asking = asyncio.create_task(_answers(fleet, [{**body, "cache_salt": f"{who}{how}{turn}"} for body in asked]))
            await asyncio.sleep(random.Random(turn).uniform(0.05, 1.0))
            fleet.children[who].signal(how)
            return await asking

        answers = asyncio.run(under_loss())
        assert [answer.status_code for answer in answers] == [200] * len(answers)
        assert [ids_of(answer.json()) for answer in answers] == expected
        if how is signal.SIGSTOP:
            fleet.children[who].signal(signal.SIGCONT)
        else:
            fleet.start(who)
        wait_until(lambda: workers(fleet) == 3, 120, "all workers to be connected")
        wait_until(lambda: is_idle(fleet), 60, "all pages to be free")


def test_workers_free_pages_and_other_clients_are_served_when_a_gateway_is_lost(fleet: System) -> None:
    """Only the clients of the killed gateway lose their connections, and the workers free all pages of the clients' requests."""
    for turn in range(ROUNDS):
        asked = bodies(8, 300 + turn)
        expected = [ids_of(answer.json()) for answer in asyncio.run(_answers(fleet, asked))]

        async def under_loss(asked: list[dict[str, Any]] = asked, turn: int = turn) -> list[httpx.Response]:
            salted = [{**body, "cache_salt": f"gateway {turn}"} for body in asked]
            lost = asyncio.create_task(_answers(fleet, salted, fleet.parts["gateway-1"].url))
            asking = asyncio.create_task(_answers(fleet, salted))
            await asyncio.sleep(random.Random(turn).uniform(0.1, 0.6))
            fleet.children["gateway-1"].signal(signal.SIGKILL)
            answers = await asking
            await asyncio.gather(lost, return_exceptions=True)
            return answers

        assert [ids_of(answer.json()) for answer in asyncio.run(under_loss())] == expected
        wait_until(lambda: is_idle(fleet), 60, "all pages to be free")
        fleet.start("gateway-1")
        url = fleet.parts["gateway-1"].url
        wait_until(lambda: is_ready(url), 60, "the restarted gateway to be ready")  # noqa: B023


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readiness", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def is_idle(system: System) -> bool:
    """Whether no worker has a KV reservation, a KV read in progress or a running request."""
    try:
        for name in ("prefill-0", "decode-0", "decode-1"):
            if any(
                system.metric(name, f"rootstock_worker_{what}") for what in ("rooms", "quarantined_tokens", "importing_requests")
            ):
                return False
            if system.metric(name, "sglang:kv_used_tokens"):
                return False
    except (OSError, AssertionError):  # a restarted worker does not respond yet, or does not have the metric yet
        return False
    return True


def test_kv_reservation_expires_when_decode_workers_are_stopped(fleet: System) -> None:
    """If both decode workers are stopped, KV reservations expire, and the prefill worker completes the requests.

    A request has no reservation if the gateway gives up the decode worker before the handover. The test then sends a new request.
    """

    def reservations(what: str) -> float:
        return fleet.metric("prefill-0", f"rootstock_worker_rooms{what}")

    asyncio.run(_answers(fleet, bodies(1, 8)))
    for number in range(9, 9 + TRIES):
        wait_until(lambda: workers(fleet) == 3 and is_idle(fleet), 120, "all workers to be connected and idle")
        expired = reservations("_expired_total")
        for name in ("decode-0", "decode-1"):
            fleet.children[name].signal(signal.SIGSTOP)
        try:
            answers = asyncio.run(_answers(fleet, bodies(1, number)))
            assert answers[0].status_code == 200
            wait_until(lambda: not reservations(""), 60, "the KV reservations to end")
        finally:
            for name in ("decode-0", "decode-1"):
                fleet.children[name].signal(signal.SIGCONT)
        wait_until(lambda: is_idle(fleet), 60, "all pages to be free")
        if reservations("_expired_total") > expired:
            return
    raise AssertionError(f"no KV reservation has expired in {TRIES} attempts")
