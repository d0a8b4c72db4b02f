"""The experts of a mixture through the whole system: the record of all workers, and the routed experts of a request.

The mixture is a random Qwen3-MoE with the demo model's tokenizer. transformers' routers give the expected experts.
"""

from __future__ import annotations

import base64
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from rootstock_llm.services.local.ports import HOST, free_ports
from tests.e2e.system import DEMO, System, wait_until
from tests.exec.tiny_models import EXPERTS, TinyModel
from tests.night import NIGHTLY

TINY = TinyModel("Qwen3Moe", {**EXPERTS, "vocab_size": 1280, "head_dim": 32, "norm_topk_prob": True, "eos_token_id": 2})
LAYERS, CHOSEN = 3, 3
PROMPT = [7 + at * 13 % 1200 for at in range(45)]
SAMPLING = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
pytestmark = pytest.mark.skipif(not NIGHTLY, reason="takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1")


class Mixture(System):
    """Two workers that serve a mixture and return routed experts, and a gateway with an admin port."""

    def __init__(self, folder: Path) -> None:
        model = folder / "mixture"
        self.reference: Any = TINY.build(model)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(Path(DEMO) / file, model)
        (admin_port,) = free_ports(1)
        self.admin = f"http://{HOST}:{admin_port}"
        flags = {"admin_port": admin_port, "workers": 2, "worker_flags": "--enable-return-routed-experts"}
        super().__init__(folder / "logs", model=str(model), dtype="float32", **flags)

    def wait_ready(self) -> None:
        super().wait_ready()
        wait_until(lambda: httpx.get(f"{self.admin}/get_load", timeout=60).status_code == 200, 120, "both workers")

    def operate(self, verb: str) -> httpx.Response:
        return httpx.post(f"{self.admin}/{verb}_expert_distribution_record", timeout=60)

    def generate(self, **body: Any) -> dict[str, Any]:
        response = httpx.post(f"{self.url}/generate", json={"input_ids": PROMPT, "sampling_params": SAMPLING, **body}, timeout=60)
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found

    def experts_of(self, tokens: list[int]) -> list[Any]:
        """Returns the experts that transformers' routers choose, [tokens, layers, chosen]."""
        with torch.inference_mode():
            layers = self.reference(torch.tensor([tokens]), output_router_logits=True).router_logits
        found: list[Any] = torch.stack([layer.view(len(tokens), -1) for layer in layers], 1).topk(CHOSEN, -1).indices.tolist()
        return found


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixture]:
    with Mixture(tmp_path_factory.mktemp("mixture")) as running:
        yield running


def experts_in(answer: dict[str, Any]) -> list[Any]:
    ids = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
    found: list[Any] = ids.reshape(-1, LAYERS, CHOSEN).tolist()
    return found


def test_expert_distribution_record_of_all_workers_counts_each_computed_token_once(mixture: Mixture) -> None:
    assert mixture.operate("dump").status_code == mixture.operate("stop").status_code == 409
    assert mixture.operate("start").status_code == 200
    assert mixture.operate("start").status_code == 409
    computed = 0
    for salt in "abcd":
        meta = mixture.generate(extra_key=salt)["meta_info"]
        computed += meta["prompt_tokens"] - meta["cached_tokens"] + meta["completion_tokens"] - 1
    dump = mixture.operate("dump")
    results = [worker["result"] for worker in dump.json()["workers"]]
    counts = sum(sum(layer["counts"]) for result in results for layer in result["logical_count"])
    assert len(results) == 2 and counts == computed * CHOSEN * LAYERS
    assert sum(result["num_tokens"] for result in results) == computed
    assert mixture.operate("stop").status_code == 200
    assert [worker["result"]["recording"] for worker in mixture.operate("dump").json()["workers"]] == [False, False]


@pytest.mark.parametrize("first", [0, 30])
def test_routed_experts_equal_those_of_transformers(mixture: Mixture, first: int) -> None:
    answer = mixture.generate(return_routed_experts=True, routed_experts_start_len=first)
    assert experts_in(answer) == mixture.experts_of([*PROMPT, *answer["output_ids"][:-1]])[first:]
    assert answer["meta_info"]["cached_tokens"] <= first


def test_routed_experts_are_complete_when_a_worker_is_killed(tmp_path: Path) -> None:
    with Mixture(tmp_path) as mixture:
        sampling = {**SAMPLING, "max_new_tokens": 400}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True, "return_routed_experts": True}
        with httpx.stream("POST", f"{mixture.url}/generate", json=body, timeout=60) as stream:
            lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
            for _ in range(20):
                next(lines)
            busy = [name for name in ("worker-0", "worker-1") if mixture.metric(name, "sglang:num_running_reqs")]
            mixture.children[busy[0]].signal(signal.SIGKILL)
            *_, last, done = lines
        assert done == "[DONE]"
        answer = httpx.Response(200, text=last).json()
        assert len(answer["output_ids"]) == 400
        assert experts_in(answer) == mixture.experts_of([*PROMPT, *answer["output_ids"][:-1]])
