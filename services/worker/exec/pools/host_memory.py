"""Measures the host memory that this process may still allocate."""

from __future__ import annotations

from pathlib import Path


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):  # the file is missing or unreadable, or has the word "max"
        return None


def _reclaimable(stat: Path, key: str) -> int:
    """Returns the bytes of page cache that a cgroup counts as used, although the kernel frees them before it kills a process."""
    try:
        fields = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines() if " " in line)
        return int(fields.get(key, 0))
    except (OSError, ValueError):
        return 0


def _cgroup_free(root: Path, group: str, limit: str, usage: str, cache_key: str) -> list[int]:
    """Returns the free bytes below the memory limits of a cgroup and of its parents, one number per limit that is set."""
    free, folder = [], root / group.strip("/")
    for path in (folder, *(parent for parent in folder.parents if parent == root or root in parent.parents)):
        cap, used = _read_int(path / limit), _read_int(path / usage)
        if cap is not None and used is not None:
            free.append(cap - used + _reclaimable(path / "memory.stat", cache_key))
    return free


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes that this process may still allocate: MemAvailable, or less if a cgroup (v1 or v2) has a limit."""
    lines = (proc / "meminfo").read_text().splitlines()
    free = [next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))]
    try:
        groups = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except OSError:
        groups = []
    for _, controllers, group in groups:
        if controllers == "":
            free += _cgroup_free(cgroups, group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            free += _cgroup_free(
                cgroups / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )
    return max(0, min(free))
