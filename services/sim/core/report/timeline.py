"""Draws a run: rows by mode, queue and KV over virtual time. Only this file imports matplotlib.

A curve has at most BINS points for any number of steps. Each point is the exact mean over its interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.sim.core.run.logs import StepLog
from rootstock_llm.services.sim.core.run.simulation import Outcome
from rootstock_llm.services.worker.core.contracts.plan import ForwardMode

if TYPE_CHECKING:
    from matplotlib.axes import Axes

F64 = NDArray[np.float64]

BINS = 300
FORMATS = (".png", ".svg")
_MODE_COLOURS = {ForwardMode.DECODE: "#4878a8", ForwardMode.EXTEND: "#d98032", ForwardMode.MIXED: "#8a6bb1"}


class NoPicture(RuntimeError):
    """The picture cannot be drawn: matplotlib is missing, or the file's suffix is not in FORMATS. The message has a remedy."""


def check_drawable(path: Path) -> None:
    """Checks before a long run that the picture can be drawn. Raises NoPicture."""
    if path.suffix.lower() not in FORMATS:
        raise NoPicture(f"{path}: a timeline must be a {' or '.join(FORMATS)} file")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise NoPicture("--timeline needs matplotlib: pip install matplotlib") from None


def draw_timeline(outcome: Outcome, path: Path, title: str) -> None:
    """Writes the picture. Raises NoPicture or OSError."""
    check_drawable(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), dpi=110, layout="constrained")
    rows, queue, kv = figure.subplots(3, 1, sharex=True)
    edges = time_bins(outcome.steps, outcome.seconds)
    _draw_rows(rows, outcome.steps, edges)
    _draw_queue(queue, outcome.steps, edges)
    _draw_kv(kv, outcome, edges)
    for axes in (rows, queue, kv):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False)
    rows.set_title(title, loc="left")
    kv.set_xlabel("virtual time, s")
    kv.set_xlim(edges[0], edges[-1])
    figure.savefig(path)


def time_bins(steps: StepLog, seconds: float) -> F64:
    """Returns float64[bins + 1], the edges of equal intervals from the first step to the end.

    The number of intervals is at most BINS and at most the number of steps.
    """
    begin = float(steps.gauge("at")[0]) if len(steps) else 0.0
    return np.linspace(begin, max(seconds, begin + 1e-9), max(min(BINS, len(steps)), 1) + 1)


def mean_of_intervals(begins: F64, ends: F64, values: F64, edges: F64) -> F64:
    """Returns float64[bins], the mean over each bin of a quantity.

    The quantity is `values[i]` from `begins[i]` to `ends[i]`, and 0 elsewhere. The intervals are in order and do not overlap.
    """
    if not len(values):
        return np.zeros(len(edges) - 1)
    areas = np.cumsum(values * (ends - begins))
    times = np.stack([begins, ends], axis=1).reshape(-1)
    totals = np.stack([np.concatenate([[0.0], areas[:-1]]), areas], axis=1).reshape(-1)
    means: F64 = np.diff(np.interp(edges, times, totals)) / np.diff(edges)
    return means


def mean_of_gauge(at: F64, values: F64, edges: F64) -> F64:
    """Returns float64[bins], the mean over each bin of a gauge.

    The gauge is `values[i]` from the time `at[i]` to the time `at[i + 1]`. The last value lasts to the end.
    """
    return mean_of_intervals(at, np.append(at[1:], max(edges[-1], at[-1] if len(at) else 0.0)), values, edges)


def _curve(axes: Axes, edges: F64, values: F64, colour: str, label: str, style: str = "-") -> None:
    axes.step(edges, np.append(values, values[-1]), where="post", color=colour, label=label, linestyle=style, linewidth=1.1)


def _draw_rows(axes: Axes, steps: StepLog, edges: F64) -> None:
    """Draws the number of rows on the device over time, stacked by the step's mode. Idle time counts as 0 rows."""
    mode, rows = steps.column("mode"), steps.column("rows")
    shown = [m for m in _MODE_COLOURS if (mode == m).any()]
    means = [mean_of_intervals(steps.column("begin"), steps.column("end"), np.where(mode == m, rows, 0.0), edges) for m in shown]
    _stack(axes, edges, means, [_MODE_COLOURS[m] for m in shown], [f"{m.name.lower()} steps" for m in shown])
    axes.set_ylabel("rows on the device")


def _draw_queue(axes: Axes, steps: StepLog, edges: F64) -> None:
    at = steps.gauge("at")
    _curve(axes, edges, mean_of_gauge(at, steps.gauge("running"), edges), "#4878a8", "running")
    _curve(axes, edges, mean_of_gauge(at, steps.gauge("waiting"), edges), "#c03d3e", "waiting")
    retractions = np.diff(np.interp(edges, at, steps.gauge("retractions"))) if len(at) else np.zeros(0)
    if retractions.any():
        _curve(axes, edges, retractions, "#555555", f"retracted per {edges[1] - edges[0]:.3g} s", ":")
    axes.set_ylabel("requests")


def _draw_kv(axes: Axes, outcome: Outcome, edges: F64) -> None:
    steps, percent = outcome.steps, 100 / outcome.num_pages
    gauges = [mean_of_gauge(steps.gauge("at"), steps.gauge(name) * percent, edges) for name in ("pages_in_use", "pages_cached")]
    _stack(axes, edges, gauges, ["#4878a8", "#a9c4de"], ["in use", "cached, can be freed"])
    axes.set_ylim(0, 100)
    axes.set_ylabel("KV pool, %")


def _stack(axes: Axes, edges: F64, values: Sequence[F64], colours: Sequence[str], labels: Sequence[str]) -> None:
    below = np.zeros(len(edges))
    for series, colour, label in zip(values, colours, labels, strict=True):
        top = below + np.append(series, series[-1])
        axes.fill_between(edges, below, top, step="post", color=colour, label=label, linewidth=0)
        below = top
