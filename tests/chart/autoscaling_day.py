"""Simulates a day of load, compressed to four hours, with a model of the workers, the recording rules and the chart's HPA.

python -m tests.chart.autoscaling_day writes docs/pictures/autoscaling.svg.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

from tests.chart.hpa import SYNC_S, Autoscaler, External, Pods, Reading
from tests.chart.recorded import SCRAPE_S, Recorded, Scrape
from tests.chart.release import BACKLOG, REPO, render
from tests.chart.worker_fleet import SERVICE_S, SLOTS, USAGE, WorkerFleet

PICTURE = REPO / "docs" / "pictures" / "autoscaling.svg"
MOST = 12
# (minute, load), linear between two points. A load of 1 needs one worker at its target share.
# fmt: off
DAY = (
    (0, 0.8), (15, 0.8), (55, 5.8), (75, 5.8), (95, 1.8), (125, 1.8),  # a ramp
    (125.1, 5.6), (155, 5.6), (156, 1.8),  # a sudden threefold load
    (185, 1.8), (205, 0.3), (240, 0.3),  # night
)
# fmt: on


@dataclass(frozen=True)
class Moment:
    """State of the simulation after a scrape of the metrics."""

    at: int  # seconds since the start
    load: float  # number of workers that this load would keep exactly at their target share; may be fractional
    need: int  # `load` rounded up, at least 1
    replicas: int  # number of replicas that the HPA has set
    serving: int  # workers that serve
    waiting: int  # queued requests


def hpa_spec() -> dict[str, Any]:
    settings = {"enabled": True, "minReplicas": 1, "maxReplicas": MOST}
    release = render({"worker": {"autoscaling": settings}})
    (found,) = [each for each in release.kind("HorizontalPodAutoscaler") if "-worker" in each["metadata"]["name"]]
    return dict(found["spec"])


def quantity(text: str) -> float:
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def targets(spec: dict[str, Any]) -> dict[str, float]:
    out = {}
    for metric in spec["metrics"]:
        of = metric[metric["type"].lower()]
        out[of["metric"]["name"]] = quantity(of["target"]["averageValue"])
    return out


def load_at(second: float) -> float:
    minute = second / 60
    for (begin, low), (end, high) in itertools.pairwise(DAY):
        if minute <= end:
            return low + (high - low) * (minute - begin) / (end - begin)
    return DAY[-1][1]


def readings(fleet: WorkerFleet, recorded: Recorded, scrape: Scrape, target: dict[str, float], plain: bool) -> list[Reading]:
    """Returns the metrics that the HPA reads. If `plain`, the values are those without the recording rules' bounds."""
    per_replica = target[BACKLOG]
    backlog = scrape.waiting if plain else min(scrape.waiting, per_replica * recorded.enough_workers)
    share = 1.0 if plain else recorded.arrival_share
    running = [worker.running / SLOTS * share for worker in fleet.replicas if worker.serves(fleet.now)]
    missing = len(fleet.replicas) - len(running)
    return [
        External(backlog, per_replica),
        Pods(running, missing, target["rootstock_running_share"]),
        Pods([USAGE * SLOTS * each for each in running], missing, target["sglang_token_usage"]),
    ]


@functools.cache
def play(plain: bool = False, seed: int = 1) -> tuple[Moment, ...]:
    spec = hpa_spec()
    target = targets(spec)
    autoscaler, fleet, recorded = Autoscaler(spec), WorkerFleet(1, seed), Recorded()
    per_worker = target["rootstock_running_share"] * SLOTS / SERVICE_S  # requests a second at the target share
    moments = []
    for second in range(1, DAY[-1][0] * 60 + 1):
        load = load_at(second)
        fleet.second(load * per_worker)
        if second % SCRAPE_S:
            continue
        scrape = recorded.add(fleet)
        if second % SYNC_S == 0:
            current = len(fleet.replicas)
            fleet.scale(autoscaler.replicas(second, current, readings(fleet, recorded, scrape, target, plain)))
        moments.append(Moment(second, load, max(1, math.ceil(load)), len(fleet.replicas), scrape.serving, scrape.waiting))
    return tuple(moments)


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "rootstock", "font.size": 9})
    import matplotlib.pyplot as plt

    moments = play()
    minutes = [moment.at / 60 for moment in moments]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 5), sharex=True, height_ratios=(3, 1), layout="constrained")
    top.plot(minutes, [moment.load for moment in moments], color="0.6", linewidth=1, label="load, in workers at their target")
    top.step(minutes, [moment.replicas for moment in moments], where="post", label="replicas asked for")
    top.step(minutes, [moment.serving for moment in moments], where="post", linestyle="--", label="workers that serve")
    top.set_ylabel("workers")
    top.legend(loc="upper right")
    bottom.fill_between(minutes, [moment.waiting for moment in moments], step="post", color="tab:red", linewidth=0)
    bottom.set_ylabel("requests waiting")
    bottom.set_xlabel("minutes")
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw()
