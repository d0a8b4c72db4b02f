"""Forgetting cached prefixes: by the tier that keeps them, by their salt, by their age."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from services.shared.control_values import SELECTED
from services.shared.limits import MAX_CACHE_SALT_CHARS
from services.worker.core.contracts.transfers import Deleted, Selection, Tier
from services.worker.core.control import SchedulerControl
from services.worker.exec.contracts.operations import DeleteStored
from services.worker.exec.contracts.protocol import Executor

USUAL = (Tier.DEVICE, Tier.HOST)  # a prefix that was forgotten must not come back; what a storage keeps is there to outlive this
OF_SALT = (*USUAL, Tier.STORAGE)
OF_AGE = (Tier.STORAGE,)  # that knows it


@dataclass(frozen=True, slots=True)
class Flush:
    """What is to be forgotten. salt: "" for what has none; None: any."""

    tiers: tuple[Tier, ...]
    salt: str | None = None
    older_than_s: float | None = None


@dataclass(frozen=True, slots=True)
class Flushed:
    """pages: that were forgotten. stored: what becomes of the storage's, None where none was meant; counted: pages has them."""

    pages: int
    stored: Future[Deleted] | None
    counted: bool


def parse(names: Sequence[str], salt: str | None, older_than_s: float | None) -> Flush:
    """names: of tiers, and SELECTED; none: the usual ones. Raises ValueError naming the field."""
    selects = salt is not None or older_than_s is not None
    names = [name for name in names if not (selects and name == SELECTED)]
    unknown = [name for name in names if name not in set(Tier) - {Tier.PEER}]
    if unknown:
        raise ValueError(f"tiers: {unknown[0]} is none of {', '.join(OF_SALT)}")
    if salt is not None and len(salt) > MAX_CACHE_SALT_CHARS:
        raise ValueError(f"cache_salt: has more than {MAX_CACHE_SALT_CHARS} characters")
    usual = USUAL if salt is None else OF_SALT
    tiers = tuple(dict.fromkeys(Tier(name) for name in names)) or (usual if older_than_s is None else OF_AGE)
    if older_than_s is not None:
        if not (math.isfinite(older_than_s) and older_than_s >= 0):
            raise ValueError("older_than_s: is a number of seconds, 0 or more")
        if tiers != OF_AGE:
            raise ValueError("tiers: only pages in the storage have an age")
    return Flush(tiers, salt, older_than_s)


def flush(control: SchedulerControl, executor: Executor, what: Flush) -> Flushed:
    """On the loop's thread, and without waiting for the storage."""
    pages = 0
    if what.salt is not None and what.older_than_s is None:
        pages = control.forget_salt(what.salt, what.tiers)
    elif what.older_than_s is None:
        pages = control.flush_cache() if Tier.DEVICE in what.tiers else 0
    tag = None if what.salt is None else control.storage_tag(what.salt)
    stored: Future[Deleted] | None = None
    if Tier.STORAGE in what.tiers and (what.salt is None or tag is not None):  # without a tag there is no storage
        stored = Future()
        executor.apply(DeleteStored(Selection(tag, what.older_than_s), stored))
    everything = what.salt is None and what.older_than_s is None
    if everything:
        pages += control.flush_tiers(what.tiers)
    return Flushed(pages, stored, everything)
