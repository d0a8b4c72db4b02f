"""Tests of the limits of a connection: heads, trailers, idle time, pipelining, and the number of connections."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from rootstock_llm.services.gateway.http import http_server
from rootstock_llm.services.gateway.http.http_server import HttpOptions
from rootstock_llm.services.shared.limits import MAX_HEAD_BYTES

HOST = "127.0.0.1"
GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
WAIT_S = 60.0


class App:
    """Responds with the size of the body. `/hold` waits for `go`, and `/early` responds before the body has arrived."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        size = 0
        while scope["path"] != "/early":
            message = await receive()
            size += len(message.get("body", b""))
            if not message.get("more_body", False):
                break
        if scope["path"] == "/hold":
            await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
        await send({"type": "http.response.body", "body": b"%08d" % size})


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Sends all data, or as much as the server accepts before it closes the connection."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except ConnectionError:
            return

    async def answer(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            head = await self.head()
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            return head + await self._reader.readexactly(length)

    async def head(self) -> bytes:
        return await self._reader.readuntil(b"\r\n\r\n")

    async def status(self) -> int:
        return int((await self.answer()).split()[1])

    async def ended(self) -> bool:
        async with asyncio.timeout(WAIT_S):
            return await self._reader.read(1) == b""

    async def read(self) -> bytes:
        """Returns all input until the connection ends."""
        async with asyncio.timeout(WAIT_S):
            return await self._reader.read()

    def close(self) -> None:
        self._writer.close()


Use = Callable[["Server"], Awaitable[None]]


class Server:
    def __init__(self, app: App, port: int, server: http_server.HttpServer) -> None:
        self.app, self.port, self.server = app, port, server
        self._clients: list[Client] = []

    async def connect(self) -> Client:
        self._clients.append(Client(*await asyncio.open_connection(HOST, self.port, limit=1 << 20)))
        return self._clients[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.005)

    def close(self) -> None:
        for client in self._clients:
            client.close()


@asynccontextmanager
async def running(options: HttpOptions) -> AsyncIterator[Server]:
    app, listener = App(), http_server.bind(HOST, 0)
    server = http_server.build(app, options)
    task = asyncio.create_task(server.serve([listener]))
    used = Server(app, listener.getsockname()[1], server)
    await used.until(lambda: server.started)
    try:
        yield used
    finally:
        used.close()
        app.go.set()
        server.stop()
        await asyncio.wait_for(task, WAIT_S)


PATIENT = HttpOptions(first_request_s=0.05, head_s=30)


def serving(use: Use, options: HttpOptions = PATIENT) -> None:
    async def run() -> None:
        async with running(options) as server:
            await use(server)

    uvloop.run(run())


def error_of(answer: bytes) -> dict[str, object]:
    body: dict[str, object] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return body


ENDLESS = {  # by the part that never ends: the input before this part
    "one header": b"GET /health HTTP/1.1\r\nHost: here\r\nX: ",
    "a target": b"GET /",
    "a method": b"",
    "trailers": b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: ",
    "a chunk's extension": b"POST /hold HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n1;x=",
}


@pytest.mark.parametrize("begin", ENDLESS.values(), ids=ENDLESS)
def test_connection_closes_when_a_part_of_the_input_never_ends(begin: bytes) -> None:
    """The client sends 16 MiB without an end of line. Other clients get responses at the same time."""

    async def use(server: Server) -> None:
        client, other = await server.connect(), await server.connect()
        sending = asyncio.create_task(client.send(begin + b"G" * (16 << 20)))
        await other.send(GET)
        assert await other.status() == 200
        await sending
        await server.until(lambda: len(server.server.server_state.connections) <= 1)

    serving(use)


def test_connection_answers_431_to_a_large_head() -> None:
    async def use(server: Server) -> None:
        client = await server.connect()
        await client.send(b"GET /health HTTP/1.1\r\nHost: here\r\nX: " + b"a" * (50 << 20) + b"\r\n\r\n")
        answer = await client.answer()
        assert answer.startswith(b"HTTP/1.1 431 ") and b"connection: close" in answer
        assert error_of(answer) == {
            "message": f"The request's head is larger than {MAX_HEAD_BYTES} bytes.",
            "type": "invalid_request_error",
            "param": None,
            "code": "head_too_large",
        }
        assert await client.ended()
        assert server.app.begun == 0

    serving(use)


@pytest.mark.parametrize(("size", "status"), [(MAX_HEAD_BYTES, 200), (MAX_HEAD_BYTES + 1, 431)])
@pytest.mark.parametrize("piece", [1000, 1 << 20])
def test_head_limit_is_exact_for_any_division_into_pieces(size: int, status: int, piece: int) -> None:
    async def use(server: Server) -> None:
        client = await server.connect()
        begin, end = b"GET / HTTP/1.1\r\nHost: here\r\nX: ", b"\r\n\r\n"
        head = begin + b"a" * (size - len(begin) - len(end)) + end
        assert len(head) == size
        for at in range(0, len(head), piece):
            await client.send(head[at : at + piece])
        assert await client.status() == status

    serving(use)


def test_head_limit_does_not_count_bodies() -> None:
    async def use(server: Server) -> None:
        client = await server.connect()
        await client.send(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 5000000\r\n\r\n" + b"x" * 5_000_000)
        assert (await client.answer()).endswith(b"05000000")
        chunks = b"".join(b"3e8\r\n" + b"y" * 1000 + b"\r\n" for _ in range(500))
        await client.send(b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert (await client.answer()).endswith(b"00500000")

    serving(use)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def use(server: Server) -> None:
        client = await server.connect()
        await client.send(b"".join(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % n + b"z" * n for n in range(30)))
        assert [(await client.answer())[-8:] for _ in range(30)] == [b"%08d" % n for n in range(30)]

    serving(use)


@pytest.mark.parametrize(
    "sent", [b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nA B: c\r\n\r\n", b"\x16\x03\x01\x02\x00"]
)
def test_connection_refuses_invalid_http_with_an_api_error(sent: bytes) -> None:
    async def use(server: Server) -> None:
        client = await server.connect()
        await client.send(sent)
        answer = await client.answer()
        assert answer.startswith(b"HTTP/1.1 400 ") and error_of(answer)["code"] == "bad_http"
        assert await client.ended() and server.app.begun == 0

    serving(use)


def test_connection_with_a_pipelined_request_is_not_closed_as_idle() -> None:
    """The body of the second request is incomplete when the first response ends, and the server is full."""

    async def use(server: Server) -> None:
        client = await server.connect()
        await client.send(GET + b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 6\r\n\r\nabc")
        assert await client.status() == 200
        await server.connect()
        await client.send(b"def")
        assert (await client.answer()).endswith(b"00000006")

    serving(use, HttpOptions(first_request_s=0.05, connections=1))


@pytest.mark.parametrize(("sent", "status"), [(b"nonsense\r\n\r\n", 400), (b"GET /" + b"a" * MAX_HEAD_BYTES, 431)])
def test_each_refusal_of_the_http_server_is_reported_to_the_callback(sent: bytes, status: int) -> None:
    counted: list[int] = []

    async def use(server: Server) -> None:
        client = await server.connect()
        await client.send(sent)
        assert await client.status() == status
        assert counted == [status]

    serving(use, HttpOptions(first_request_s=0.05, on_refused=lambda error: counted.append(error.status)))


class TestUpgrade:
    """Requests with `Upgrade` and CONNECT requests. The body of each request is a request, which must not be served."""

    UPGRADES: ClassVar = {
        "h2c": b"POST / HTTP/1.1\r\nHost: here\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAE\r\n",
        "websocket": b"POST / HTTP/1.1\r\nHost: here\r\nConnection: upgrade\r\nUpgrade: websocket\r\n",
        "get": b"GET / HTTP/1.1\r\nHost: here\r\nConnection: keep-alive, upgrade\r\nUpgrade: other\r\n",
        "connect": b"CONNECT /here HTTP/1.1\r\nHost: here\r\n",
    }
    LENGTH = b"Content-Length: %d\r\n\r\n%b" % (len(GET), GET)
    CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nTrailer: 1\r\n\r\n" % (len(GET), GET)

    @pytest.mark.parametrize("piece", [1, 7, 1 << 20])
    @pytest.mark.parametrize("body", [LENGTH, CHUNKED], ids=["length", "chunked"])
    @pytest.mark.parametrize("head", UPGRADES.values(), ids=UPGRADES)
    def test_connection_serves_a_request_with_upgrade_as_any_other(self, head: bytes, body: bytes, piece: int) -> None:
        """The requests are pipelined, some of them without `Upgrade` or without a body."""
        plain = b"POST / HTTP/1.1\r\nHost: here\r\n"
        pipelined = [head + body, head + b"\r\n", head + body, plain + body, GET, head + body]
        sent = b"".join(pipelined)
        sizes = [0 if each in (GET, head + b"\r\n") else len(GET) for each in pipelined]

        async def use(server: Server) -> None:
            client = await server.connect()
            for at in range(0, len(sent), piece):
                await client.send(sent[at : at + piece])
                await asyncio.sleep(0)
            answers = [await client.answer() for _ in pipelined]
            assert [(each.split()[1], int(each[-8:])) for each in answers] == [(b"200", size) for size in sizes]
            assert server.app.begun == len(pipelined)

        serving(use)

    @pytest.mark.parametrize("body", [LENGTH, CHUNKED], ids=["length", "chunked"])
    @pytest.mark.parametrize("at", [-1, -3, None], ids=["in the end mark", "before the end mark", "after the head"])
    def test_connection_serves_a_request_with_upgrade_whose_head_arrives_in_two_reads(self, at: int | None, body: bytes) -> None:
        head, mark, rest = (self.UPGRADES["h2c"] + body).partition(b"\r\n\r\n")
        begin = (head + mark)[:at]

        async def use(server: Server) -> None:
            client = await server.connect()
            await client.send(begin)
            await asyncio.sleep(0.05)
            await client.send((head + mark)[len(begin) :] + rest + GET)
            assert [int((await client.answer())[-8:]) for _ in range(2)] == [len(GET), 0]
            assert server.app.begun == 2

        serving(use)

    def test_connection_refuses_a_request_with_upgrade_whose_body_has_no_known_end(self) -> None:
        async def use(server: Server) -> None:
            for framing in (b"Transfer-Encoding: gzip\r\n\r\n", b"Content-Length: 3\r\n" + self.CHUNKED):
                client = await server.connect()
                await client.send(self.UPGRADES["h2c"] + framing + GET)
                answer = await client.read()
                assert answer.count(b"HTTP/1.1 ") <= 1 and b" 200 " not in answer

        serving(use)

    def test_connection_refuses_a_wrong_chunk_of_a_request_with_upgrade(self) -> None:
        async def use(server: Server) -> None:
            client = await server.connect()
            await client.send(self.UPGRADES["h2c"] + b"Transfer-Encoding: chunked\r\n\r\n" + GET + GET)
            assert b" 200 " not in await client.read() and server.app.begun <= 1

        serving(use)

    def test_connection_refuses_the_authority_of_a_connect_request(self) -> None:
        async def use(server: Server) -> None:
            client = await server.connect()
            await client.send(b"CONNECT there:443 HTTP/1.1\r\nHost: there:443\r\n" + self.LENGTH)
            assert error_of(await client.answer())["code"] == "bad_http"
            assert await client.ended() and server.app.begun == 0

        serving(use)

    def test_head_limit_is_exact_with_upgrade(self) -> None:
        async def use(server: Server) -> None:
            client = await server.connect()
            begin = self.UPGRADES["h2c"]
            padding = b"X: " + b"a" * (MAX_HEAD_BYTES - len(begin) - len(b"X: \r\nContent-Length: 5000000\r\n\r\n")) + b"\r\n"
            await client.send(begin + padding + b"Content-Length: 5000000\r\n\r\n" + b"x" * 5_000_000)
            assert (await client.answer()).endswith(b"05000000")
            await client.send(begin + b"a" + padding + b"Content-Length: 5000000\r\n\r\n")
            assert await client.status() == 431 and await client.ended()

        serving(use)

    def test_trailers_of_a_request_with_upgrade_are_limited(self) -> None:
        async def use(server: Server) -> None:
            client = await server.connect()
            sending = asyncio.create_task(
                client.send(self.UPGRADES["h2c"] + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: " + b"G" * (1 << 20))
            )
            await server.until(lambda: server.app.begun == 1)
            await server.until(lambda: not server.server.server_state.connections)
            await sending
            assert server.app.begun == 1, "the trailers are not read as a second request"

        serving(use)


class TestTime:
    @pytest.mark.parametrize("sent", [b"", GET[:9]], ids=["nothing", "a part"])
    def test_connection_closes_without_a_complete_head(self, sent: bytes) -> None:
        async def use(server: Server) -> None:
            client = await server.connect()
            await client.send(sent)
            if sent:
                assert await client.status() == 408
            assert await client.ended() and server.app.begun == 0

        serving(use, HttpOptions(first_request_s=0.05, head_s=0.1))

    @pytest.mark.parametrize("piece", [b"\r\n", b"a"], ids=["blank lines", "head"])
    def test_head_timeout_closes_the_connection_even_when_single_bytes_arrive(self, piece: bytes) -> None:
        async def use(server: Server) -> None:
            client = await server.connect()
            await client.send(GET)
            assert await client.status() == 200
            ending = asyncio.create_task(client.ended())
            for _ in range(1000):
                await client.send(piece)
                await asyncio.sleep(0.01)
                if not server.server.server_state.connections:
                    break
            await server.until(lambda: not server.server.server_state.connections)
            ending.cancel()

        serving(use, HttpOptions(first_request_s=0.05, head_s=0.2))

    def test_keep_alive_ends_after_the_timeout(self) -> None:
        async def use(server: Server) -> None:
            client = await server.connect()
            await client.send(GET)
            assert await client.status() == 200
            assert await client.ended()

        serving(use, HttpOptions(first_request_s=0.05, head_s=30, keep_alive_s=1))

    def test_head_timeout_of_a_pipelined_request_does_not_cut_off_a_slow_earlier_response(self) -> None:
        async def use(server: Server) -> None:
            client = await server.connect()
            await client.send(b"GET /hold HTTP/1.1\r\nHost: here\r\n\r\n" + GET[:9])
            await asyncio.sleep(0.3)
            server.app.go.set()
            assert await client.status() == 200
            assert await client.status() == 408

        serving(use, HttpOptions(first_request_s=0.05, head_s=0.1))

    @pytest.mark.parametrize("framing", ["Content-Length: 5", "Transfer-Encoding: chunked"])
    def test_connection_stays_open_when_the_rest_of_the_body_arrives_after_the_response(self, framing: str) -> None:
        async def use(server: Server) -> None:
            client = await server.connect()
            rest = b"lo" if "5" in framing else b"2\r\nlo\r\n0\r\n\r\n"
            for _ in range(2):
                begin = b"hel" if "5" in framing else b"3\r\nhel\r\n"
                await client.send(f"POST /early HTTP/1.1\r\nHost: here\r\n{framing}\r\n\r\n".encode() + begin)
                assert await client.status() == 200
                await client.send(rest + GET)
                assert await client.status() == 200

        serving(use)

    @pytest.mark.parametrize("next_input", ["no chunk", "request without the body"])
    def test_connection_is_closed_when_other_data_arrives_instead_of_the_request_body(self, next_input: str) -> None:
        async def use(server: Server) -> None:
            client = await server.connect()
            expect = b"" if next_input == "no chunk" else b"Expect: 100-continue\r\n"
            await client.send(b"POST /early HTTP/1.1\r\nHost: here\r\n" + expect + b"Transfer-Encoding: chunked\r\n\r\n")
            assert await client.status() == 200
            await client.send(b"xyz\r\n" if next_input == "no chunk" else GET)
            assert await client.ended()
            assert server.app.begun == 1

        serving(use)

    def test_last_response_reaches_a_client_that_is_still_sending(self) -> None:
        async def use(server: Server) -> None:
            client = await server.connect()
            await client.send(b"POST /early HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Length: 8000000\r\n\r\n")
            await client.send(b"x" * 8_000_000)
            assert await client.status() == 200
            assert await client.ended()

        serving(use)

    def test_server_sends_100_continue_when_the_request_has_the_expect_header(self) -> None:
        async def use(server: Server) -> None:
            client = await server.connect()
            await client.send(b"POST / HTTP/1.1\r\nHost: here\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
            assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(b"hello" + GET)
            assert [await client.status(), await client.status()] == [200, 200]

        serving(use)

    def test_connection_closes_when_the_body_of_an_answered_request_never_arrives(self) -> None:
        """A client cannot keep the connection open by sending no more of the body."""

        async def use(server: Server) -> None:
            client = await server.connect()
            await client.send(b"POST /early HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\nabc")
            assert await client.status() == 200
            assert await client.ended()

        serving(use)


class TestPressure:
    def test_full_server_closes_the_longest_idle_connection(self) -> None:
        async def use(server: Server) -> None:
            first, second = await server.connect(), await server.connect()
            for client in (second, first):  # the second connection has been idle longer
                await client.send(GET)
                assert await client.status() == 200
            third = await server.connect()
            assert await second.ended()
            for client in (first, third):
                await client.send(GET)
                assert await client.status() == 200

        serving(use, HttpOptions(first_request_s=0.05, connections=2))

    def test_full_server_answers_health_checks_and_refuses_other_requests(self) -> None:
        async def use(server: Server) -> None:
            busy = [await server.connect() for _ in range(2)]
            for client in busy:
                await client.send(b"GET /hold HTTP/1.1\r\nHost: here\r\n\r\n")
            await server.until(lambda: server.app.begun == 2)
            probe = await server.connect()
            await probe.send(HEALTH)
            assert await probe.status() == 200
            other = await server.connect()
            await other.send(GET)
            answer = await other.answer()
            assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 7" in answer
            assert error_of(answer)["code"] == "too_many_connections" and await other.ended()
            server.app.go.set()
            assert [await client.status() for client in busy] == [200, 200]

        serving(use, HttpOptions(first_request_s=0.05, retry_after_s=7, connections=2))

    def test_connection_of_a_health_check_does_not_count_against_the_limit(self) -> None:
        async def use(server: Server) -> None:
            client = await server.connect()
            await client.send(b"GET /hold HTTP/1.1\r\nHost: here\r\n\r\n")
            await server.until(lambda: server.app.begun == 1)
            probe = await server.connect()
            await probe.send(HEALTH)
            assert await probe.status() == 200
            server.app.go.set()
            assert await client.status() == 200
            await client.send(GET)
            assert await client.status() == 200

        serving(use, HttpOptions(first_request_s=0.05, connections=1))

    def test_silent_connections_do_not_block_a_request(self) -> None:
        async def use(server: Server) -> None:
            silent = [socket.create_connection((HOST, server.port)) for _ in range(100)]
            await server.until(lambda: len(server.server.server_state.connections) <= 10)
            client = await server.connect()
            await client.send(GET)
            assert await client.status() == 200
            for each in silent:
                each.close()

        serving(use, HttpOptions(first_request_s=0.05, connections=10))
