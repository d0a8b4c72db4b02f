"""What an operator may ask of an executor beside steps. Plain data; no torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ReleaseMemory:
    """Gives memory back to the system: of the KV pool, whose content is lost, and of the weights. Released parts stay so."""

    kv: bool
    weights: bool


@dataclass(frozen=True, slots=True)
class ResumeMemory:
    """Takes the memory again: an empty KV pool of the same size, the weights as their folder has them at that time."""

    kv: bool
    weights: bool


@dataclass(frozen=True, slots=True)
class StartProfile:
    """path: where StopProfile writes the Chrome trace; its folder exists."""

    path: Path


@dataclass(frozen=True, slots=True)
class StopProfile:
    """Ends the profile and writes its file."""


@dataclass(frozen=True, slots=True)
class ClearStorage:
    """Deletes what the tier below the host's memory keeps."""


Operation = ReleaseMemory | ResumeMemory | StartProfile | StopProfile | ClearStorage


class OperationRefused(RuntimeError):
    """The executor cannot do this, or not in the state it is in; the message is a sentence for the operator."""
