"""A second copy of a choice that is slow to begin: on another worker, and the first of the two to say something keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.gateway.peers.weights import Weights
    from services.gateway.peers.worker_link import WorkerLink
    from services.gateway.request.request import Choice


@dataclass(frozen=True, slots=True)
class Hedge:
    """The copy. The choice's own link, handle and weights are the original's."""

    link: WorkerLink
    handle: int
    weights: Weights | None


def settle(choice: Choice, link: WorkerLink) -> WorkerLink | None:
    """This link's copy has spoken first: the other one is given up. Returns the other one's link, if there was a copy."""
    hedge, choice.hedge = choice.hedge, None
    if hedge is None:
        return None
    if hedge.link is not link:
        hedge.link.abort(hedge.handle)
        return hedge.link
    loser = choice.link
    assert loser is not None
    loser.abort(choice.handle)
    choice.link, choice.handle, choice.weights = link, hedge.handle, hedge.weights
    return loser


def survives(choice: Choice, link: WorkerLink) -> bool:
    """This link's copy is gone. Whether the other one goes on."""
    hedge, choice.hedge = choice.hedge, None
    if hedge is None:
        return False
    if hedge.link is not link:
        choice.link, choice.handle, choice.weights = hedge.link, hedge.handle, hedge.weights
    return True


def cancel(choice: Choice) -> WorkerLink | None:
    """Neither a copy nor a timer for one remains. Returns the link of the copy, if there was one."""
    if choice.hedge_timer is not None:
        choice.hedge_timer.cancel()
        choice.hedge_timer = None
    hedge, choice.hedge = choice.hedge, None
    if hedge is None:
        return None
    hedge.link.abort(hedge.handle)
    return hedge.link
