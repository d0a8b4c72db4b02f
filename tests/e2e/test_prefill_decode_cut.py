"""A decode worker cannot reach its prefill worker, but gateways reach both: no request fails, and all results are right."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e import fleet_namespace
from tests.e2e.fleet_namespace import Namespace
from tests.e2e.system import MODELS, System, wait_until
from tests.e2e.test_prefill_decode import PAGE, bodies, ids_of, pulled, separate_system, workers
from tests.night import NIGHTLY

CUT_AFTER_S = 0.3  # seconds from sending the requests to the cut; requests are then in all states of prefill, read and decode
# Number of requests after the repair of the cut. The failed reads make the gateway send only one prompt in 16 to the prefill
# worker, so four of 64.
AFTER = 64

pytestmark = [
    pytest.mark.skipif(not NIGHTLY, reason="takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1"),
    pytest.mark.skipif(NIGHTLY and not fleet_namespace.is_permitted(), reason="no network namespace can be made here"),
]


@contextmanager
def far_decode_worker(folder: Path, **settings: Any) -> Iterator[tuple[System, Namespace]]:
    """Starts a system whose decode worker is in a network namespace.

    The prefill worker listens on the address `other`, which the gateway reaches locally. The gateway connects to the decode
    worker from `near`. So the loss of `other` cuts only the decode worker's reads. The addresses are set by flags that are
    appended to the commands, because a service uses the last value of a flag.
    """
    with Namespace() as namespace:
        system = separate_system(folder, worker_flags="--chunked-prefill-size 64 --disaggregation-shm-dir ''", **settings)
        at = {"prefill-0": namespace.other, "decode-0": namespace.far}
        for name, host in at.items():
            part = system.parts[name]
            argv, port = part.command.argv, part.metrics_url.rpartition(":")[2]
            argv += ["--host", host, "--metrics-host", host]
            system.parts[name] = replace(part, metrics_url=f"http://{host}:{port}")
        system.parts["prefill-0"].command.argv.extend(["--disaggregation-host", namespace.other])
        far = system.parts["decode-0"].command.argv
        far[:] = namespace.argv(far)
        addresses = ",".join(f"{host}:{system.parts[name].health}" for name, host in at.items())
        system.parts["gateway"].command.argv.extend(["--workers", addresses])
        with system:
            wait_until(lambda: workers(system) == 2, 120, "both workers to be connected")
            yield system, namespace


async def answers(system: System, asked: list[dict[str, Any]], salt: str) -> list[list[int]]:
    """Sends all requests at once and returns the token ids of the responses."""
    async with httpx.AsyncClient(base_url=system.url, timeout=120) as http:
        responses = await asyncio.gather(*(http.post("/v1/completions", json={**body, "cache_salt": salt}) for body in asked))
    assert [each.status_code for each in responses] == [200] * len(responses)
    return [ids_of(each.json()) for each in responses]


def handovers(system: System) -> float:
    return system.metric("gateway", "rootstock_gateway_handovers_total")


@pytest.mark.parametrize("model", MODELS)
def test_decode_worker_computes_prompts_when_the_prefill_worker_is_unreachable(tmp_path: Path, model: str) -> None:
    asked, settings = bodies(12, 41), MODELS[model]
    with System(tmp_path / "one", worker_flags=f"--deterministic --page-size {PAGE}", log_level="info", **settings) as one:
        expected = asyncio.run(answers(one, asked, "one"))
    with far_decode_worker(tmp_path / "apart", **settings) as (system, namespace):
        assert asyncio.run(answers(system, asked, "before")) == expected
        assert pulled(system) > 0 and system.metric("decode-0", "rootstock_worker_kv_read_bytes_total", transport="tcp") > 0

        async def under_the_cut() -> list[list[int]]:
            asking = asyncio.create_task(answers(system, asked, "cut"))
            await asyncio.sleep(CUT_AFTER_S)
            namespace.lose_other()
            return await asking

        assert asyncio.run(under_the_cut()) == expected
        read, handed_over = pulled(system), handovers(system)
        assert asyncio.run(answers(system, asked, "still cut")) == expected
        assert pulled(system) == read, "no KV may be read during the cut"
        assert handovers(system) > handed_over, "the gateway reaches both workers, so it must still hand requests over"
        refused = "rootstock_worker_refused_pulls_total"
        wait_until(lambda: system.metric("decode-0", refused) > 0, 60, "the decode worker to count a refused read")

        namespace.find_other()
        for turn in range(AFTER // len(asked) + 1):
            assert asyncio.run(answers(system, asked, f"after {turn}")) == expected
            if pulled(system) > read:
                break
        assert pulled(system) > read, "KV must be read after the repair"
        for name in ("prefill-0", "decode-0"):
            assert '"level":"error"' not in system.log(name), "a worker must log no failed step and no broken invariant"
