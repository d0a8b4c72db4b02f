"""Tests of SIGTERM for tokenizer and detokenizer processes, and of the complete delivery of responses when a server stops."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rootstock_llm.protos import detokenizer_pb2, detokenizer_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from rootstock_llm.services.local.ports import HOST, free_ports
from rootstock_llm.services.shared.rpc import grpc_server

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
WAIT_S = 30
GRACE_S = 120  # seconds; longer than the test, which fails if it waits for the whole grace period


@contextlib.contextmanager
def process_of(service: str) -> Iterator[tuple[subprocess.Popen[bytes], grpc.Channel, int]]:
    port, metrics_port = free_ports(2)
    argv = [sys.executable, "-m", f"rootstock_llm.services.{service}", "--model", str(DEMO), "--port", str(port)]
    argv += ["--metrics-port", str(metrics_port), "--grace-s", str(GRACE_S)]
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    try:
        with grpc.insecure_channel(f"{HOST}:{port}", options=grpc_server.CHANNEL_OPTIONS) as channel:
            grpc.channel_ready_future(channel).result(WAIT_S)
            yield process, channel, metrics_port
    finally:
        process.kill()
        process.wait()


def test_drain_completes_calls_in_flight() -> None:
    words = [f"word{n}" for n in range(50_000)]
    text = " ".join(random.Random(1).choices(words, k=150_000))
    with process_of("tokenizer") as (process, channel, metrics_port):
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Encode.future(tokenizer_pb2.EncodeRequest(texts=[text]), timeout=WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while b"rootstock_tokenizer_in_flight 1.0" not in urllib.request.urlopen(f"http://{HOST}:{metrics_port}/metrics").read():
            assert time.monotonic() < deadline and not call.done(), "the call was not in flight"
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        assert len(call.result(WAIT_S).prompts[0].ids) > 150_000
        assert process.wait(WAIT_S) == 0


def test_drain_ends_streams_at_once() -> None:
    with process_of("detokenizer") as (process, channel, _):
        stub = detokenizer_pb2_grpc.DetokenizerStub(channel)  # type: ignore[no-untyped-call]
        with ended_by_the_peer(stub) as answers:
            assert next(answers)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError) as raised:
                next(answers)
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        assert process.wait(WAIT_S) == 0


@contextlib.contextmanager
def ended_by_the_peer(stub: detokenizer_pb2_grpc.DetokenizerStub) -> Iterator[Iterator[Message]]:
    """Yields the responses of a stream whose client sends one empty batch and does not close the stream."""
    over = False

    def batches() -> Iterator[detokenizer_pb2.DecodeBatch]:
        yield detokenizer_pb2.DecodeBatch()
        while not over:
            time.sleep(0.01)

    try:
        yield stub.Decode(batches(), timeout=WAIT_S)
    finally:
        over = True


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Returns an HTTP/2 frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    """Returns a literal header field without indexing in HPACK (RFC 7541, section 6.2.2)."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
END_STREAM, ACK, END_HEADERS, INITIAL_WINDOW_SIZE = 1, 1, 4, 4
WINDOW = 2**24
HELLO = [
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, WINDOW)),
    frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW)),
]
CALL = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/test.Test/Get"),
    (b":authority", b"test"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
]


def slow_client(port: int) -> int:
    """Reads the response to Get slowly, with a window update per frame as clients do, and returns its size in bytes.

    Raises:
        OSError: the connection was closed before the end of the response.
    """
    received = 0
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        connection.settimeout(WAIT_S)
        connection.connect((HOST, port))
        request = [frame(HEADERS, END_HEADERS, 1, b"".join(header(*each) for each in CALL)), frame(DATA, END_STREAM, 1, bytes(5))]
        connection.sendall(b"".join([*HELLO, *request]))
        frames = connection.makefile("rb")
        while head := frames.read(9):
            kind, flags = head[3], head[4]
            payload = frames.read(int.from_bytes(head[:3], "big"))
            if kind == DATA:
                received += len(payload)
                connection.sendall(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", max(1, len(payload)))))
            elif kind in (PING, SETTINGS) and not flags & ACK:
                connection.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
            elif kind == HEADERS and flags & END_STREAM:
                return received
    raise ConnectionError("closed before the answer's end")


async def started(get: grpc.RpcMethodHandler) -> tuple[grpc_server.GrpcServer, int]:
    """Starts a server with one method and returns it with its port."""
    (port,) = free_ports(1)
    handlers = grpc.method_handlers_generic_handler("test.Test", {"Get": get})
    return await grpc_server.start_server(
        HOST, port, grpc_server.HealthService("test"), lambda s: s.add_generic_rpc_handlers((handlers,))
    ), port


async def nothing() -> None:
    """Replaces the drain of a service."""


def test_server_delivers_complete_responses_during_the_stop() -> None:
    """The client reads slowly and sends window updates. The kernel would reset a connection that the server closes too early."""
    answer, calls = bytes(1_000_000), 4

    async def run() -> list[int]:
        inside, stop = asyncio.Semaphore(0), asyncio.Event()

        async def get(_: bytes, context: object) -> bytes:
            inside.release()
            await stop.wait()
            return answer

        server, port = await started(grpc.unary_unary_rpc_method_handler(get))
        serving = asyncio.create_task(server.serve_until(stop, GRACE_S, nothing))
        clients = [asyncio.create_task(asyncio.to_thread(slow_client, port)) for _ in range(calls)]
        for _ in clients:
            await inside.acquire()
        stop.set()
        await serving
        return await asyncio.gather(*clients)

    assert asyncio.run(run()) == [5 + len(answer)] * calls


@pytest.mark.parametrize("call_ends", [True, False], ids=["call ends", "call does not end"])
def test_drain_refuses_new_calls_while_open_calls_continue(call_ends: bool) -> None:
    """The health service still responds. At the end of the grace period, the server ends calls that are still open."""

    async def run() -> None:
        stop, end = asyncio.Event(), asyncio.Event()

        async def get(_: bytes, context: object) -> AsyncIterator[bytes]:
            yield b"first"
            await end.wait()
            yield b"last"

        async def is_refused(call: grpc.aio.UnaryStreamCall) -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.read()
                call.cancel()
            return await call.code() is grpc.StatusCode.UNAVAILABLE

        server, port = await started(grpc.unary_stream_rpc_method_handler(get))
        serving = asyncio.create_task(server.serve_until(stop, GRACE_S if call_ends else 0.1, nothing))
        async with grpc_server.channel(f"{HOST}:{port}") as channel:
            health, method = health_pb2_grpc.HealthStub(channel), channel.unary_stream("/test.Test/Get")
            call = method(b"")
            assert await call.read() == b"first"
            stop.set()
            while not await is_refused(method(b"")):
                assert not serving.done()
            if call_ends:
                assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
                end.set()
                assert [await call.read(), await call.read()] == [b"last", grpc.aio.EOF]
            else:
                assert await call.code() is not grpc.StatusCode.OK
            await serving

    asyncio.run(run())
