"""The size of the KV pool, and the measurement of free host memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootstock_llm.services.worker.exec.pools.host_memory import free_memory
from rootstock_llm.services.worker.exec.pools.kv_pool import kv_pool_tokens

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "fraction", "per_token", "expected"),
    [(1000, 0.5, 100, 5), (1000, 1.0, 300, 3), (99, 1.0, 100, 0), (-5, 0.9, 10, 0)],
    ids=["half", "rounds-down", "nothing-fits", "overdrawn"],
)
def test_kv_pool_tokens_rounds_down_to_whole_tokens(free: int, fraction: float, per_token: int, expected: int) -> None:
    assert kv_pool_tokens(free, fraction, per_token) == expected


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
def test_free_memory_returns_the_smallest_limit(tmp_path: Path, files: dict[str, str], gib: int) -> None:
    write(tmp_path, {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {8 * GIB // 1024} kB\n", **files})
    assert free_memory(tmp_path / "proc", tmp_path / "cg") == gib * GIB
