"""Aborts requests at all gateways, by the name that a client has given to the request.

A request is only at the gateway that the client has called. The gateway that receives an abort therefore runs the abort itself,
and also sends it to all other gateways concurrently. The report lists the gateways that could not be reached.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rootstock_llm.services.gateway.generation.errors import ApiError


@dataclass(frozen=True, slots=True)
class AbortScope:
    """Selects the requests to abort. A request is selected if it matches all fields."""

    rid: str | None  # the client's name of the request, or its request id, or None for all requests
    key: str | None  # name of the API key, "" if the gateway has no API keys, or None for all API keys
    worker: str = ""  # id of the worker that computes the requests; "": any

    def owns(self, key: str) -> bool:
        return self.key is None or self.key == key

    def names(self, *names: str) -> bool:
        return self.rid is None or self.rid in names

    def on(self, workers: Collection[str]) -> bool:
        """Whether the scope includes a request that is on `workers`, a collection of worker ids."""
        return not self.worker or self.worker in workers


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """The result of an abort at another gateway."""

    address: str  # gRPC address of the other gateway, from discovery
    gateway: bytes = b""  # the gateway's own id; b"" if it was not reached
    aborted: int = 0  # number of choices and requests that the gateway has ended
    message: str = ""  # reason if the gateway was not reached


class OpenRequests(Protocol):
    def abort(self, scope: AbortScope, error: ApiError) -> int:
        """Ends the selected requests with the output so far, or with `error` if they have no choices yet or no text output.

        Returns:
            The number of ended choices. A request that ended with `error` counts as 1.
        """


class Peers(Protocol):
    async def abort(self, scope: AbortScope) -> Sequence[PeerAnswer]:
        """Aborts the selected requests at every other gateway, within a time limit. Does not raise."""


@dataclass(frozen=True, slots=True)
class AbortReport:
    """The result of an abort at all gateways."""

    aborted: int  # number of choices and requests that all gateways have ended
    peers: Sequence[PeerAnswer]  # one result for each address of another gateway

    @property
    def unreached(self) -> list[PeerAnswer]:
        return [peer for peer in self.peers if not peer.gateway]

    def body(self) -> dict[str, Any]:
        """Returns the JSON body of the response.

        `gateways` counts this gateway and each reached gateway. A gateway with several addresses counts once.
        """
        others = {peer.gateway for peer in self.peers} - {b""}
        return {"aborted": self.aborted, "gateways": 1 + len(others), "unreached": len(self.unreached)}


class Aborter:
    """Aborts requests at this gateway and at all other gateways. Each process has one Aborter."""

    def __init__(self, requests: OpenRequests, peers: Peers) -> None:
        self._requests = requests
        self._peers = peers

    def abort_here(self, scope: AbortScope) -> int:
        """Ends the selected requests of this gateway as OpenRequests.abort() does.

        Returns:
            The number of ended choices. A request that ended with an error counts as 1.
        """
        return self._requests.abort(scope, aborted())

    async def abort(self, scope: AbortScope) -> AbortReport:
        here = self.abort_here(scope)
        answers = await self._peers.abort(scope)
        return AbortReport(here + sum(answer.aborted for answer in answers), answers)


def aborted() -> ApiError:
    return ApiError(400, "The request was aborted.", code="aborted")
