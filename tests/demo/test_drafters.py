"""Tests the vocabulary of the demo model's EAGLE-3 draft head."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from random import Random
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.e2e.system import DEMO, ROOT


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "demo"))
    yield importlib.import_module("tasks")


def test_eagle3_vocabulary_lacks_less_than_1_percent_of_the_tokens_of_each_task(tasks: ModuleType) -> None:
    """The draft head cannot draft a token that its vocabulary lacks, nor the tokens after it."""
    tokenizer, held = AutoTokenizer.from_pretrained(DEMO), load_file(DEMO.parent / "demo-eagle3/model.safetensors")
    known = held["t2d"].tolist()
    assert (held["d2t"] + torch.arange(len(held["d2t"]))).tolist() == [token for token, has in enumerate(known) if has]
    for task in tasks.TASKS:
        rng = Random(29)
        tokens = [token for _ in range(200) for token in tokenizer.encode(tasks.sample(task, rng)[1])]
        lacking = sum(not known[token] for token in tokens) / len(tokens)
        assert lacking < 0.01, (task, lacking)
