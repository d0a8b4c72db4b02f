"""Counts the steps of an executor on a device. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ExecutorStats:
    """Counts since the start. The thread that launches steps writes them, and metric scrapes read them."""

    graph_steps: int = 0  # steps that were replayed as CUDA graphs
    eager_steps: int = 0  # steps that were launched kernel by kernel
    pieces: int = 0  # forward passes of steps that were computed in pieces
    given_up: int = 0  # requests that ended because the device had no memory to compute one of their tokens
