"""Paged key/value memory, and how much of it fits this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


class PoolTooSmall(ValueError):
    """The memory left does not hold even one sequence's page."""


@dataclass(frozen=True, slots=True)
class KVPool:
    """Written on the forward stream alone.

    keys, values: per layer, [pages, kv heads, page size, head_dim] in the model dtype. Every page id is usable."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        assert len(self.keys) == len(self.values), "each layer has keys and values"


def kv_pool_tokens(free_bytes: int, mem_fraction_static: float, bytes_per_token: int) -> int:
    """Tokens that fit into mem_fraction_static of free_bytes, which is what is left after the weights."""
    assert bytes_per_token > 0, "a token takes memory"
    return max(0, int(free_bytes * mem_fraction_static)) // bytes_per_token


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):  # absent, unreadable, or the word "max"
        return None


def _reclaimable(stat: Path, key: str) -> int:
    """Page cache that the kernel gives up before it kills: counted as used by the cgroup, free for us."""
    try:
        fields = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines() if " " in line)
        return int(fields.get(key, 0))
    except (OSError, ValueError):
        return 0


def _cgroup_free(root: Path, group: str, limit: str, usage: str, cache_key: str) -> list[int]:
    """Bytes left under each limit on the way from a group up to the hierarchy's root."""
    left, folder = [], root / group.strip("/")
    for place in (folder, *(parent for parent in folder.parents if parent == root or root in parent.parents)):
        cap, used = _read_int(place / limit), _read_int(place / usage)
        if cap is not None and used is not None:
            left.append(cap - used + _reclaimable(place / "memory.stat", cache_key))
    return left


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: MemAvailable, or less under a cgroup limit (v1 or v2)."""
    lines = (proc / "meminfo").read_text().splitlines()
    left = [next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))]
    try:
        groups = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except OSError:
        groups = []
    for _, controllers, group in groups:
        if controllers == "":
            left += _cgroup_free(cgroups, group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            left += _cgroup_free(
                cgroups / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )
    return max(0, min(left))
