"""Deletes cached KV for the operation FlushCache, by tier, cache salt or age."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rootstock_llm.services.shared.control_values import SELECTED
from rootstock_llm.services.shared.limits import MAX_CACHE_SALT_CHARS
from rootstock_llm.services.worker.core.contracts.transfers import Deleted, Selection, Tier
from rootstock_llm.services.worker.core.control import SchedulerControl
from rootstock_llm.services.worker.exec.contracts.operations import DeleteStored
from rootstock_llm.services.worker.exec.contracts.protocol import Executor

# Tiers of a flush that names no tier. The host tier is flushed together with the device, because otherwise requests would read
# the flushed prefixes back from host memory. The storage tier is flushed only if the flush names the tier, a salt or an age.
DEFAULT_TIERS = (Tier.DEVICE, Tier.HOST)
SALT_TIERS = (*DEFAULT_TIERS, Tier.STORAGE)  # tiers of a flush that names a salt, but no tier
AGE_TIERS = (Tier.STORAGE,)  # tiers of a flush that names an age; only the storage tier records when a page was stored


@dataclass(frozen=True, slots=True)
class Flush:
    """A selection of cached pages."""

    tiers: tuple[Tier, ...]
    salt: str | None = None  # cache salt; empty: pages without a salt; None: all pages
    older_than_s: float | None = None  # smallest number of seconds since a page was stored; None: every age


@dataclass(frozen=True, slots=True)
class Flushed:
    """The result of a flush."""

    pages: int  # number of dropped pages
    stored: Future[Deleted] | None  # result of the deletion in the storage tier; None if the tier was not selected
    counted: bool  # whether `pages` includes the pages of the storage tier


def parse(names: Sequence[str], salt: str | None, older_than_s: float | None) -> Flush:
    """Converts the fields of a flush request to a Flush.

    Args:
        names: names of tiers, and SELECTED (without effect) if a salt or an age is given. If no tier is named, the result has
            AGE_TIERS if an age is given, else SALT_TIERS if a salt is given, else DEFAULT_TIERS.
        salt: cache salt; empty: pages without a salt; None: all pages.
        older_than_s: smallest age in seconds; None: every age.

    Raises:
        ValueError: a field is invalid. The message begins with the field's name.
    """
    selects = salt is not None or older_than_s is not None
    names = [name for name in names if not (selects and name == SELECTED)]
    unknown = [name for name in names if name not in set(Tier) - {Tier.PEER}]
    if unknown:
        raise ValueError(f"tiers: {unknown[0]} is not one of {', '.join(SALT_TIERS)}")
    if salt is not None and len(salt) > MAX_CACHE_SALT_CHARS:
        raise ValueError(f"cache_salt: has more than {MAX_CACHE_SALT_CHARS} characters")
    usual = DEFAULT_TIERS if salt is None else SALT_TIERS
    tiers = tuple(dict.fromkeys(Tier(name) for name in names)) or (usual if older_than_s is None else AGE_TIERS)
    if older_than_s is not None:
        if not (math.isfinite(older_than_s) and older_than_s >= 0):
            raise ValueError("older_than_s: must be a finite number of seconds, 0 or more")
        if tiers != AGE_TIERS:
            raise ValueError("tiers: only pages of the tier storage have an age; with older_than_s, name no other tier")
    return Flush(tiers, salt, older_than_s)


def flush(control: SchedulerControl, executor: Executor, selection: Flush) -> Flushed:
    """Drops the selected pages. Must run on the scheduler loop's thread.

    The storage tier deletes its pages later; Flushed.stored gets the result.
    """
    pages = 0
    if selection.salt is not None and selection.older_than_s is None:
        pages = control.forget_salt(selection.salt, selection.tiers)
    elif selection.older_than_s is None:
        pages = control.flush_cache() if Tier.DEVICE in selection.tiers else 0
    tag = None if selection.salt is None else control.storage_tag(selection.salt)
    stored: Future[Deleted] | None = None
    if Tier.STORAGE in selection.tiers and (
        selection.salt is None or tag is not None
    ):  # storage_tag() returns None if the worker has no lower tiers
        stored = Future()
        executor.apply(DeleteStored(Selection(tag, selection.older_than_s), stored))
    everything = selection.salt is None and selection.older_than_s is None
    if everything:
        pages += control.flush_tiers(selection.tiers)
    return Flushed(pages, stored, everything)
