"""KV beyond the pool is stored in files on a claim that outlives its pod, or in a Redis that all workers share.

After all workers are killed, the workers that replace them read the stored KV.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import Install
from tests.cluster.elsewhere import redis_elsewhere, secret
from tests.cluster.kubernetes import Cluster, Object, Release, until
from tests.cluster.load import QUESTIONS
from tests.cluster.pulls import METRICS_OPEN, worker_metric

# Together, the prompts have four times as many tokens as the pools.
PROMPTS = tuple(f"{number}. Repeat: {'the garden of stone and coral ' * 30}{QUESTIONS[number % 8]}" for number in range(24))
POOL_TOKENS, NEW_TOKENS = 2048, 16
REDIS_PORT, SECRET = 6380, "letters0and0digits0of0the0tests0 and more"
RESOURCES = {"requests": {"cpu": "100m", "memory": "2Gi"}, "limits": {"memory": "3Gi"}}
FROM_HOST, FROM_STORAGE = "sglang:load_back_tokens_total", "sglang:prefetched_tokens_total"
STORED = "sglang:backuped_tokens_total"


def values_of(tiers: Object, **worker: Any) -> Object:
    return {
        "worker": {
            "resources": RESOURCES,
            "settings": {"max_total_tokens": POOL_TOKENS},
            "kvTiers": {"hostGB": 1, **tiers},
            **worker,
        },
        "networkPolicy": METRICS_OPEN,
    }


def asked(release: Release) -> tuple[list[str], int]:
    """Sends all prompts in sequence. Returns the completions and the number of prompt tokens whose KV came from the storage."""
    (url, *_) = release.urls()
    texts, from_storage = [], 0
    for prompt in PROMPTS:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": NEW_TOKENS,
            "return_cached_tokens_details": True,
        }
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        texts.append(body["choices"][0]["message"]["content"])
        details = body["usage"].get("prompt_tokens_details") or {}
        from_storage += (details.get("cached_tokens_details") or {}).get("storage", 0)
    return texts, from_storage


def kill_workers(release: Release) -> None:
    """Kills all workers and waits until as many new workers are ready."""
    victims = release.ready("worker", "demo")
    before = {found["metadata"]["uid"] for found in release.get("pods")["items"]}
    names = [pod.name for pod in victims]
    release.kubectl("delete", "pod", *names, "--grace-period=0", "--force", "--wait=false")

    def others() -> bool:
        ready = {pod.name for pod in release.ready("worker", "demo")}
        new = [each for each in release.get("pods")["items"] if each["metadata"]["uid"] not in before]
        return len([each for each in new if each["metadata"]["name"] in ready]) >= len(victims)

    until(others, "new workers after the kill")


def sent_again_after_a_kill(release: Release) -> tuple[int, str]:
    """Sends all prompts twice, kills the workers and sends all prompts a third time. The completions must be equal.

    Returns:
        Number of tokens whose KV the new workers have read from the storage, and a line with the results.
    """
    first, _ = asked(release)
    second, _ = asked(release)
    assert second == first
    from_host = worker_metric(release, FROM_HOST)
    assert from_host > 0, "pages that were evicted from the pool must be read from host memory"
    # The last prompts' pages stay in the pool and are not stored.
    until(lambda: worker_metric(release, STORED) >= POOL_TOKENS, "KV to be written to the storage", 120)
    kill_workers(release)
    third, from_storage = asked(release)
    assert third == first
    assert worker_metric(release, FROM_STORAGE) >= from_storage
    read = f"{from_host:.0f} tokens read from host memory, {from_storage} from the storage after a kill"
    return from_storage, f"{len(PROMPTS)} prompts sent three times, texts equal; {read}"


@pytest.fixture
def claim_class(cluster: Cluster, space: str) -> Iterator[str]:
    """Name of a storage class with one volume.

    The volume is a folder of this machine, to which every user may write. The nodes run on this machine too.
    """
    name = f"{space}-kv"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": "2Gi"},
                "accessModes": ["ReadWriteOnce"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": name,
                "hostPath": {"path": folder},
            },
        }
        cluster.kubectl("apply", "-f", "-", given=json.dumps(volume))
        yield name
        cluster.kubectl("delete", "persistentvolume", name, "--wait=false")


@pytest.mark.local
def test_kv_files_outlive_the_pod(install: Install, claim_class: str, proved: Callable[[str], None]) -> None:
    files = {"sizeGB": 1, "claimSize": "2Gi", "storageClass": claim_class}
    release = install(values_of({"files": files}, kind="StatefulSet", replicas=1))
    (pod,) = release.ready("worker", "demo")
    assert pod.name.endswith("-0"), "the pod must belong to a StatefulSet, so that its replacement gets the same claim"
    from_storage, line = sent_again_after_a_kill(release)
    assert from_storage > 0, "the new worker must read KV from the claim"
    proved(f"KV in files on a claim: {line}")


def test_workers_share_kv_in_redis(install: Install, space: str, cluster: Cluster, proved: Callable[[str], None]) -> None:
    there = Release(cluster, "rootstock", space, ())
    secret(there, "kv-storage", {"url": f"redis://elsewhere:{REDIS_PORT}/0", "secret": SECRET})
    there.kubectl("apply", "-f", "-", given=json.dumps(redis_elsewhere(REDIS_PORT)))
    release = install(values_of({"shared": {"secret": "kv-storage", "port": REDIS_PORT}}, replicas=2))
    from_storage, line = sent_again_after_a_kill(release)
    assert from_storage > 0, "the new workers must read KV from the Redis"
    proved(f"KV in a Redis of two workers: {line}")
