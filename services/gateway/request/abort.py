"""Ending requests by the name that their client gave them, wherever in the fleet they are.

A request is known to the gateway that its client is connected to, in every phase: so an abort is done here, and asked of all
other gateways at once. One that does not answer in time is told of as not reached, and keeps nobody waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.gateway.request.errors import ApiError


@dataclass(frozen=True, slots=True)
class AbortScope:
    """Which requests are meant. rid: None for all. key: name of the API key that they came with ("" where there are none), None
    for anybody's. worker: id of the one that they are on, "" for wherever they are."""

    rid: str | None
    key: str | None
    worker: str = ""

    def owns(self, key: str) -> bool:
        return self.key is None or self.key == key

    def names(self, *names: str) -> bool:
        return self.rid is None or self.rid in names

    def on(self, workers: Collection[str]) -> bool:
        """workers: ids of those that it is on; of two, while one has a copy."""
        return not self.worker or self.worker in workers


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """Of another gateway. gateway: its own name for itself, b"" where it was not reached; message then says why."""

    address: str
    gateway: bytes = b""
    aborted: int = 0
    message: str = ""


class OpenRequests(Protocol):
    def abort(self, scope: AbortScope, error: ApiError) -> int:
        """Ends those that are meant; returns how many answers that were."""


class Peers(Protocol):
    async def abort(self, scope: AbortScope) -> Sequence[PeerAnswer]:
        """Asks every other gateway, for a bounded time. Raises nothing."""


@dataclass(frozen=True, slots=True)
class AbortReport:
    """aborted: answers that were ended, over all gateways. peers: the other gateways', one for each address."""

    aborted: int
    peers: Sequence[PeerAnswer]

    @property
    def unreached(self) -> list[PeerAnswer]:
        return [peer for peer in self.peers if not peer.gateway]

    def body(self) -> dict[str, Any]:
        """gateways: those that have done it, this one among them; one may be known by several addresses."""
        others = {peer.gateway for peer in self.peers} - {b""}
        return {"aborted": self.aborted, "gateways": 1 + len(others), "unreached": len(self.unreached)}


class Aborter:
    """One per process."""

    def __init__(self, requests: OpenRequests, peers: Peers) -> None:
        self._requests = requests
        self._peers = peers

    def abort_here(self, scope: AbortScope) -> int:
        """Ends what is meant and known to this gateway. What has come of an answer so far is its answer."""
        return self._requests.abort(scope, aborted())

    async def abort(self, scope: AbortScope) -> AbortReport:
        here = self.abort_here(scope)
        answers = await self._peers.abort(scope)
        return AbortReport(here + sum(answer.aborted for answer in answers), answers)


def aborted() -> ApiError:
    return ApiError(400, "The request was aborted.", code="aborted")
