"""Declares the operations that an operator requests and an executor runs between steps. Plain data; imports no torch."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from rootstock_llm.services.worker.core.contracts.transfers import Deleted, Selection


@dataclass(frozen=True, slots=True)
class ReleaseMemory:
    """Returns the memory of the KV pool, the weights or both to the device or the system, until ResumeMemory.

    The content of a released pool is lost.
    """

    kv: bool  # release the KV pool
    weights: bool  # release the weights


@dataclass(frozen=True, slots=True)
class ResumeMemory:
    """Allocates released memory again: an empty KV pool of the same size, and the weights that the model's folder has now."""

    kv: bool  # allocate the KV pool
    weights: bool  # load the weights


@dataclass(frozen=True, slots=True)
class StartProfile:
    """Starts a profile of all later steps, until StopProfile."""

    path: Path  # file for the Chrome trace, which StopProfile writes; its folder exists


@dataclass(frozen=True, slots=True)
class StopProfile:
    """Ends the profile and writes its file."""


@dataclass(frozen=True, slots=True)
class DeleteStored:
    """Deletes pages of the storage tier, after all reads and writes of this tier that began earlier.

    The executor does not wait for the deletion; its result goes to `done`.
    """

    which: Selection  # pages to delete
    done: Future[Deleted] = field(compare=False)  # receives the result


Operation = ReleaseMemory | ResumeMemory | StartProfile | StopProfile | DeleteStored


class OperationRefused(RuntimeError):
    """Raised if the executor cannot run an operation, in general or in its present state. The message is for the operator."""
