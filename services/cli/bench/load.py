"""Load shapes: a closed loop with a fixed number of sessions in flight, or an open loop with Poisson arrivals.

A load shape determines when a session starts. `play` sends the turns of a session one after another: a later turn is sent as soon
as the completion of the previous turn has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import aiohttp
import numpy as np

from rootstock_llm.services.cli.bench.client import Endpoint, Outcome, stream
from rootstock_llm.services.cli.bench.workload import Content, Session

ARRIVAL_STREAM = 10  # part of the seed; workloads use 0 to 3, so the prompts do not depend on the request rate

Play: TypeAlias = Callable[[Session, float | None], Awaitable[None]]


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Returns the seconds from the start to each of `count` arrivals, at `rate` per second with exponential gaps."""
    rng = np.random.default_rng([seed, ARRIVAL_STREAM])
    return [float(t) for t in np.cumsum(rng.exponential(1.0 / rate, size=count))]


async def closed_loop(sessions: Sequence[Session], concurrency: int, play: Play) -> None:
    """Keeps `concurrency` sessions in flight until all sessions have been played."""
    waiting = iter(sessions)

    async def client() -> None:
        for session in waiting:
            await play(session, None)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(sessions))):
            group.create_task(client())


async def open_loop(sessions: Sequence[Session], arrivals: Sequence[float], limit: int | None, play: Play) -> None:
    """Starts each session at its arrival. If `limit` sessions are in flight, an arriving session waits until one ends."""
    slots: AbstractAsyncContextManager[None] = nullcontext() if limit is None else asyncio.Semaphore(limit)
    start = time.perf_counter()

    async def client(session: Session, at: float) -> None:
        async with slots:
            await play(session, at)

    async with asyncio.TaskGroup() as group:
        for session, offset in zip(sessions, arrivals, strict=True):
            await asyncio.sleep(start + offset - time.perf_counter())
            group.create_task(client(session, start + offset))


class Player:
    """Plays sessions against one endpoint and owns the outcomes, in the order in which the requests ended."""

    def __init__(self, http: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        self._http = http
        self._endpoint = endpoint
        self.outcomes: list[Outcome] = []

    async def play(self, session: Session, scheduled_at: float | None) -> None:
        """Sends the turns in order. After a failed turn, sends no other turn, because later prompts would lack a completion."""
        dialogue = open_dialogue(session, self._endpoint.chat)
        for turn in session.turns:
            body = self._endpoint.body(dialogue.next_prompt(turn.content), turn.max_tokens)
            outcome = await stream(self._http, self._endpoint, body, scheduled_at)
            self.outcomes.append(outcome)
            if outcome.error is not None:
                return
            dialogue.add_completion(outcome.text)
            scheduled_at = None


class Dialogue(Protocol):
    """The conversation of one session in the format of its endpoint. Owned by the coroutine that plays the session."""

    def next_prompt(self, content: Content) -> dict[str, Any]:
        """Adds a user turn and returns the prompt fields of the request body. They are valid until the next call."""

    def add_completion(self, text: str) -> None:
        """Adds the server's completion of the last turn."""


class Messages:
    """A dialogue as messages for /v1/chat/completions."""

    def __init__(self, system: str | None) -> None:
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def next_prompt(self, content: Content) -> dict[str, Any]:
        assert isinstance(content, str), "a chat message has text, not token ids"
        self._messages.append({"role": "user", "content": content})
        return {"messages": self._messages}

    def add_completion(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})


class RunningText:
    """A dialogue as a text prompt for /v1/completions.

    The system prompt and each completion end with a line end, so that the next turn does not change their tokens.
    """

    def __init__(self, system: str | None) -> None:
        self._text = "" if system is None else system + "\n"

    def next_prompt(self, content: Content) -> dict[str, Any]:
        assert isinstance(content, str)
        self._text += content
        return {"prompt": self._text}

    def add_completion(self, text: str) -> None:
        self._text += text + "\n"


class TokenIds:
    """A dialogue as a prompt of token ids for /v1/completions.

    The session has only one turn, because a second prompt would need the completion's ids, which the stream does not contain.
    """

    def __init__(self, system: tuple[int, ...] | None) -> None:
        self._ids = () if system is None else system

    def next_prompt(self, content: Content) -> dict[str, Any]:
        assert isinstance(content, tuple)
        return {"prompt": self._ids + content}

    def add_completion(self, text: str) -> None:
        return None


def open_dialogue(session: Session, chat: bool) -> Dialogue:
    if isinstance(session.turns[0].content, tuple):
        assert not chat and not isinstance(session.system, str), "token ids are only for /v1/completions"
        return TokenIds(session.system)
    assert not isinstance(session.system, tuple)
    return Messages(session.system) if chat else RunningText(session.system)
