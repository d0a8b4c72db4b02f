"""KEDA starts workers for models with requests, and stops workers of models without requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import Install
from tests.cluster.kubernetes import Cluster, Release, until
from tests.cluster.load import load_on
from tests.cluster.values import MONITORED

PROMETHEUS = "http://prometheus-server.monitoring.svc:80"
COOLDOWN_S = 30
SLOW = {"executor": "fake", "fake_step_s": 0.1, "max_running_requests": 1, "max_total_tokens": 16384}  # 10 s per response
LITTLE = {
    "requests": {"cpu": "50m", "memory": "512Mi"},
    "limits": {"memory": "1Gi"},
}
ANSWER_TOKENS = 100
CLIENTS = 100
WITHIN_S = 300.0


def keda(**autoscaling: Any) -> dict[str, Any]:
    paced = {"cooldownSeconds": COOLDOWN_S, "scaleDownSeconds": 5, "scaleDownPeriodSeconds": 5, "coldStartSeconds": 30}
    return {
        "autoscaling": {"engine": "keda", "prometheusUrl": PROMETHEUS},
        "worker": {"autoscaling": {"enabled": True, "minReplicas": 0, "maxReplicas": 4, **paced, **autoscaling}},
        "gateway": {"queueTimeoutSeconds": 320},
        "monitoring": MONITORED,
    }


def two_models() -> list[dict[str, str]]:
    return [{"name": name, "path": "/app/models/demo"} for name in ("one", "two")]


def ask(release: Release, model: str) -> httpx.Response:
    (url, *_) = release.urls()
    body = {"model": model, "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=330)


@pytest.fixture(scope="module", autouse=True)
def engine(cluster: Cluster) -> None:
    if cluster.local:
        cluster.addon("prometheus", "keda")


def test_keda_starts_only_the_requested_model_from_zero(install: Install, proved: Callable[[str], None]) -> None:
    release = install({**keda(), "models": two_models()})
    until(lambda: not release.pods("worker", leaving=True), "the end of all workers", WITHIN_S)
    (url, *_) = release.urls()
    assert [card["id"] for card in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]] == ["one", "two"]
    begun = time.monotonic()
    answer = ask(release, "two")
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "17 + 25 = 42."
    woken_s = time.monotonic() - begun
    assert (release.replicas("worker", "one"), release.replicas("worker", "two")) == (0, 1)
    asleep_s = until(lambda: release.replicas("worker", "two") == 0, "the end of the workers of model two", WITHIN_S)
    proved(f"from zero: response after {woken_s:.0f} s, the other model stayed at 0 workers; back at zero {asleep_s:.0f} s later")


@pytest.mark.timeout(1200)
def test_keda_scales_from_zero_to_four_workers_and_back_to_zero(install: Install, proved: Callable[[str], None]) -> None:
    values = keda(coldStartSeconds=15)
    values["worker"] |= {"settings": SLOW, "resources": LITTLE}
    release = install(values)
    until(lambda: not release.pods("worker", leaving=True), "the end of all workers", WITHIN_S)
    with load_on(release, CLIENTS, max_tokens=ANSWER_TOKENS) as load:
        first_s = until(lambda: release.ready("worker", "demo"), "a first worker", WITHIN_S)
        four_s = until(lambda: len(release.ready("worker", "demo")) == 4, "four workers", WITHIN_S)
        load.leave()
    none_s = until(lambda: release.replicas("worker", "demo") == 0, "the scale-down to zero workers", WITHIN_S)
    line = f"KEDA: a first worker after {first_s:.0f} s, four {four_s:.0f} s later, none {none_s:.0f} s after the last request"
    proved(f"{line}; {load.check()}")
