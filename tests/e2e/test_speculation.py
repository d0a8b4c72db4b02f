"""Drafting saves steps and does not change outputs.

Mixed requests run with draft tokens in a tiny KV pool. Their results must equal, bit by bit, the results of a system without a
drafter and with a large pool. Both systems are deterministic.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.e2e.mixed_asks import KINDS, ask_all, asks_of, essence, hot, repeated
from tests.e2e.plain_answers import PlainAnswers
from tests.e2e.system import DEMO, System
from tests.night import NIGHTLY

CROWD = (
    "--enable-mixed-chunk --retract-interval 7 --enable-priority-scheduling --chunked-prefill-size 64 --max-running-requests 10"
    " --schedule-conservativeness 0.3"
)
ASKS = asks_of([*KINDS, hot, repeated], 36 if NIGHTLY else 1)
POOL_TOKENS = 768
ALGORITHMS = {
    "eagle3": "--speculative-algorithm eagle3",
    "mtp": f"--speculative-algorithm mtp --speculative-draft-model-path {DEMO}-mtp",
    "draft": f"--speculative-algorithm draft --speculative-draft-model-path {DEMO}-draft",
    "ngram": "--speculative-algorithm ngram",
}


@pytest.mark.parametrize("algorithm", [*ALGORITHMS] if NIGHTLY else ["eagle3"])
def test_mixed_requests_get_bitwise_equal_results_with_drafting(
    tmp_path: Path, plain_answers: PlainAnswers, algorithm: str
) -> None:
    expected = plain_answers.of(ASKS)
    order = random.Random(1).sample(range(len(ASKS)), len(ASKS))
    flags = f"--deterministic {CROWD} {ALGORITHMS[algorithm]}"
    with System(tmp_path, max_total_tokens=POOL_TOKENS, worker_flags=flags, log_level="info") as system:
        answers = asyncio.run(ask_all(system, [ASKS[index] for index in order], 30))
        wrong = [ASKS[index].kind for index, got in zip(order, answers, strict=True) if essence(got) != expected[index]]
        assert wrong == []
        accepted = system.metric("worker-0", "rootstock_worker_accepted_tokens_total")
        assert 0 < accepted < system.metric("worker-0", "rootstock_worker_drafted_tokens_total")
        assert system.metric("worker-0", "sglang:num_retracted_requests_total") > 0
        assert '"level":"error"' not in system.log("worker-0"), "the worker must log no failed step and no broken invariant"
