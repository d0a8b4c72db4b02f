"""Tests that steps neither make the host wait for the device nor copy from pageable memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.exec.device_executors import executor_of
from tests.exec.random_steps import CONTEXT, MAX_SLOTS, POOL_TOKENS, Turned, drive, random_config
from tests.exec.tiny_models import TinyModel

PAGE_SIZE, TURNS = 4, 80
MODEL = TinyModel("Qwen3", {"head_dim": 128, "tie_word_embeddings": True})  # FlashInfer supports this head size


@contextmanager
def no_synchronizing() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_sync_debug_mode_detects_that_the_host_reads_a_value(device: str) -> None:
    value = torch.ones(1, device=device)
    with no_synchronizing(), pytest.raises(RuntimeError):
        value.item()


@pytest.mark.by_day(one_in=4, seed=2)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_mixed_steps_do_not_synchronize_host_and_device(backend: str, graphs: bool, tmp_path: Path, device: str) -> None:
    """The steps have all kinds of sampling, masks, logprobs, embeddings, retractions and aborts. FlashInfer runs in bf16.

    Kernels are compiled before the checked steps, because compiling waits for the device.
    """
    MODEL.build(tmp_path, torch.bfloat16)
    pages = POOL_TOKENS // PAGE_SIZE
    executor = executor_of(
        tmp_path, device, PAGE_SIZE, MAX_SLOTS, pages, CONTEXT, "bfloat16", attention_backend=backend, cuda_graphs=graphs
    )
    for seed in (1, 2):
        drive(Turned(random_config(random.Random(seed), PAGE_SIZE), True, executor), seed, TURNS)
    with no_synchronizing():
        for seed in (3, 4):
            engine = drive(Turned(random_config(random.Random(seed), PAGE_SIZE), True, executor), seed, TURNS)
            assert not any("step that computed" in finish.message for finish in engine.finishes.values())
    executor.close()
