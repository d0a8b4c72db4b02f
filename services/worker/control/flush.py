"""Operators' deletions of cached KV, by tier, by salt or by age."""

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

# A prefix of the device must not return from the host. A storage is made to outlive a flush of both.
USUAL = (Tier.DEVICE, Tier.HOST)
OF_SALT = (*USUAL, Tier.STORAGE)
OF_AGE = (Tier.STORAGE,)  # only the storage has ages


@dataclass(frozen=True, slots=True)
class Flush:
    """A selection of cached pages."""

    tiers: tuple[Tier, ...]
    salt: str | None = None  # cache salt; empty for pages without a salt, unset for every page
    older_than_s: float | None = None  # least age in seconds, or unset for every age


@dataclass(frozen=True, slots=True)
class Flushed:
    """The result of a flush."""

    pages: int  # number of pages that were forgotten
    stored: Future[Deleted] | None  # result of the deletion in the storage; unset if it was not selected
    counted: bool  # whether `pages` includes the pages of the storage


def parse(names: Sequence[str], salt: str | None, older_than_s: float | None) -> Flush:
    """Returns the selection of a request.

    Args:
        names: names of tiers, and SELECTED. Without names, the usual tiers are selected.
        salt: cache salt; None for every page.
        older_than_s: least age in seconds; None for every age.

    Raises:
        ValueError: names the invalid field.
    """
    selects = salt is not None or older_than_s is not None
    names = [name for name in names if not (selects and name == SELECTED)]
    unknown = [name for name in names if name not in set(Tier) - {Tier.PEER}]
    if unknown:
        raise ValueError(f"tiers: {unknown[0]} is not one of {', '.join(OF_SALT)}")
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
    """Forgets the selected pages on the loop's thread. It does not wait for the storage."""
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
