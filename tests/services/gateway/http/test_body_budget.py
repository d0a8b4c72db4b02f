"""Tests of the budget for the bodies of all requests: waiting bodies, refusals, and the memory of the process."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import orjson
import psutil
import pytest

from rootstock_llm.services.shared.limits import MAX_JSON_VALUES
from tests.night import NIGHTLY
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.gateway_process import Process
from tests.services.gateway.system import WAIT_S, System, wait_until

MIB = 1 << 20
NIGHTLY_ONLY = pytest.mark.skipif(not NIGHTLY, reason="takes minutes; runs only with ROOTSTOCK_TEST_NIGHTLY=1")
SETTINGS = {"max_body_bytes": MIB, "body_budget_bytes": MIB}
CHAT = "/v1/chat/completions"
SMALL = {"model": MODEL, "prompt": [72, 105]}  # needs no tokenizer


def chat_of(size: int) -> bytes:
    """Returns a body of the given size in bytes."""
    empty = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": ""}]})
    return empty.replace(b'""', b'"' + b"x" * (size - len(empty)) + b'"')


class Sender:
    """Sends a request's head, and as much of its body as the socket takes without waiting.

    The Content-Length is `size`, or the length of the body if `size` is 0.
    """

    def __init__(self, port: int, body: bytes, size: int = 0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        self._socket.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: test\r\ncontent-length: {size or len(body)}\r\n\r\n".encode())
        self._socket.setblocking(False)
        self.sent = 0
        while self.sent < len(body):
            try:
                self.sent += self._socket.send(body[self.sent : self.sent + 65536])
            except BlockingIOError:
                break
        self._socket.settimeout(WAIT_S)

    def answer(self) -> bytes:
        return self._socket.recv(65536)

    def reset(self) -> None:
        """Resets the connection, as the kernel does for a killed process with unread input."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def close(self) -> None:
        self._socket.close()


def num_waiting(system: System, pool: str = "large") -> float:
    return system.metric("rootstock_gateway_bodies_waiting", pool=pool)


def reserved_bytes(system: System, pool: str = "large") -> float:
    return system.metric("rootstock_gateway_body_bytes", pool=pool)


@contextmanager
def unfinished_chat(system: System) -> Iterator[Sender]:
    """Sends a large chat whose preparation does not end until exit, so that the bytes of its body stay reserved."""
    system.do(system.tokenizer.gate.clear)
    calls = len(system.tokenizer.calls)
    first = Sender(system.port, chat_of(600_000))
    wait_until(lambda: len(system.tokenizer.calls) == calls + 1, "the first chat's call")
    try:
        yield first
    finally:
        system.do(system.tokenizer.gate.set)
        first.answer()
        first.close()
        wait_until(lambda: reserved_bytes(system) == 0, "the release of the bytes")


@pytest.fixture(scope="module")
def small_budget() -> Iterator[System]:
    with System(**SETTINGS, body_wait_s=60.0, tokenize_timeout_s=60.0) as system:
        yield system


def test_body_budget_admits_small_bodies_while_a_large_body_waits(small_budget: System) -> None:
    with unfinished_chat(small_budget):
        assert reserved_bytes(small_budget) == 600_000
        second = Sender(small_budget.port, chat_of(700_000))
        wait_until(lambda: num_waiting(small_budget) == 1, "the waiting second chat")
        assert small_budget.post("/v1/completions", SMALL).status_code == 200
        assert num_waiting(small_budget) == 1
    assert second.answer().startswith(b"HTTP/1.1 400 ")  # the prompt exceeds the context
    second.close()


@pytest.mark.parametrize("end", ["close", "reset"])
def test_body_budget_skips_a_waiting_body_when_the_client_leaves(small_budget: System, end: str) -> None:
    with unfinished_chat(small_budget):
        second = Sender(
            small_budget.port, b" " * 100_000, size=700_000
        )  # larger than the read-ahead buffer, smaller than the socket buffer
        wait_until(lambda: num_waiting(small_budget) == 1, "the second waiting body")
        third = Sender(small_budget.port, chat_of(300_000))
        wait_until(lambda: num_waiting(small_budget) == 2, "two waiting bodies")
        getattr(second, end)()
        wait_until(lambda: num_waiting(small_budget) == 0, "the third chat before the first one's end")
        assert reserved_bytes(small_budget) == 900_000
    third.answer()
    third.close()


def test_body_reserves_bytes_in_steps_when_the_size_of_the_body_is_unknown(small_budget: System) -> None:
    """The body first reserves 64 KiB, and then 1 MiB at a time."""
    small_budget.do(small_budget.tokenizer.gate.clear)
    body, sizes = chat_of(100_000), []
    client = socket.create_connection(("127.0.0.1", small_budget.port), timeout=WAIT_S)
    client.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    for piece, pool in ((body[:10_000], "small"), (body[10_000:], "large")):
        client.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        wait_until(lambda: reserved_bytes(small_budget, pool) > 0, f"the {pool} pool")  # noqa: B023
        sizes.append((reserved_bytes(small_budget, "small"), reserved_bytes(small_budget, "large")))
    small_budget.do(small_budget.tokenizer.gate.set)
    client.sendall(b"0\r\n\r\n")
    assert client.recv(65536).startswith(b"HTTP/1.1 400 ")
    client.close()
    assert sizes == [(65536, 0), (0, MIB)]
    wait_until(lambda: reserved_bytes(small_budget) == 0, "the release of the bytes")


def test_body_budget_reserves_the_size_of_parsed_values(small_budget: System) -> None:
    """Each parsed token id counts as 40 bytes, so that the second body waits for the budget."""
    ids = b"[" + b"1," * 19_999 + b"1]"
    body = b'{"model": "%b", "prompt": [%b]}' % (MODEL.encode(), b",".join([ids] * 2))
    with unfinished_chat(small_budget):
        second = Sender(small_budget.port, body)
        wait_until(lambda: num_waiting(small_budget) == 1, "the second body to wait for the size of its values")
        assert reserved_bytes(small_budget) == 600_000 + len(body)
    second.answer()
    second.close()


def test_body_is_refused_when_it_has_more_than_max_json_values() -> None:
    with System(max_body_bytes=8 * MIB, body_budget_bytes=8 * MIB) as system:
        body = b'{"model": "%b", "prompt": [%b0]}' % (MODEL.encode(), b"0," * (MAX_JSON_VALUES - 4))
        assert system.post("/v1/completions", body).json()["error"]["code"] == "context_length_exceeded"
        refused = system.post("/v1/completions", body.replace(b"0]", b"0,0]"))
        assert refused.status_code == 413 and "values" in refused.json()["error"]["message"]


def test_body_is_refused_when_the_budget_is_full_for_body_wait_s() -> None:
    with System(**SETTINGS, body_wait_s=0.1, tokenize_timeout_s=60.0) as system, unfinished_chat(system):
        answer = system.post(CHAT, chat_of(700_000))
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "body_budget"
        assert system.metric("rootstock_gateway_bodies_refused_total") == 1
        assert num_waiting(system) == 0 and reserved_bytes(system) == 600_000


def memory_of(pid: int) -> tuple[int, int]:
    """Returns the peak since the last reset and the current size of resident memory, in bytes."""
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmHWM"].split()[0]) << 10, int(fields["VmRSS"].split()[0]) << 10


def burst(process: Process, count: int, size: int, timeout_s: float) -> list[int]:
    """Sends the given number of chats of one size at once. Returns their statuses."""
    body, statuses = chat_of(size), []

    def send_one() -> None:
        statuses.append(httpx.post(f"http://127.0.0.1:{process.port}{CHAT}", content=body, timeout=timeout_s).status_code)

    threads = [threading.Thread(target=send_one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


@pytest.mark.parametrize(
    ("count", "size", "budget", "peak_mib", "after_mib", "after_s"),
    [
        pytest.param(8, 6_000_000, 8 * MIB, 48, 16, 5, id="by day"),
        pytest.param(16, 60_000_000, 64 * MIB, 300, 50, 120, id="by night", marks=NIGHTLY_ONLY),
    ],
)
def test_memory_stays_within_the_body_budget_and_is_freed_after_a_burst_of_bodies(
    system: System, count: int, size: int, budget: int, peak_mib: int, after_mib: int, after_s: int
) -> None:
    flags = ("--max-body-bytes", str(budget), "--body-budget-bytes", str(budget), "--body-wait-s", "100")
    process = Process(system, *flags)
    try:
        process.wait_ready()
        assert burst(process, 2, 1000, WAIT_S) == [400, 400]
        with open(f"/proc/{process.pid}/clear_refs", "w") as file:
            file.write("5")
        _, idle = memory_of(process.pid)
        statuses = burst(process, count, size, 120.0)
        # The fake tokenizer accepts messages of up to 4 MB, so each chat is refused after all of the gateway's work.
        assert statuses == [413] * count
        peak, _ = memory_of(process.pid)
        deadline = time.monotonic() + after_s
        while (after := memory_of(process.pid)[1]) > idle + after_mib * MIB and time.monotonic() < deadline:
            time.sleep(0.1)
        print(f"MiB over idle ({idle / MIB:.0f}): peak {(peak - idle) / MIB:.0f}, after {(after - idle) / MIB:.0f}")
        assert peak <= idle + peak_mib * MIB
        assert after <= idle + after_mib * MIB
        assert psutil.Process(process.pid).is_running()
    finally:
        process.kill()
