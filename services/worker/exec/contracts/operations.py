"""What an operator may ask of an executor beside steps. Plain data; no torch here."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from services.worker.core.contracts.transfers import Deleted, Selection


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
class DeleteStored:
    """Deletes pages that the tier below the host's memory keeps, behind what was begun before. It is not waited for. done: told
    what has come of it."""

    which: Selection
    done: Future[Deleted] = field(compare=False)


Operation = ReleaseMemory | ResumeMemory | StartProfile | StopProfile | DeleteStored


class OperationRefused(RuntimeError):
    """The executor cannot do this, or not in the state it is in; the message is a sentence for the operator."""
