"""Memory accounting, the page table and the relay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.core.contracts.plan import BatchPlan, ForwardMode
from services.worker.exec.future_map import FutureMap, UnwrittenToken
from services.worker.exec.pools.pools import PageTable, free_memory, kv_pool_tokens

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "fraction", "per_token", "expected"),
    [(1000, 0.5, 100, 5), (1000, 1.0, 300, 3), (99, 1.0, 100, 0), (-5, 0.9, 10, 0)],
    ids=["half", "rounds-down", "nothing-fits", "overdrawn"],
)
def test_kv_pool_tokens(free: int, fraction: float, per_token: int, expected: int) -> None:
    assert kv_pool_tokens(free, fraction, per_token) == expected


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


V2 = {"proc/self/cgroup": "0::/pod/box\n"}
V1 = {"proc/self/cgroup": "5:cpu,memory:/box\n4:cpuset:/\n"}


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
def test_free_memory(tmp_path: Path, files: dict[str, str], gib: int) -> None:
    write(tmp_path, {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {8 * GIB // 1024} kB\n", **files})
    assert free_memory(tmp_path / "proc", tmp_path / "cg") == gib * GIB


def test_free_memory_of_this_machine() -> None:
    assert free_memory() > 0


def update(slots: list[int], firsts: list[int], counts: list[int], pages: list[int]) -> BatchPlan:
    columns = [np.array(values, dtype=np.int32) for values in (slots, firsts, counts, pages)]
    empty = np.zeros(0, dtype=np.int32)
    return BatchPlan(
        0, ForwardMode.IDLE, 0, empty, empty, empty, empty, empty.astype(np.bool_), empty, empty, empty, empty, (), *columns
    )


def test_page_table_applies_updates_in_order() -> None:
    table = PageTable(max_slots=3, max_pages=4, page_size=2)
    table.update(update([1, 0, 1], [0, 2, 1], [2, 1, 2], [7, 8, 5, 9, 3]))
    assert table.tensor.tolist() == [[-1, -1, 5, -1], [7, 9, 3, -1], [-1] * 4]
    assert table.capacity == 8


def test_locations() -> None:
    table = PageTable(max_slots=2, max_pages=4, page_size=2)
    table.update(update([1], [0], [2], [7, 0]))
    slots, positions = np.array([1, 1, 1, 1, 0], np.int32), np.array([0, 1, 3, 4, 0], np.int32)
    assert table.locations(slots, positions).tolist() == [14, 15, 1, -1, -1]


def test_relay_hands_on_what_was_written() -> None:
    relay = FutureMap(4, check=True)
    relay.write(torch.tensor([2, 0]), torch.tensor([11, 12]))
    assert relay.gather(torch.tensor([0, 2])).tolist() == [12, 11]


@pytest.mark.parametrize("poisoned", [False, True], ids=["never-written", "admitted-anew"])
def test_relay_catches_reads_of_nothing(poisoned: bool) -> None:
    relay, lenient = FutureMap(2, check=True), FutureMap(2)
    for each in (relay, lenient):
        if poisoned:
            each.write(torch.tensor([1]), torch.tensor([5]))
            each.poison(torch.tensor([1]))
    with pytest.raises(UnwrittenToken, match=r"slots \[1\]"):
        relay.gather(torch.tensor([1]))
    assert lenient.gather(torch.tensor([1])).tolist() == [0]
