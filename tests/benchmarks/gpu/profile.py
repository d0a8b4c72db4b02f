"""Where the device's time goes, read from a trace of torch's profiler.

The trace's device events are kernels, copies and fills; those of one launch share its correlation id, all kernels of a graph's
replay among them. Time in which no event runs is idle: between two launches (the host was late, or the launch took so long),
or inside a graph (what one kernel after another costs).
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
ON_HOST = frozenset({"cpu_op"})  # stands for the device where there is none
SHOWN_KERNELS = 12
LONGEST_NAME = 80


class NoEvents(RuntimeError):
    """The profiler has seen nothing of the device."""


@dataclass(frozen=True, slots=True)
class Event:
    """Microseconds."""

    name: str
    begin: float
    end: float
    launch: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Of the time from the first event's begin to the last one's end, span_us. busy_us: in which any event ran. idle_share: of
    the span, between launches; idle_in_graphs_share: within them. kernels: (name, share of the events' summed time, calls per
    step, mean microseconds of a call), largest first. gaps_us: (between two launches, in order of length), the longest ten."""

    span_us: float
    busy_us: float
    idle_share: float
    idle_in_graphs_share: float
    launches: int
    events: int
    kernels: list[tuple[str, float, float, float]]
    gaps_us: list[float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def profiled(work: Callable[[], object], on_gpu: bool, steps: int, keep: Path | None = None) -> Profile:
    """Runs work, which is so many steps, once under the profiler. What it launches must be over when it returns. keep: a file for
    the trace, gzipped. Raises NoEvents.

    On a GPU its activity alone is recorded: to record each operation of the host slows the host, which is judged here too.
    """
    # Without a GPU the steps run on a thread of their own.
    activity, threads = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU, _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[activity], experimental_config=threads) as trace:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        entries = json.loads(path.read_text())["traceEvents"]
        if keep is not None:
            with path.open("rb") as whole, gzip.open(keep, "wb", compresslevel=6) as packed:
                shutil.copyfileobj(whole, packed)
    return profile_of(events_of(entries, ON_DEVICE if on_gpu else ON_HOST), steps)


def events_of(entries: Iterable[dict[str, Any]], categories: frozenset[str]) -> list[Event]:
    """Those of a Chrome trace, in order of their begin."""
    found = [
        Event(entry["name"], float(entry["ts"]), float(entry["ts"]) + float(entry["dur"]), _launch_of(entry, index))
        for index, entry in enumerate(entries)
        if entry.get("ph") == "X" and entry.get("cat") in categories
    ]
    return sorted(found, key=lambda event: event.begin)


def _launch_of(entry: dict[str, Any], index: int) -> int:
    """An entry without a correlation id is a launch of its own."""
    return int(entry.get("args", {}).get("correlation", -1 - index))


def profile_of(events: list[Event], steps: int) -> Profile:
    """events: in order of their begin, of all streams together."""
    if not events:
        raise NoEvents("the trace has no event of the device")
    gaps, inside, until, launch = [], 0.0, events[0].begin, events[0].launch
    for event in events:
        if event.begin > until:
            if event.launch == launch:
                inside += event.begin - until
            else:
                gaps.append(event.begin - until)
        if event.end > until:
            until, launch = event.end, event.launch
    span = until - events[0].begin
    return Profile(
        span_us=span,
        busy_us=span - inside - sum(gaps),
        idle_share=sum(gaps) / span if span else 0.0,
        idle_in_graphs_share=inside / span if span else 0.0,
        launches=len({event.launch for event in events}),
        events=len(events),
        kernels=_ranked(events, steps),
        gaps_us=sorted(gaps, reverse=True)[:10],
    )


def _ranked(events: list[Event], steps: int) -> list[tuple[str, float, float, float]]:
    """See Profile.kernels."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[short_name(event.name)].append(event.end - event.begin)
    sums = {name: sum(taken) for name, taken in times.items()}
    total = sum(sums.values()) or 1.0
    ranked = sorted(sums, key=lambda name: -sums[name])[:SHOWN_KERNELS]
    return [(name, sums[name] / total, len(times[name]) / steps, sums[name] / len(times[name])) for name in ranked]


def short_name(name: str) -> str:
    """Without return type, template arguments and parameters, as far as that leaves a name."""
    plain = re.sub(r"^(void|std::enable_if.*?::type) ", "", name)
    plain = re.split(r"[<(]", plain, maxsplit=1)[0].strip() or name
    return plain[:LONGEST_NAME]
