"""Greedy streams one after the other, over several gateways in turn: what each said, and how long it paused."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

QUESTIONS = tuple(f"Count from {first} to {first + 24}." for first in range(1, 9))
REQUEST_S = 330.0
LOOK_S = 0.5  # whether clients are to go


@dataclass
class Load:
    """streams: at once. urls: those of gateways at the moment. longest_pause_s: since it was last set to 0. texts: by question,
    all that were said. max_tokens: of an answer."""

    streams: int
    urls: Callable[[], Sequence[str]]
    model: str = "demo"
    questions: Sequence[str] = QUESTIONS
    ended: int = 0
    longest_pause_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    texts: dict[str, set[str]] = field(default_factory=dict)
    max_tokens: int = 200
    _left: threading.Event = field(default_factory=threading.Event)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Load:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """What runs comes to its end."""
        self._stop.set()
        assert self._thread is not None
        self._thread.join(REQUEST_S)

    def leave(self) -> None:
        """All clients go away, whatever they wait for."""
        self._stop.set()
        self._left.set()

    def check(self) -> str:
        """A line about it. AssertionError where a request has failed, or texts differ."""
        assert not self.failures, dict(self.failures)
        different = {question: texts for question, texts in self.texts.items() if len(texts) > 1}
        assert not different, different
        assert self.ended, "nothing has ended"
        return f"{self.ended} requests, 0 failed, longest pause {self.longest_pause_s:.1f} s"

    async def _run(self) -> None:
        turn = itertools.count()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S)) as session:
            clients = [asyncio.create_task(self._client(session, turn)) for _ in range(self.streams)]
            there = set(clients)
            while there:
                _, there = await asyncio.wait(there, timeout=LOOK_S)
                for client in there if self._left.is_set() else ():
                    client.cancel()
            for client in clients:
                if not client.cancelled():
                    client.result()

    async def _client(self, session: aiohttp.ClientSession, turn: itertools.count[int]) -> None:
        while not self._stop.is_set():
            number, urls = next(turn), self.urls()
            if not urls:
                self.failures["no gateway"] += 1
                return
            question = self.questions[number % len(self.questions)]
            try:
                text = await self._ask(session, urls[number % len(urls)], question)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                if self._left.is_set():
                    return  # what becomes of the requests of those who have left is not theirs
                self.failures[f"{type(error).__name__}: {error}"[:300]] += 1
                await asyncio.sleep(0.5)
                continue
            self.texts.setdefault(question, set()).add(text)
            self.ended += 1

    async def _ask(self, session: aiohttp.ClientSession, url: str, question: str) -> str:
        """Raises ValueError for an error, whole or in mid-stream."""
        messages = [{"role": "user", "content": question}]
        body = {"model": self.model, "messages": messages, "temperature": 0, "stream": True, "max_tokens": self.max_tokens}
        text, last = "", time.monotonic()
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                raise ValueError(f"{answer.status}: {(await answer.text())[:200]}")
            async for line in answer.content:
                now = time.monotonic()
                self.longest_pause_s, last = max(self.longest_pause_s, now - last), now
                data = line.decode().removeprefix("data: ").strip()
                if not data or data.startswith(":"):
                    continue
                if data == "[DONE]":
                    return text
                event = json.loads(data)
                if "error" in event:
                    raise ValueError(data[:200])
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        raise ValueError("the stream ended without its end")
