"""Attacks of hostile clients on a gateway. Each attack is a function that ends by itself and returns the responses by kind.

python -m tests.benchmarks.front_attacks ATTACK PORT KEY runs an attack and prints the counts as JSON. The attack runs in its
own process with the lowest priority, because an attack in the measuring process would delay the measurement.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rootstock_llm.services.local.ports import HOST
from tests.e2e.fuzz_cases import Cases, Sent
from tests.e2e.fuzz_client import Fuzzer
from tests.e2e.fuzz_rounds import rounds

MODEL = "demo"
MIB = 1 << 20
ANSWER_S = 150.0
CONNECTIONS = 1000
FUZZ_EXAMPLES, FUZZ_HEADS = 20, 100
CLOSED_WITHIN_S = 30.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

Responses = Counter[str]


def in_threads(jobs: Sequence[Callable[[], str]]) -> Responses:
    """Runs all jobs at once and counts their results."""
    answers: Responses = Counter()
    lock = threading.Lock()

    def run(job: Callable[[], str]) -> None:
        try:
            result = job()
        except (OSError, http.client.HTTPException) as error:
            result = type(error).__name__
        with lock:
            answers[result] += 1

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def post(port: int, key: str, path: str, body: bytes) -> str:
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_S)
    try:
        connection.request("POST", path, body, {"content-type": "application/json", "authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)
    finally:
        connection.close()


def chat_of(text: str) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}).encode()


def headers(port: int, key: str) -> Responses:
    """Sends two header blocks of 50 MiB, and two of 200 MiB without an end."""

    def send(mib: int, ends: bool) -> str:
        with socket.create_connection((HOST, port), timeout=ANSWER_S) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-filler: ")
            try:
                for _ in range(mib):
                    client.sendall(b"a" * MIB)
                client.sendall(b"\r\n\r\n" if ends else b"a")
            except OSError:
                pass  # the server has responded and closed; the response may still be readable
            return client.recv(4096).split(b" ")[1].decode()

    return in_threads([lambda mib=mib, ends=ends: send(mib, ends) for mib, ends in ((50, True), (200, False)) * 2])  # type: ignore[misc]


def bodies(port: int, key: str) -> Responses:
    """Sends sixteen chats of 60 MB."""
    body = chat_of("x" * 60_000_000)
    return in_threads([lambda: post(port, key, CHAT, body)] * 16)


def prompts(port: int, key: str) -> Responses:
    """Sends six chats of 15 MB of words, far beyond any context."""
    body = chat_of("the river runs over stones " * 555_555)
    return in_threads([lambda: post(port, key, CHAT, body)] * 6)


def values(port: int, key: str) -> Responses:
    """Sends four bodies of 20 million empty objects each, and four of two million token ids each."""
    empty = b'{"model": "demo", "prompt": [' + b"{}," * 20_000_000 + b"{}]}"
    ids = b'{"model": "demo", "prompt": [' + b"1000," * 2_000_000 + b"1000]}"
    return in_threads([lambda body=body: post(port, key, COMPLETIONS, body) for body in (empty, ids) * 4])  # type: ignore[misc]


def connections(port: int, key: str) -> Responses:
    """Opens a thousand connections that never send a whole request."""
    begun = time.monotonic()
    clients = [socket.create_connection((HOST, port), timeout=ANSWER_S) for _ in range(CONNECTIONS)]
    for index, client in enumerate(clients):
        if index % 2:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
    answers: Responses = Counter()
    for client in clients:
        client.settimeout(max(0.1, begun + CLOSED_WITHIN_S - time.monotonic()))
        try:
            client.recv(4096)
            answers[f"closed within {CLOSED_WITHIN_S:.0f} s"] += 1
        except TimeoutError:
            answers["left open"] += 1
        except ConnectionError:
            answers["reset"] += 1
        client.close()
    return answers


def schemas(port: int, key: str) -> Responses:
    """Sends twelve new schemas at once."""
    nonce = random.randrange(1 << 40)
    small = {"type": "integer"}

    def ask(schema: dict[str, Any]) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        messages = [{"role": "user", "content": "Go on."}]
        return post(
            port, key, CHAT, json.dumps({"model": MODEL, "messages": messages, "max_tokens": 8, "response_format": form}).encode()
        )

    def objects(number: int, count: int, required: bool) -> dict[str, Any]:
        names = [f"p{nonce}_{number}_{index}" for index in range(count)]
        return {"type": "object", "properties": dict.fromkeys(names, small), "required": names if required else []}

    wanted = [
        objects(number, count, required)
        for number, (count, required) in enumerate([(500, False), (1000, False), (2000, True)] * 3)
    ]
    wanted += [{"enum": [f"v{nonce}-{number}-{index * 7919 % 10_007}" for index in range(10_000)]} for number in range(3)]
    return in_threads([lambda schema=schema: ask(schema) for schema in wanted])  # type: ignore[misc]


def batch(port: int, key: str) -> Responses:
    """Sends one request with 64 prompts of 4,000 tokens."""
    rng = random.Random()
    ids = [[rng.randrange(10, 1200) for _ in range(4000)] for _ in range(64)]
    body = json.dumps({"model": MODEL, "prompt": ids, "max_tokens": 1, "temperature": 0}).encode()
    return in_threads([lambda: post(port, key, COMPLETIONS, body)])


def fuzzing(port: int, key: str) -> Responses:
    """Sends random requests that follow or break the OpenAPI document, and random bytes that are not HTTP."""
    fuzzer = Fuzzer(f"http://{HOST}:{port}", key)

    def send(requests: Sequence[Sent]) -> list[str]:
        fuzzer.answered.update(f"fault: {fault}" for fault in fuzzer.faults(requests))
        return []

    def connect(data: bytes) -> list[str]:
        fuzzer.answered.update(f"fault: {fault}" for fault in fuzzer.raw_faults(data))
        return []

    rounds(send, connect, Cases(fuzzer.document), random.randrange(1 << 32), FUZZ_EXAMPLES, FUZZ_HEADS)
    fuzzer.close()
    return +fuzzer.answered


ATTACKS: dict[str, Callable[[int, str], Responses]] = {
    attack.__name__: attack for attack in (headers, bodies, prompts, values, connections, schemas, batch, fuzzing)
}


def main(argv: Sequence[str]) -> int:
    attack, port, key = argv
    os.nice(19)
    print(json.dumps(ATTACKS[attack](int(port), key)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
