"""Sends random requests and returns the faults of the responses."""

from __future__ import annotations

import re
import socket
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import httpx

from tests.e2e.fuzz_cases import Sent
from tests.services.gateway.documented import Answered, Documented

DEADLINE_S = 20.0  # deadline of a request, set by the gateway's flags
ANSWER_S = DEADLINE_S + 10.0  # seconds until a response must arrive; opening a session may wait 10 s longer for its worker
AT_ONCE = 4
STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_FAILED = re.compile(rb'data: \{("error":|"type":"(response.failed|error)")')
OF_HEADS = {100, 200, 204, 400, 401, 404, 405, 408, 413, 431, 503}


class Fuzzer:
    """Sends requests to one gateway from AT_ONCE threads.

    `answered` counts responses by status. Its entry "stream" counts streams that ended with an error, and its entry "left" counts
    clients that disconnected.
    """

    def __init__(self, url: str, key: str = "") -> None:
        """Opens the HTTP clients.

        Args:
            key: API key of the clients; "" for no key.
        """
        shown = {"authorization": f"Bearer {key}"} if key else {}
        self._clients: SimpleQueue[httpx.Client] = SimpleQueue()  # idle clients; a thread takes one for each request
        for _ in range(AT_ONCE):
            self._clients.put(httpx.Client(base_url=url, headers=shown, timeout=ANSWER_S, verify=False))
        self._port = httpx.URL(url).port
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self.document = httpx.get(f"{url}/openapi.json").json()
        self._documented = Documented(self.document)
        self.answered: Counter[str] = Counter()

    def close(self) -> None:
        self._pool.shutdown()
        while not self._clients.empty():
            self._clients.get().close()

    def faults(self, requests: Sequence[Sent]) -> list[str]:
        """Sends all requests at once and returns the faults of all responses."""
        return [fault for faults in self._pool.map(self._faults, requests) for fault in faults]

    def _faults(self, sent: Sent) -> list[str]:
        if not sent.stays:
            self._leave(sent)
            return []
        begun = time.monotonic()
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in sent.headers]
        client = self._clients.get()
        try:
            answer = client.request(sent.method, sent.target, headers=headers, content=sent.body)
        except httpx.HTTPError as error:
            return [f"{sent.method} {sent.target}: no answer: {error!r}"]
        finally:
            self._clients.put(client)
        self.answered[str(answer.status_code)] += 1
        faults = self._documented.faults(Answered.of(answer))
        late = time.monotonic() - begun >= DEADLINE_S / 2
        if answer.status_code in (500, 502) or (answer.status_code == 504 and not late):
            faults.append(f"{answer.status_code}: {answer.text[:300]}")
        if answer.headers.get("content-type", "").startswith("text/event-stream") and _FAILED.search(answer.content):
            self.answered["stream"] += 1
            faults += [answer.text[-300:]] if b"Internal server error" in answer.content else []
        return faults

    def _leave(self, sent: Sent) -> None:
        """Sends the whole request and disconnects without reading the response."""
        body = sent.body or b""
        head = f"{sent.method} {sent.target} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self._port), timeout=ANSWER_S) as connection:
            connection.sendall(head.encode() + body)
        self.answered["left"] += 1

    def raw_faults(self, data: bytes) -> list[str]:
        """Sends raw bytes and returns the faults: an unclosed connection, a reply that is not HTTP, or an unexpected status."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=ANSWER_S) as connection:
            received = b""
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while more := connection.recv(1 << 16):
                    received += more
            except (ConnectionResetError, BrokenPipeError):
                pass
            except TimeoutError:
                return [f"the gateway did not close the connection within {ANSWER_S:.0f} s"]
        statuses = [int(status) for status in STATUS_LINE.findall(received)]
        self.answered.update(map(str, statuses))
        faults = [f"{status}: {received[:300]!r}" for status in statuses if status not in OF_HEADS]
        return faults + ([f"no HTTP: {received[:200]!r}"] if received and not STATUS_LINE.match(received) else [])
