"""python -m tests.benchmarks.gateway_crowd: memory of a gateway with many idle connections, many streams and a very slow reader.

Connections stay idle after their first response while streams run. One more client reads one byte per second of a response that
is larger than the socket buffers. Finally, each idle connection sends a second request. Prints the gateway's resident memory and
the number of lost connections and streams.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
import time
import urllib.request
from dataclasses import dataclass, field

import orjson
import psutil
import uvloop

from rootstock_llm.services.local.ports import HOST
from tests.benchmarks.gateway_cpu import QUESTION, ROOT, Gateways
from tests.benchmarks.gateway_load_client import END_OF_HEAD, http_request
from tests.benchmarks.gateway_load_worker import MODEL

MIB = 1 << 20
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
SAMPLE_S = 0.2
OPENING = 50  # largest number of connections that are being opened at the same time
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Seen:
    """Results of a run."""

    rss: dict[str, int] = field(default_factory=dict)  # resident bytes of the gateway, by phase
    pauses_s: list[float] = field(default_factory=list)  # longest pause of each stream, including the wait for the first byte
    lost_streams: int = 0  # streams without a complete response
    lost_connections: int = 0  # idle connections that could not be opened or got no second response
    slow_reader_s: float = 0.0  # from the slow reader's request until the gateway has no request in flight


def asked(n: int = 1) -> bytes:
    messages = [{"role": "user", "content": QUESTION}]
    return http_request("/v1/chat/completions", orjson.dumps({"model": MODEL, "messages": messages, "n": n, "stream": True}))


async def answered(connection: Connection) -> bool:
    """Returns whether a request on this connection gets a whole response."""
    reader, writer = connection
    try:
        writer.write(MODELS)
        head = (await reader.readuntil(END_OF_HEAD)).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
    except (OSError, asyncio.IncompleteReadError):
        return False
    return head.startswith(b"http/1.1 200")


async def opened(port: int, opening: asyncio.Semaphore) -> Connection | None:
    async with opening:
        connection = await asyncio.open_connection(HOST, port)
        return connection if await answered(connection) else None


async def streamed(port: int, seen: Seen) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    longest, end = 0.0, b""
    writer.write(asked())
    while not end.endswith(b"0\r\n\r\n"):
        begun = time.monotonic()
        piece = await reader.read(1 << 16)
        longest = max(longest, time.monotonic() - begun)
        if not piece:
            seen.lost_streams += 1
            return
        end = (end + piece)[-40:]
    seen.lost_streams += b"[DONE]" not in end
    seen.pauses_s.append(longest)
    writer.close()


async def read_slowly(port: int) -> None:
    """Reads one byte of a response per second until cancelled. At this rate, the kernel's full socket buffers last for hours."""
    loop, client = asyncio.get_running_loop(), socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((HOST, port))
    client.setblocking(False)
    with contextlib.closing(client), contextlib.suppress(ConnectionError):
        await loop.sock_sendall(client, asked(n=128))
        while await loop.sock_recv(client, 1):
            await asyncio.sleep(1.0)


def in_flight(port: int) -> float:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics") as response:
        lines = response.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("rootstock_gateway_requests_in_flight "))


async def peak(process: psutil.Process, name: str, seen: Seen) -> None:
    while True:
        seen.rss[name] = max(seen.rss.get(name, 0), process.memory_info().rss)
        await asyncio.sleep(SAMPLE_S)


async def crowd(process: psutil.Process, port: int, idle: int, streams: int) -> Seen:
    seen = Seen()
    seen.rss["at its start"] = process.memory_info().rss
    opening = asyncio.Semaphore(OPENING)
    found = await asyncio.gather(*(opened(port, opening) for _ in range(idle)))
    kept = [connection for connection in found if connection is not None]
    seen.rss["with idle connections"] = process.memory_info().rss
    sampling = asyncio.create_task(peak(process, "with streams beside them", seen))
    begun, slow = time.monotonic(), asyncio.create_task(read_slowly(port))
    await asyncio.gather(*(streamed(port, seen) for _ in range(streams)))
    while await asyncio.to_thread(in_flight, port):
        await asyncio.sleep(SAMPLE_S)
    seen.slow_reader_s = time.monotonic() - begun
    sampling.cancel()
    slow.cancel()
    again = await asyncio.gather(*map(answered, kept))
    seen.lost_connections = idle - sum(again)
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=2000, help="number of idle connections")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200, help="output tokens per stream")
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds between two tokens of a stream")
    parser.add_argument("--deadline-s", type=float, default=45.0, help="seconds after which the gateway ends a request")
    args = parser.parse_args()
    more = ("--request-timeout-s", str(args.deadline_s))
    with Gateways({"this": ROOT}, args.tokens, step_s=args.step_s, more=more) as gateways:
        seen = uvloop.run(crowd(gateways.process("this"), gateways.ports["this"], args.idle, args.streams))
    for name, rss in seen.rss.items():
        print(f"gateway's memory {name}: {rss / MIB:.0f} MiB")
    pauses = sorted(seen.pauses_s) or [0.0]
    print(f"{args.streams} streams of {args.tokens} tokens, {seen.lost_streams} lost; longest pause of each stream: median "
          f"{pauses[len(pauses) // 2]:.2f} s, most {pauses[-1]:.2f} s")  # fmt: skip
    print(f"{args.idle} idle connections, {seen.lost_connections} lost")
    print(f"a reader of one byte per second ended after {seen.slow_reader_s:.1f} s; its deadline was {args.deadline_s:g} s")
    return int(bool(seen.lost_streams or seen.lost_connections))


if __name__ == "__main__":
    sys.exit(main())
