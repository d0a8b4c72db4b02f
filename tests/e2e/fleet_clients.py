"""Many concurrent clients of a fleet, with a load balancer that behaves like a Kubernetes Service.

The clients run on an event loop in its own thread. The load balancer uses only ready gateways. If a gateway refuses a connection,
the balancer tries another gateway, because no byte of the request was sent. The balancer never repeats a request that was sent,
so the client gets every later fault.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from tests.e2e.fleet_cases import Answer, BadAnswer, Case, answer_of

T = TypeVar("T")
PROBE_S = 0.2
REQUEST_S = 120.0
CUT = (
    "ClientPayloadError",
    "ServerDisconnectedError",
    "ClientOSError",
    "ClientConnectionResetError",
)  # errors of aiohttp for a closed connection


@dataclass(slots=True)
class Exchange:
    """A request and its result. After its end, exactly one of `answer` and `error` is set. Times are monotonic."""

    case: Case
    gateway: str = ""  # name of the gateway that received the request
    sent_at: float = 0.0
    first_at: float = 0.0  # time of the first received byte; 0 if there was none
    ended_at: float = 0.0  # 0 while the request runs
    longest_pause_s: float = 0.0  # longest wait for a piece of the response, from sending or the previous piece
    answer: Answer | None = None
    error: str = ""


@dataclass
class Wave:
    """Requests of one call of Clients."""

    exchanges: list[Exchange]
    _done: Future[None] = field(repr=False)

    def num_begun(self) -> int:
        """Returns the number of requests that have received a byte."""
        return sum(exchange.first_at > 0 for exchange in self.exchanges)

    def num_ended(self) -> int:
        return sum(exchange.ended_at > 0 for exchange in self.exchanges)

    def wait_begun(self, count: int, within_s: float = REQUEST_S) -> None:
        deadline = time.monotonic() + within_s
        while self.num_begun() < count:
            assert time.monotonic() < deadline, f"only {self.num_begun()} of {count} streams have begun after {within_s} s"
            time.sleep(0.01)

    def wait(self) -> list[Exchange]:
        self._done.result(2 * REQUEST_S)
        return self.exchanges


class Clients:
    """Clients of the gateways. Owns the event loop, its thread and the HTTP session.

    Args:
        gateways: base URL of each gateway by name.
    """

    def __init__(self, gateways: Mapping[str, str]) -> None:
        self._gateways = dict(gateways)
        self._ready: set[str] = set(gateways)
        self._turn = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Clients:
        self._thread.start()
        self._call(self._open()).result(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close()).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def wave(self, cases: Sequence[Case], concurrency: int | None = None, key: str = "") -> Wave:
        """Sends all cases in the background.

        Args:
            concurrency: largest number of requests in flight; None for no limit.
            key: API key of the clients; "" for no key.
        """
        exchanges = [Exchange(case) for case in cases]
        return Wave(exchanges, self._call(self._send_all(exchanges, concurrency or len(cases), key)))

    def ask(self, cases: Sequence[Case], concurrency: int) -> list[Exchange]:
        return self.wave(cases, concurrency).wait()

    def keep_asking(
        self, cases: Sequence[Case], clients: int, until: threading.Event, key: str = "", rest_s: float = 0.0
    ) -> Wave:
        """Starts clients that send requests in a loop until the event is set, with `rest_s` between two requests of a client.

        The returned wave grows with each request.
        """
        exchanges: list[Exchange] = []

        async def client(number: int) -> None:
            for index in itertools.count(number, 7):
                if until.is_set():
                    return
                exchange = Exchange(cases[index % len(cases)])
                exchanges.append(exchange)
                await self._send(exchange, key)
                await asyncio.sleep(rest_s)

        async def run() -> None:
            await asyncio.gather(*(client(number) for number in range(clients)))

        return Wave(exchanges, self._call(run()))

    def arrive(self, cases: Sequence[Case], every_s: float, key: str = "") -> Wave:
        """Sends a case every `every_s` seconds, even if earlier requests still run."""
        exchanges = [Exchange(case) for case in cases]

        async def client(number: int, exchange: Exchange) -> None:
            await asyncio.sleep(number * every_s)
            await self._send(exchange, key)

        async def run() -> None:
            await asyncio.gather(*(client(number, exchange) for number, exchange in enumerate(exchanges)))

        return Wave(exchanges, self._call(run()))

    def leave(self, cases: Sequence[Case], after_s: Callable[[int], float]) -> None:
        """Sends all cases at once and waits until all clients have disconnected.

        Args:
            after_s: returns the seconds after which the client of the case with this index disconnects.
        """

        async def client(index: int, case: Case) -> None:
            exchange = Exchange(case)
            try:
                async with asyncio.timeout(after_s(index)):
                    await self._send(exchange, "")
            except TimeoutError:
                return

        async def run() -> None:
            await asyncio.gather(*(client(index, case) for index, case in enumerate(cases)))

        self._call(run()).result(REQUEST_S)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _open(self) -> None:
        """Opens a session with one connection per request, because a server may close a connection when a client reuses it."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=2)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout)
        self._probing = [asyncio.create_task(self._probe(name)) for name in self._gateways]

    async def _close(self) -> None:
        for task in self._probing:
            task.cancel()
        await asyncio.gather(*self._probing, return_exceptions=True)
        await self._http.close()

    async def _probe(self, name: str) -> None:
        url, timeout = f"{self._gateways[name]}/readiness", aiohttp.ClientTimeout(total=5)
        while True:
            try:
                async with self._http.get(url, timeout=timeout) as response:
                    ready = response.status == 200
            except (aiohttp.ClientError, TimeoutError):
                ready = False
            (self._ready.add if ready else self._ready.discard)(name)
            await asyncio.sleep(PROBE_S)

    async def _send_all(self, exchanges: list[Exchange], concurrency: int, key: str) -> None:
        waiting = iter(exchanges)

        async def client() -> None:
            for exchange in waiting:
                await self._send(exchange, key)

        await asyncio.gather(*(client() for _ in range(concurrency)))

    async def _send(self, exchange: Exchange, key: str) -> None:
        """Sends a request and records its result. A fault of the fleet is stored as the exchange's error, not raised."""
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        exchange.sent_at = time.monotonic()
        try:
            status, content = await self._try_gateways(exchange, headers)
            exchange.answer = answer_of(status, content, b'"stream":true' in exchange.case.body)
        except BadAnswer as error:
            exchange.error = str(error)
        except (aiohttp.ClientError, TimeoutError) as error:
            exchange.error = f"{type(error).__name__}: {error}"
        finally:
            exchange.ended_at = time.monotonic()

    async def _try_gateways(self, exchange: Exchange, headers: dict[str, str]) -> tuple[int, bytes]:
        while True:
            names = sorted(self._ready) or sorted(self._gateways)
            exchange.gateway = names[next(self._turn) % len(names)]
            try:
                return await self._post(exchange, headers)
            except aiohttp.ClientConnectorError:
                if time.monotonic() - exchange.sent_at > REQUEST_S:
                    raise
                self._ready.discard(exchange.gateway)
                await asyncio.sleep(0.05)

    async def _post(self, exchange: Exchange, headers: dict[str, str]) -> tuple[int, bytes]:
        url = self._gateways[exchange.gateway] + exchange.case.path
        pieces: list[bytes] = []
        last = time.monotonic()
        async with self._http.post(url, data=exchange.case.body, headers=headers) as response:
            async for piece in response.content.iter_any():
                now = time.monotonic()
                exchange.first_at = exchange.first_at or now
                exchange.longest_pause_s = max(exchange.longest_pause_s, now - last)
                last = now
                pieces.append(piece)
            return response.status, b"".join(pieces)


def check(exchanges: Sequence[Exchange], expected: Mapping[Case, Answer], may_be_cut: str = "") -> str:
    """Checks that every response equals the response of a fleet without faults.

    Args:
        may_be_cut: name of a gateway that may close connections early; "" for none. All other faults fail the check.

    Returns:
        A line with counts and pauses.

    Raises:
        AssertionError: a request failed, or a response differs. The message has the number and an example of each kind of fault.
    """
    failed: dict[str, list[Exchange]] = {}
    cut = 0
    for exchange in exchanges:
        assert exchange.ended_at, "every exchange must have ended"
        if may_be_cut and exchange.gateway == may_be_cut and exchange.error.startswith(CUT):
            cut += 1
        elif exchange.error:
            failed.setdefault(f"{exchange.case.kind}: {exchange.error[:120]}", []).append(exchange)
        elif exchange.answer != expected[exchange.case]:
            failed.setdefault(f"{exchange.case.kind}: another answer", []).append(exchange)
    pauses = sorted(exchange.longest_pause_s for exchange in exchanges)
    median = pauses[len(pauses) // 2]
    line = f"{len(exchanges)} requests, longest pause of each request: at most {pauses[-1]:.2f} s, median {median:.2f} s"
    line += f", {cut} cut off" if may_be_cut else ""
    assert not failed, f"{line}\n{_describe(failed, expected)}"
    return line


def _describe(failed: Mapping[str, list[Exchange]], expected: Mapping[Case, Answer]) -> str:
    lines = [f"{sum(map(len, failed.values()))} went wrong: {Counter({kind: len(found) for kind, found in failed.items()})}"]
    for kind, found in list(failed.items())[:6]:
        lines.append(f"{kind} (by {found[0].gateway}, {found[0].error or found[0].answer})")
        if not found[0].error:
            lines.append(f"  instead of {expected[found[0].case]}")
    return "\n".join(lines)
