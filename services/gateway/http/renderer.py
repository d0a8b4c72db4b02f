"""What an endpoint makes of a request's choices: the port between the exchange and each API. Or who takes the request over, once
it is prepared, or what comes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

from starlette.responses import Response

from services.gateway.request.bodies import ReceivedBody
from services.gateway.request.errors import ApiError
from services.gateway.request.generation import Plan
from services.gateway.request.origin import Origin
from services.gateway.request.request import ClientRequest, Delta

Prepare = Callable[[ReceivedBody, Origin], Awaitable[Plan]]  # of a body


class Admitted(Protocol):
    """A request's place within the limits of its key. Ended once, by whoever has it."""

    def reserve(self, tokens: int) -> None:
        """The most that it may come to, prompt and answers. Once; raises ApiError 429."""

    def end(self, used_tokens: int) -> None:
        """used_tokens: what it has come to."""


class Narrator(ABC):
    """In a renderer's place: it takes what comes by itself, and nothing is sent."""

    @abstractmethod
    async def narrate(self, request: ClientRequest) -> None:
        """Until every choice has ended, and whoever it is for has it. Raises ApiError."""


class Detached(ABC):
    """In a renderer's place: the request is computed elsewhere, whether its client stays or not."""

    @abstractmethod
    async def detach(self, plan: Plan, admission: Admitted | None) -> Response:
        """What its client is answered. The admission is ended by whoever computes it, also where this fails. Raises ApiError."""


class Renderer(Protocol):
    """One request's answer, for one endpoint."""

    async def document(self, deltas: Sequence[Delta]) -> bytes:
        """The whole answer; `deltas` are all choices, by index. Raises ApiError."""


class HeaderRenderer(ABC):
    """A renderer whose response has headers of its own. An abstract class, because an instance check against a runtime protocol
    takes 8.5 microseconds of each response."""

    @property
    @abstractmethod
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Headers that are known now: of a stream before its first chunk, of a whole response once document() has returned."""


@runtime_checkable
class StreamRenderer(Renderer, Protocol):
    """Of an endpoint that can stream. What it gives are complete events."""

    async def chunk(self, delta: Delta) -> bytes:
        """Raises ApiError."""

    async def ending(self) -> bytes:
        """What comes behind all chunks. Raises ApiError."""

    def failure(self, error: ApiError) -> bytes:
        """In place of what was still to come."""
