"""How an executor for a device has run its steps so far. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ExecutorStats:
    """Counts since the start; written by the thread that launches steps, read by scrapes. graph_steps: replayed; eager_steps:
    launched kernel by kernel; pieces: passes of steps that were computed in pieces; given_up: requests that ended because the
    device had no room for one token of theirs."""

    graph_steps: int = 0
    eager_steps: int = 0
    pieces: int = 0
    given_up: int = 0
