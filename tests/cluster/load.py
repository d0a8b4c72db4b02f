"""A load of greedy streams through several gateways. It records texts, pauses, and the causes of failures."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp

from tests.cluster.kubernetes import CommandFailed, Release
from tests.cluster.spaces import gateway_state

QUESTIONS = tuple(f"Count from {first} to {first + 24}." for first in range(1, 9))
REQUEST_S = 330.0
CHECK_S = 0.5  # seconds between two checks whether clients must disconnect
FRESH_S = 1.0  # seconds for which a list of gateways is used
RETRY_S = 0.5  # seconds between a failed request and the client's next one
LEAVE_S = 30.0  # seconds in which all clients must disconnect

Urls = Callable[[], Sequence[str]]
Witness = Callable[[str], str]


class Gateways:
    """Looks up the URLs of the ready gateways. A lookup runs kubectl, so it runs in a thread and does not block the streams."""

    def __init__(self, look: Urls) -> None:
        self._look = look
        self._lock = asyncio.Lock()
        self._known: Sequence[str] = ()
        self._fresh_until = 0.0

    async def urls(self, since: float = 0.0) -> Sequence[str]:
        """Returns the URLs of ready gateways.

        Args:
            since: monotonic time of the oldest acceptable lookup.

        Raises:
            ConnectionError: no gateway is ready.
        """
        async with self._lock:
            now = time.monotonic()
            if now >= self._fresh_until or since > self._fresh_until - FRESH_S:
                self._known, self._fresh_until = await self._asked(), now + FRESH_S
            if not self._known:
                raise ConnectionError("no gateway is ready")
            return self._known

    async def has_left(self, url: str) -> bool:
        """Returns whether other gateways are ready and this one is not."""
        try:
            return url not in await self.urls(time.monotonic())
        except ConnectionError:
            return False

    async def _asked(self) -> Sequence[str]:
        try:
            return await asyncio.to_thread(self._look)
        except CommandFailed:
            return self._known  # the last list, if the lookup fails; a gateway that has ended refuses the connection


@dataclass
class Load:
    """Clients that send requests in a loop, and the results. The clients run on an event loop in their own thread."""

    streams: int  # number of concurrent clients
    urls: Urls  # returns the URLs of the ready gateways
    model: str = "demo"
    questions: Sequence[str] = QUESTIONS
    ended: int = 0  # completed requests
    redirected: int = 0  # connections that a terminated gateway refused; the client then uses the next gateway
    longest_pause_s: float = 0.0  # longest wait for a line, from sending or the previous line; a test may reset it to 0
    failures: Counter[str] = field(default_factory=Counter)  # failed requests by error
    firsts: dict[str, str] = field(default_factory=dict)  # details of the first failure by error
    texts: dict[str, set[str]] = field(default_factory=dict)  # distinct completions by question
    max_tokens: int = 200  # largest number of output tokens per request
    witness: Witness | None = None  # returns the state of a gateway; called at the first failure of each kind
    _begun: float = field(default_factory=time.monotonic)
    _left: threading.Event = field(default_factory=threading.Event)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _fault: Exception | None = None

    def __enter__(self) -> Load:
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        """Stops the clients after their running requests. If the test has failed, disconnects them immediately."""
        if error is not None:
            error.add_note(self._summary())
            self.leave()
        self._stop.set()
        assert self._thread is not None
        self._thread.join(LEAVE_S if error is not None else REQUEST_S + LEAVE_S)
        if error is None:
            assert not self._thread.is_alive(), f"some clients did not end after their last request: {self._summary()}"
            if self._fault is not None:
                raise self._fault

    def leave(self) -> None:
        """Disconnects all clients immediately."""
        self._stop.set()
        self._left.set()

    def check(self) -> str:
        """Returns a line with the results.

        Raises:
            AssertionError: a request has failed, no request has completed, or completions of the same question differ.
        """
        assert not self.failures, self._summary()
        different = {question: texts for question, texts in self.texts.items() if len(texts) > 1}
        assert not different, f"completions of equal questions differ: {different}"
        assert self.ended, "at least one request must have completed"
        refused = f", {self.redirected} connections refused by terminated gateways" if self.redirected else ""
        return f"{self.ended} requests, 0 failed, longest pause {self.longest_pause_s:.1f} s{refused}"

    def _summary(self) -> str:
        details = "".join(f"\n{count} × {what}\n{self.firsts.get(what, '')}" for what, count in self.failures.most_common())
        return f"{self.streams} streams: {self.ended} requests completed, longest pause {self.longest_pause_s:.1f} s{details}"

    def _serve(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:
            self._fault = error

    async def _run(self) -> None:
        turn, gateways = itertools.count(), Gateways(self.urls)
        # Each request has its own connection, because an idle connection breaks when its gateway ends.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=REQUEST_S)) as session:
            clients = [asyncio.create_task(self._client(session, gateways, turn)) for _ in range(self.streams)]
            there = set(clients)
            while there:
                _, there = await asyncio.wait(there, timeout=CHECK_S)
                for client in there if self._left.is_set() else ():
                    client.cancel()
            for client in clients:
                if not client.cancelled():
                    client.result()

    async def _client(self, session: aiohttp.ClientSession, gateways: Gateways, turn: itertools.count[int]) -> None:
        while not self._stop.is_set():
            number, begun, url, received = next(turn), time.monotonic(), "no gateway", [""]
            question = self.questions[number % len(self.questions)]
            try:
                urls = await gateways.urls()
                url = urls[number % len(urls)]
                text = await self._ask(session, url, question, received)
            except (OSError, aiohttp.ClientError, TimeoutError, ValueError) as error:
                if self._left.is_set():
                    return  # leave() has disconnected the client, which causes this error
                if isinstance(error, aiohttp.ClientConnectorError) and await gateways.has_left(url):
                    self.redirected += 1
                    continue
                await self._failed(error, url, begun, received[0])
                await asyncio.sleep(RETRY_S)
                continue
            self.texts.setdefault(question, set()).add(text)
            self.ended += 1

    async def _failed(self, error: Exception, url: str, begun: float, text: str) -> None:
        what = f"{type(error).__name__}: {error}"[:300]
        self.failures[what] += 1
        if what in self.firsts:
            return
        now = time.monotonic()
        line = f"first at {time.strftime('%H:%M:%S')}, {now - self._begun:.1f} s after the start of the load, at {url},"
        self.firsts[what] = f"{line} {now - begun:.1f} s into the request, after {len(text)} characters of text"
        if self.witness is not None:
            try:
                self.firsts[what] += f"\n{await asyncio.to_thread(self.witness, url)}"
            except CommandFailed as unseen:
                self.firsts[what] += f"\nthe gateway's state cannot be read: {unseen}"

    async def _ask(self, session: aiohttp.ClientSession, url: str, question: str, received: list[str]) -> str:
        """Sends a request and returns its text. received[0] always has the text received so far.

        Raises:
            ValueError: the response is an error, contains one, or ends early.
        """
        messages = [{"role": "user", "content": question}]
        body = {"model": self.model, "messages": messages, "temperature": 0, "stream": True, "max_tokens": self.max_tokens}
        last = time.monotonic()
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
                    return received[0]
                event = json.loads(data)
                if "error" in event:
                    raise ValueError(data[:200])
                received[0] += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        raise ValueError("the stream ended without [DONE]")


def load_on(release: Release, streams: int, urls: Urls | None = None, **more: Any) -> Load:
    """Returns a load on a release. The first failure of each kind records the state of the gateway.

    Args:
        urls: returns the gateways' URLs; by default, those of all ready gateways.
        more: further fields of Load.
    """
    return Load(streams, urls or release.urls, witness=partial(gateway_state, release), **more)
