"""Windows and states in tiers and KV transfers: units from host, storage or prefill worker change no bit of a completion."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rootstock_llm.kernels.cpu.build import built_library
from rootstock_llm.kernels.cpu.copies import CpuCopies
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.services.worker.core.contracts.cache_groups import CacheKind
from rootstock_llm.services.worker.core.contracts.pool_sizes import PoolSizes
from rootstock_llm.services.worker.core.contracts.transfers import Tier
from rootstock_llm.services.worker.exec.contracts.options import TierOptions
from rootstock_llm.services.worker.exec.pools.kv_pool import LayerKV, LayerState, allocate
from rootstock_llm.services.worker.exec.tiers.page_copier import PageCopier
from rootstock_llm.services.worker.exec.tiers.redis_page_store import RedisPageStore
from rootstock_llm.services.worker.exec.tiers.unit_copier import UnitCopier
from tests.exec.late_copies import delay_copies, serve_and_compare
from tests.exec.remote_kv.served_reservations import until
from tests.exec.test_peers import SAMPLED, Apart, ended
from tests.exec.tier_prompts import POOL_PAGES, PROMPT_TOKENS, came_from, options, prompt
from tests.exec.tiered import PAGE_SIZE, SECRET, Served, build
from tests.exec.tiny_models import MODELS
from tests.night import NIGHTLY
from tests.services.redis_server import redis_server

NAMES = ["qwen3.5-window", "qwen3.5", "gemma3"]
LAYERS = (LayerKV(2, 8, 6, 24), LayerState(4, 10, 2, 3, 5), LayerKV(1, 16, 16), LayerState(4, 10, 2, 3, 5), LayerKV(2, 8, 6, 24))
SIZES = PoolSizes(pages=6, windows=5, states=4)


class DeviceUnits(UnitCopier):
    """A copier that treats host pools as a device's."""

    _on_host = property(lambda self: False)  # type: ignore[assignment]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    MODELS[request.param].build(made)
    return made


@pytest.fixture
def plain(folder: Path) -> Iterator[Served]:
    served = Served(*build(folder, 200, None))
    yield served
    served.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_units_are_restored_to_the_bit_with_each_way_of_copying(dtype: torch.dtype) -> None:
    pool = allocate(LAYERS, SIZES, 4, dtype, reference)
    for each in (*pool.keys, *pool.values):
        each.copy_(torch.randn(each.shape))
    assert [pool.kind(at) for at in range(2)] == [CacheKind.WINDOW, CacheKind.STATE] and pool.kind(2) is None
    one_call, single = PageCopier([pool], CpuCopies(built_library())), PageCopier([pool])
    assert single.page_bytes == 4 * 32 * dtype.itemsize
    states = 2 * (3 * 10 * dtype.itemsize + 4 * 2 * 3 * 5)
    assert [each.unit_bytes for each in single.units] == [2 * 4 * 28 * dtype.itemsize, states]
    ids = np.array([3, 0], dtype=np.int32)
    for group, kind in enumerate((CacheKind.WINDOW, CacheKind.STATE)):
        size = single.units[group].num_parts
        tensors = [each for at in range(len(LAYERS)) if pool.kind(at) is kind for each in (pool.keys[at], pool.values[at])]
        before = [each.clone() for each in tensors]
        saved = []
        device = DeviceUnits(tensors, single.units[group].num_units, single.page_bytes, None)
        for units in (one_call.units[group], single.units[group], device):
            rows = torch.full((2 * size, single.page_bytes), 7, dtype=torch.uint8)
            units.save(units.rows_of(ids), rows.unbind())
            part = torch.full((1, single.page_bytes), 7, dtype=torch.uint8)
            units.save(units.rows_of(ids)[size : size + 1], part.unbind())
            assert part[0].equal(rows[size])
            assert not rows[size - 1, units.unit_bytes - (size - 1) * single.page_bytes :].any()
            saved.append(rows)
            units.restore(rows.unbind(), ids[::-1].copy())
            assert all(each[0].equal(was[3]) and each[3].equal(was[0]) for each, was in zip(tensors, before, strict=True))
            units.restore(rows.unbind(), ids)
            assert all(each.equal(was) for each, was in zip(tensors, before, strict=True))
            for unit in (-1, SIZES.states if kind is CacheKind.STATE else SIZES.windows):
                with pytest.raises(IndexError):
                    units.restore(rows[:size].unbind(), np.array([unit], dtype=np.int32))
        assert saved[0].equal(saved[1]) and saved[0].equal(saved[2])


@pytest.mark.parametrize("max_drafts", [0, 3])
def test_completions_have_the_same_bits_with_units_from_the_host_tier(folder: Path, plain: Served, max_drafts: int) -> None:
    served = Served(*build(folder, POOL_PAGES, options(), max_drafts=max_drafts, speculative_algorithm="ngram"), poisoned=True)
    first = [served.ask(prompt(number), seed=number) for number in range(4)]
    again = [served.ask(prompt(number), seed=number) for number in range(4)]
    for number in range(4):
        assert first[number].bits == again[number].bits == plain.ask(prompt(number), seed=number).bits
        assert came_from(again[number], Tier.HOST)
    assert served.core.stats().failed_operations_total == 0
    served.close()


def test_completions_have_the_same_bits_with_units_from_files_after_a_restart(folder: Path, tmp_path: Path) -> None:
    served = Served(*build(folder, POOL_PAGES, options(tmp_path / "pages")))
    first = [served.ask(prompt(number), seed=number) for number in range(4)]
    served.close()
    served = Served(*build(folder, POOL_PAGES, options(tmp_path / "pages")), poisoned=True)
    for number in range(4):
        answer = served.ask(prompt(number), seed=number)
        assert answer.bits == first[number].bits
        assert came_from(answer, Tier.STORAGE)
    served.close()


def test_completions_have_the_same_bits_with_units_that_another_worker_stored(folder: Path, plain: Served) -> None:
    with redis_server() as server:

        def opened(page_bytes: int, identity: bytes) -> RedisPageStore:
            return RedisPageStore(server.url, page_bytes, 60, identity)

        first, second = (Served(*build(folder, POOL_PAGES, TierOptions(4.0, 0, opened, SECRET))) for _ in range(2))
        first.ask(prompt(0), seed=0)
        stored = first.core.stats().storage_pages
        assert stored > PROMPT_TOKENS // PAGE_SIZE
        until(lambda: second.turn() or second.core.stats().storage_pages >= stored)
        answer = second.ask(prompt(0), seed=0)
        assert answer.bits == plain.ask(prompt(0), seed=0).bits
        assert came_from(answer, Tier.STORAGE)
        first.close()
        second.close()


def test_decode_worker_continues_a_request_with_units_of_the_prefill_worker(folder: Path, plain: Served) -> None:
    apart = Apart(folder)
    for number in range(3):
        answer = ended(apart, apart.compute(prompt(number), number), prompt(number), number)
        assert answer.bits == plain.ask(prompt(number), seed=number, **SAMPLED).bits
        assert answer.finish is not None
        assert answer.finish.cached_from[Tier.PEER] == PROMPT_TOKENS // PAGE_SIZE * PAGE_SIZE
    assert apart.second.core.stats().refused_pulls_total == 0
    apart.close()


@pytest.mark.parametrize("seed", range(30 if NIGHTLY else 2))
def test_requests_read_no_poisoned_unit_when_copies_take_many_steps(
    folder: Path, plain: Served, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with shared prefixes arrive and are aborted at random times, while copies take many steps."""
    rng = random.Random(seed)
    served = Served(*build(folder, POOL_PAGES, options(tmp_path / "pages")), poisoned=True)
    delay_copies(served, rng, monkeypatch)
    serve_and_compare(served, plain, rng, 0.2, **SAMPLED)
    memory, stats = served.core.memory, served.core.stats()
    assert memory.num_leased == 0 and not memory.quarantined and memory.units is not None
    assert all(not pool.num_lent for pool in memory.units.pools)
    assert stats.backed_up_pages_total > 0 and stats.failed_operations_total == 0
    served.close()
