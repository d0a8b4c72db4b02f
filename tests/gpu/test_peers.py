"""Tests that KV read from another worker's device is bitwise equal to computed KV. Needs the generated protobuf messages."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rootstock_llm.services.worker.core.contracts.transfers import Tier
from tests.exec.test_peers import SAMPLED, Apart, ended, prompt
from tests.exec.tier_prompts import POOL_PAGES, PROMPT_TOKENS
from tests.exec.tiered import PAGE_SIZE, Served, build
from tests.exec.tiny_models import TinyModel

PROMPTS = 4


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_decode_worker_continues_a_handed_over_request_with_the_same_bits(dtype: str, tmp_path: Path, device: str) -> None:
    TinyModel("Qwen3", {"head_dim": 64, "num_attention_heads": 8, "hidden_size": 128}).build(tmp_path)
    on_device: dict[str, Any] = {"device": device, "dtype": dtype, "max_graph_rows": 8, "max_tokens": 512}
    with (
        closing(Served(*build(tmp_path, 8 * POOL_PAGES, None, **on_device))) as plain,
        closing(Apart(tmp_path, **on_device)) as apart,
    ):
        for number in range(PROMPTS):
            answer = ended(apart, apart.compute(prompt(number), number), prompt(number), number)
            assert answer.bits == plain.ask(prompt(number), seed=number, **SAMPLED).bits
            assert answer.finish is not None
            assert answer.finish.cached_from[Tier.PEER] == PROMPT_TOKENS // PAGE_SIZE * PAGE_SIZE
