"""The size of the KV pool, and the measurement of free host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rootstock_llm.services.worker.core.contracts.pool_sizes import CacheShape, PoolSizes, PoolTooSmall
from rootstock_llm.services.worker.exec.pools.host_memory import free_memory

GIB = 1 << 30


MISTRAL = CacheShape(page_bytes=100, max_slots=2)
WINDOWED = CacheShape(page_bytes=100, window_bytes=50, slot_windows=6, swa_full_tokens_ratio=0.5)
ALL_WINDOWED = CacheShape(page_bytes=0, window_bytes=50, slot_windows=6, swa_full_tokens_ratio=0.5)
HYBRID = CacheShape(page_bytes=100, state_bytes=1000, max_slots=2, mamba_full_memory_ratio=1.0)


@pytest.mark.parametrize(
    ("shape", "budget", "expected"),
    [
        (MISTRAL, 1099, PoolSizes(10)),
        (MISTRAL, 99, PoolSizes(0)),
        (MISTRAL, -5, PoolSizes(0)),
        (WINDOWED, 2500, PoolSizes(20, 10)),
        (WINDOWED, 800, PoolSizes(5, 6)),  # the ratio gives fewer than the 6 units of a request
        (ALL_WINDOWED, 1000, PoolSizes(40, 20)),
        (replace(ALL_WINDOWED, least_pages=64), 1000, PoolSizes(64, 20)),  # pages have no bytes, so `least_pages` applies
        (HYBRID, 20_000, PoolSizes(100, 0, 10)),
        (HYBRID, 4000, PoolSizes(10, 0, 3)),
        (replace(HYBRID, max_mamba_cache_size=7), 20_000, PoolSizes(130, 0, 7)),
        (replace(HYBRID, scratch_states=2), 22_000, PoolSizes(100, 0, 10)),
        (replace(HYBRID, scratch_states=2), 6000, PoolSizes(10, 0, 3)),
        (replace(HYBRID, scratch_states=2, max_drafts=7, replay_bytes=500), 7500, PoolSizes(10, 0, 4)),
    ],
)
def test_memory_budget_is_split_into_pages_and_cache_units(shape: CacheShape, budget: int, expected: PoolSizes) -> None:
    found = shape.split(budget)
    assert found == expected
    assert shape.bytes_of(found) <= max(budget, 0)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (WINDOWED, "6 window units of 0.0 MiB for one request"),
        (HYBRID, "3 states for one request and 0 of the worker's own, 0.0 MiB each"),
    ],
)
def test_budget_without_memory_for_the_cache_units_of_one_request_is_refused(shape: CacheShape, text: str) -> None:
    with pytest.raises(PoolTooSmall, match=text):
        shape.split(200)


def test_configured_pool_gets_states_for_all_slots_if_memory_suffices() -> None:
    assert HYBRID.for_pages(10, 100_000) == PoolSizes(10, 0, 8)
    assert HYBRID.for_pages(10, 5999) == PoolSizes(10, 0, 4)
    assert HYBRID.for_pages(10, 0) == PoolSizes(10, 0, 3)
    assert HYBRID.for_pages(200, 100_000) == PoolSizes(200, 0, 20)
    assert replace(HYBRID, max_drafts=1).for_pages(10, 100_000) == PoolSizes(10, 0, 10)


def test_number_of_states_limits_the_number_of_running_requests() -> None:
    assert [PoolSizes(1, 0, states).max_running_requests(4) for states in (0, 3, 8, 100)] == [4, 1, 2, 4]
    assert PoolSizes(1, 0, 8).max_running_requests(4, max_drafts=3) == 2
    assert PoolSizes(1, 0, 11).max_running_requests(4, max_drafts=3) == 2


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


V2 = {"proc/self/cgroup": "0::/pod/box\n"}
V1 = {"proc/self/cgroup": "5:cpu,memory:/box\n4:cpuset:/\n"}


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 8),
        (V2, 8),
        ({**V2, "cg/pod/box/memory.max": "max\n", "cg/pod/box/memory.current": f"{GIB}\n"}, 8),
        ({**V2, "cg/pod/box/memory.max": f"{4 * GIB}\n", "cg/pod/box/memory.current": f"{GIB}\n"}, 3),
        ({**V2, "cg/pod/memory.max": f"{4 * GIB}\n", "cg/pod/memory.current": f"{3 * GIB}\n",
          "cg/pod/memory.stat": f"anon 5\ninactive_file {GIB}\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "cg/memory.max": f"{GIB}\n", "cg/memory.current": "0\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "cg/memory.max": f"{GIB}\n", "cg/memory.current": f"{2 * GIB}\n"}, 0),
        ({**V1, "cg/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n", "cg/memory/box/memory.usage_in_bytes": f"{GIB}\n"}, 1),
        ({**V1, "cg/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n", "cg/memory/memory.usage_in_bytes": "0\n"}, 8),
    ],
    ids=["no-cgroup", "no-limits", "v2-max", "v2", "v2-parent-with-cache", "v2-root", "v2-overdrawn", "v1", "v1-unlimited"],
)  # fmt: skip
def test_free_memory_is_the_smallest_of_all_limits(tmp_path: Path, files: dict[str, str], gib: int) -> None:
    write(tmp_path, {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {8 * GIB // 1024} kB\n", **files})
    assert free_memory(tmp_path / "proc", tmp_path / "cg") == gib * GIB
