"""A batch over two gateways while one process after another is killed: each line gets exactly one result."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Batch

from tests.e2e.system import System, wait_until
from tests.night import NIGHTLY

LINES, TOKENS = (200, 96) if NIGHTLY else (40, 160)
VICTIMS = ("worker-0", "state", "gateway-0", "tokenizer", "gateway-1", "detokenizer")
FLAGS = "--batch-lease-s 3 --batch-lines 2"
PATIENCE_S = 120.0


def lines() -> bytes:
    def line(number: int) -> dict[str, Any]:
        body = {"model": "demo", "prompt": f"Count from {number} on: ", "max_tokens": TOKENS, "ignore_eos": True}
        return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}

    return b"".join(json.dumps(line(number)).encode() + b"\n" for number in range(LINES))


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def state_of(clients: list[OpenAI], batch: Batch) -> Batch:
    """Returns the batch from the first gateway that responds, or `batch` if none responds."""
    for client in clients:
        try:
            return client.batches.retrieve(batch.id)
        except openai.OpenAIError:
            continue
    return batch


@pytest.mark.timeout(900)
def test_batch_has_one_result_per_line_when_processes_are_killed(tmp_path: Path) -> None:
    with System(tmp_path, gateways=2, gateway_flags=FLAGS, log_level="info") as system:
        urls = [part.url for part in system.parts.values() if part.url]
        both = [OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) for url in urls]
        file = both[0].files.create(file=("lines.jsonl", lines()), purpose="batch")
        batch = both[0].batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

        def done() -> int:
            counts = state_of(both, batch).request_counts
            return 0 if counts is None else counts.completed + counts.failed

        for step, victim in enumerate(VICTIMS, 1):
            goal = step * LINES // (len(VICTIMS) + 1)
            wait_until(lambda: done() >= goal, PATIENCE_S, f"{goal} completed lines")  # noqa: B023
            assert state_of(both, batch).status == "in_progress", f"the batch must still run when {victim} is killed"
            system.kill(victim)
            time.sleep(0.3)
            system.start(victim)
        wait_until(lambda: state_of(both, batch).status == "completed", PATIENCE_S, "the batch to be over")
        system.wait_ready()
        for url in urls:
            wait_until(lambda url=url: is_up(url), PATIENCE_S, f"{url} to listen again")  # type: ignore[misc]
        for client in both:
            last = client.batches.retrieve(batch.id)
            files = [each for each in (last.output_file_id, last.error_file_id) if each is not None]
            results = [json.loads(each) for file_id in files for each in client.files.content(file_id).text.splitlines()]
            assert Counter(each["custom_id"] for each in results) == Counter(f"line-{number}" for number in range(LINES))
            assert last.request_counts is not None and last.request_counts.total == LINES
            assert last.error_file_id is None, [each for each in results if each["response"] is None]
            assert all(each["response"]["body"]["usage"]["completion_tokens"] == TOKENS for each in results)
        logged = [json.loads(line) for line in system.log("access").splitlines()]
        complete = [line for line in logged if line["source"] == "batch" and line["end"] == "complete"]
        assert len(complete) >= LINES and {line["output_tokens"] for line in complete} == {TOKENS}
