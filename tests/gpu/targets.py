"""Targets for the figures of benchmarks. A target is a bound for an H200 and does not apply to other devices."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.gpu.results import Result, label_of


@dataclass(frozen=True, slots=True)
class Target:
    """A bound for a benchmark's figure. Exactly one of `least` and `most` is set."""

    part: str  # name of the benchmark
    figure: str  # name of the figure in the benchmark's JSON
    words: str  # description of the figure in the report
    unit: str  # unit of the figure
    least: float | None = None  # the figure must be at least this value
    most: float | None = None  # the figure must be at most this value

    def is_met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    @property
    def bound(self) -> str:
        return f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"


@dataclass(frozen=True, slots=True)
class Judged:
    """A target, and the figure of one run."""

    target: Target
    value: float | None  # the figure, or None if it was not measured
    device: str  # device of the run
    flags: str  # flags of the benchmark
    profile: tuple[tuple[Any, ...], ...]  # Profile.kernels of the same run
    next_step: str  # advice if the target is missed

    @property
    def words(self) -> str:
        return label_of(self.target.words, self.flags)

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None if the figure was not measured or the device has no targets."""
        return None if self.value is None or not is_for(self.device) else self.target.is_met(self.value)


def is_for(device: str) -> bool:
    """Returns whether the targets apply to a device of this name. They do not apply to a GH200, whose memory differs."""
    return re.search(r"\bH200\b", device) is not None


_SINGLE, _VERSUS, _LINE = "bench-single-stream", "bench-versus-transformers", "bench-timeline"
TARGETS = (
    Target("bench-throughput", "qwen3-8b.seconds", "8B shape, 256 × 1024/1024", "s", most=28.0),
    Target(_SINGLE, "qwen3-8b.bandwidth_share", "single stream, 8B shape, of measured bandwidth", "", least=0.80),
    Target(_SINGLE, "qwen3-0.6b.bandwidth_share", "single stream, 0.6B shape, of measured bandwidth", "", least=0.35),
    Target(_LINE, "qwen3-0.6b.idle_share", "device idle between decode steps, 64 rows, 0.6B shape", "", most=0.03),
    Target(_LINE, "qwen3-8b.idle_share", "device idle between decode steps, 64 rows, 8B shape", "", most=0.03),
    Target("bench-overlap", "qwen3-0.6b.speedup", "overlap on against off, 0.6B shape", "×", least=1.1),
    Target("bench-deterministic", "qwen3-0.6b.cost_1x256", "deterministic mode, 1 × 256/64, 0.6B shape", "×", most=1.15),
    Target("bench-deterministic", "qwen3-0.6b.cost_8x256", "deterministic mode, 8 × 256/64, 0.6B shape", "×", most=1.15),
    Target("bench-deterministic", "qwen3-0.6b.cost_32x256", "deterministic mode, 32 × 256/64, 0.6B shape", "×", most=1.15),
    Target("bench-deterministic", "qwen3-0.6b.cost_1x4032", "deterministic mode, 1 × 4032/64, 0.6B shape", "×", most=1.15),
    Target(_VERSUS, "nano.speedup", "against transformers' continuous batching, nano workload", "×", least=2.0),
    Target(_VERSUS, "fixed.speedup", "against transformers' continuous batching, 64 × 512/256", "×", least=2.0),
    Target(_VERSUS, "prompts.speedup", "against transformers' continuous batching, 64 × 1024/32", "×", least=2.0),
)
GAPS_WORTH_MENTION = 0.05  # a larger share of idle time between launches is the subject of the advice


def judge(results: Iterable[Result], device: str) -> tuple[Judged, ...]:
    """Compares the results of a device with the targets.

    A figure that was measured with several sets of flags has one entry per set.
    """
    found = tuple(results)
    return tuple(judged for target in TARGETS for judged in _judged(target, found, device))


def _judged(target: Target, results: tuple[Result, ...], device: str) -> Iterable[Judged]:
    own = sorted((result for result in results if result.part == target.part), key=lambda result: result.flags)
    if not own:
        yield Judged(target, None, device, "", (), "")
    for result in own:
        value = result.outcome.get("figures", {}).get(target.figure, {}).get("value")
        profile = _profile(result.outcome, target.figure.partition(".")[0])
        yield Judged(target, value, device, result.flags, tuple(map(tuple, profile.get("kernels", []))), _next_step(profile))


def _profile(outcome: dict, name: str) -> dict:  # type: ignore[type-arg]
    """Returns the profile of the model or workload `name`. If it has none, returns the first profile, or {} without profiles."""
    profiles = outcome.get("profiles", {})
    return profiles.get(name) or next(iter(profiles.values()), {})


def _next_step(profile: dict) -> str:  # type: ignore[type-arg]
    """Returns the advice for a missed target by a fixed rule: reduce the largest cost in the profile."""
    if not profile:
        return "no profile was taken: run the part again"
    gaps, kernels = profile.get("idle_share", 0.0), profile.get("kernels", [])
    if gaps > GAPS_WORTH_MENTION:
        return f"the device waits for launches {gaps:.0%} of the time: shorten the host's work between two steps"
    if not kernels:
        return "the profile has no kernels: run the part again"
    name, share = kernels[0][:2]
    return f"{name} takes {share:.0%} of the device's time: tune or remove this kernel first"
