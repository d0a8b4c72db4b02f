"""Tests that KV from host memory or files is bitwise equal to computed KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from rootstock_llm.services.worker.core.contracts.transfers import Tier
from rootstock_llm.services.worker.exec.contracts.options import TierOptions
from rootstock_llm.services.worker.exec.tiers.page_copier import PageCopier
from tests.exec.tier_prompts import POOL_PAGES, came_from, options, prompt
from tests.exec.tiered import Served, build
from tests.exec.tiny_models import TinyModel

PROMPTS = 4
PAUSE_CYCLES = 20_000_000  # cycles of torch.cuda._sleep, about 10 ms
Open = Callable[[int, TierOptions | None], Served]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    TinyModel("Qwen3", {"head_dim": 64, "num_attention_heads": 8, "hidden_size": 128}).build(made, torch.float32)
    return made


def on(device: str, dtype: str) -> dict[str, Any]:
    return {"device": device, "dtype": dtype, "max_graph_rows": 8, "max_tokens": 512}


@pytest.fixture
def opened(folder: Path, device: str, dtype: str) -> Open:
    return lambda pages, tiers: Served(*build(folder, pages, tiers, **on(device, dtype)))


@pytest.fixture
def plain(opened: Open) -> Iterator[Served]:
    with closing(opened(200, None)) as served:
        yield served


@pytest.mark.by_day(one_in=2)
def test_prefix_from_host_memory_gives_the_same_bits(opened: Open, plain: Served) -> None:
    with closing(opened(POOL_PAGES, options())) as served:
        first = [served.ask(prompt(number), seed=number) for number in range(PROMPTS)]
        again = [served.ask(prompt(number), seed=number) for number in range(PROMPTS)]
        for number in range(PROMPTS):
            assert first[number].bits == again[number].bits == plain.ask(prompt(number), seed=number).bits
            assert came_from(again[number], Tier.HOST)
        assert served.core.stats().failed_operations_total == 0


@pytest.mark.by_day(one_in=2)
def test_step_waits_for_layers_that_are_loaded_after_the_report(
    opened: Open, plain: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy stream pauses before each layer, after the core has received the early completion report of the load."""
    group_loader = PageCopier.group_loader

    def slow(self: PageCopier, memory: Any, rows: Any, pages: Any) -> Callable[[int], None]:
        bring = group_loader(self, memory, rows, pages)

        def late(group: int) -> None:
            torch.cuda._sleep(PAUSE_CYCLES)
            bring(group)

        return late

    with closing(opened(40, options())) as served:  # 40 pages suffice for all loads together and the cached pages
        mover = served.executor._mover
        assert mover is not None and mover._by_layers
        first = [served.ask(prompt(number), seed=number) for number in range(PROMPTS)]
        monkeypatch.setattr(PageCopier, "group_loader", slow)
        mover._loads._bytes_s = 1e18
        for number in range(PROMPTS):
            again = served.ask(prompt(number), seed=number)
            assert again.bits == first[number].bits == plain.ask(prompt(number), seed=number).bits
            assert came_from(again, Tier.HOST)
        assert served.core.stats().failed_operations_total == 0


@pytest.mark.by_day(one_in=2)
def test_prefix_from_files_gives_the_same_bits_after_a_restart(opened: Open, plain: Served, tmp_path: Path) -> None:
    with closing(opened(POOL_PAGES, options(tmp_path / "pages"))) as served:
        first = [served.ask(prompt(number), seed=number) for number in range(PROMPTS)]
    with closing(opened(POOL_PAGES, options(tmp_path / "pages"))) as served:
        for number in range(PROMPTS):
            answer = served.ask(prompt(number), seed=number)
            assert answer.bits == first[number].bits == plain.ask(prompt(number), seed=number).bits
            assert came_from(answer, Tier.STORAGE)
