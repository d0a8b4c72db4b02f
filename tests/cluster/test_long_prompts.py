"""Half an hour of prompts of 16,000 words on an overloaded machine: no slow process is treated as lost.

ROOTSTOCK_CLUSTER_MINUTES_OF_PROMPTS (default 30) is the duration.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable

import httpx
import pytest

from tests.cluster.conftest import Install
from tests.cluster.kubernetes import Release, until
from tests.cluster.load import load_on

MINUTES = float(os.environ.get("ROOTSTOCK_CLUSTER_MINUTES_OF_PROMPTS", "30"))
WORDS = 16_000
pytestmark = pytest.mark.timeout(MINUTES * 60 + 1200)
MOVES = re.compile(r"^rootstock_gateway_moves_total\{(.*)\} (\S+)$", re.MULTILINE)


def moves(release: Release) -> dict[str, float]:
    """Returns the number of moves, summed over all gateways, by the metric's labels. Labels without a move are omitted."""
    out: dict[str, float] = {}
    for pod in release.ready("gateway"):
        text = httpx.get(f"http://{pod.ip}:9104/metrics", timeout=10).text
        for labels, count in MOVES.findall(text):
            if float(count):
                out[labels] = out.get(labels, 0.0) + float(count)
    return out


def restarts(release: Release) -> int:
    pods = release.get("pods", "-l", f"app.kubernetes.io/instance={release.name}")["items"]
    return sum(each["restartCount"] for pod in pods for each in pod["status"].get("containerStatuses", ()))


def test_long_prompts_move_no_request_and_restart_no_process(install: Install, proved: Callable[[str], None]) -> None:
    settings = {"context_len": 20_000, "max_total_tokens": 100_000, "max_running_requests": 16, "grammar_workers": 1}
    two = {"replicas": 2}
    open_network = {"enabled": False}  # the tests read the gateways' metrics
    release = install(
        {
            "worker": {**two, "settings": settings},
            "tokenizer": two,
            "detokenizer": two,
            "gateway": two,
            "networkPolicy": open_network,
        }
    )
    long = [
        " ".join(f"{'abcdefghij'[number % 10]}" for number in range(WORDS)) + f" Count from {first} to 20." for first in range(8)
    ]
    urls = release.urls()
    with load_on(release, 8, lambda: urls) as short, load_on(release, 4, lambda: urls, questions=long) as load:
        until(lambda: load.ended >= 1, "the completion of a long prompt", 600)
        time.sleep(MINUTES * 60)
    assert not load.failures, load.failures
    line = short.check()
    assert (moves(release), restarts(release)) == ({}, 0)
    proved(f"{MINUTES:.0f} minutes, {load.ended} prompts of {WORDS:,} words and more tokens beside {line}: no move, no restart")
