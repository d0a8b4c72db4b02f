"""Load of the machine before a measurement."""

from __future__ import annotations

import os
import time
from pathlib import Path


def busy_cores(seconds: float, stat: Path = Path("/proc/stat")) -> float:
    """Returns the average number of busy cores of the machine during the next `seconds`; 0 if /proc/stat does not exist."""
    if not stat.is_file():
        return 0.0
    before = busy_ticks(stat)
    time.sleep(seconds)
    return (busy_ticks(stat) - before) / os.sysconf("SC_CLK_TCK") / seconds


def busy_ticks(stat: Path) -> int:
    user, nice, system, _idle, _iowait, irq, softirq, *_ = (int(x) for x in stat.read_text().split("\n", 1)[0].split()[1:])
    return user + nice + system + irq + softirq
