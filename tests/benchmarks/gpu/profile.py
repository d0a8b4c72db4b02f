"""Device time by kernel, from a trace of torch's profiler.

Device events of the trace are kernels, copies and fills. The events of one launch share its correlation id; a replay of a graph
is one launch. Time without an event is idle. Idle time between two launches means that the host launched late or that the launch
itself was slow. Idle time within a graph is the overhead between its kernels.
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
ON_HOST = frozenset({"cpu_op"})  # counted instead of device events if there is no GPU
SHOWN_KERNELS = 12
LONGEST_NAME = 80


class NoEvents(RuntimeError):
    """Raised if the trace has no device events."""


@dataclass(frozen=True, slots=True)
class Event:
    """A device event. Times are in microseconds."""

    name: str
    begin: float
    end: float
    launch: int  # correlation id that all events of one launch share


@dataclass(frozen=True, slots=True)
class Profile:
    """Summary of a trace. The trace spans the time from the first event's begin to the last event's end."""

    span_us: float  # length of the span in microseconds
    busy_us: float  # time in which at least one event runs, in microseconds
    idle_share: float  # share of the span that is idle between launches
    idle_in_graphs_share: float  # share of the span that is idle within launches
    launches: int  # number of launches
    events: int  # number of device events
    kernels: list[
        tuple[str, float, float, float]
    ]  # name, share of all events' time, calls per step, mean µs; largest share first
    gaps_us: list[float]  # the ten longest times between launches, longest first, in microseconds

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def profiled(work: Callable[[], object], on_gpu: bool, steps: int, keep: Path | None = None) -> Profile:
    """Runs `work` once under the profiler and returns a summary.

    On a GPU, only device activity is recorded. Recording host operations would slow down the host and add idle time.

    Args:
        work: runs `steps` steps. Its device work must have ended when it returns.
        on_gpu: whether to read device events; if False, CPU operations are read instead.
        steps: number of steps that `work` runs.
        keep: file for the trace, compressed by gzip; None for no file.

    Raises:
        NoEvents: the trace has no device events.
    """
    # Without a GPU, the executor's own thread runs the operations, so all threads are profiled.
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
    """Returns the events of these categories in a Chrome trace, in order of their begin."""
    found = [
        Event(entry["name"], float(entry["ts"]), float(entry["ts"]) + float(entry["dur"]), _launch_of(entry, index))
        for index, entry in enumerate(entries)
        if entry.get("ph") == "X" and entry.get("cat") in categories
    ]
    return sorted(found, key=lambda event: event.begin)


def _launch_of(entry: dict[str, Any], index: int) -> int:
    """Returns the correlation id. An entry without one gets a unique negative id."""
    return int(entry.get("args", {}).get("correlation", -1 - index))


def profile_of(events: list[Event], steps: int) -> Profile:
    """Returns the summary of all streams together. `events` are in order of their begin."""
    if not events:
        raise NoEvents("the profiler's trace has no device events")
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
    """Returns the value of Profile.kernels."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[short_name(event.name)].append(event.end - event.begin)
    sums = {name: sum(taken) for name, taken in times.items()}
    total = sum(sums.values()) or 1.0
    ranked = sorted(sums, key=lambda name: -sums[name])[:SHOWN_KERNELS]
    return [(name, sums[name] / total, len(times[name]) / steps, sums[name] / len(times[name])) for name in ranked]


def short_name(name: str) -> str:
    """Returns the kernel name without return type, template arguments and parameters, at most LONGEST_NAME characters."""
    plain = re.sub(r"^(void|std::enable_if.*?::type) ", "", name)
    plain = re.split(r"[<(]", plain, maxsplit=1)[0].strip() or name
    return plain[:LONGEST_NAME]
