"""python -m tests.benchmarks.request_trace [--list] [--json FILE]: counts the functions, types and files that a chat uses.

Starts the system on this machine with the demo model: gateway, tokenizer, worker, detokenizer and Redis. Each Python process
counts its calls and constructions (`tests.benchmarks.call_counts`) in two windows:

1. ten streamed chats, one after another over one connection, and two seconds for the work that follows a chat. The chats have
   different questions, so the worker computes and publishes KV for each;
2. an idle window of the same length.

Three chats before the first window fill caches and finish lazy imports. A function counts if it runs at least ten times with the
chats, and at least ten times as often as in the idle window. The same rule applies to the constructions of a type. A file counts
if one of its functions counts. A file that only declares types therefore does not count.

Functions and types of `services` and `kernels` count. Lambdas, comprehensions and methods are functions. A child process counts
with the service that starts it. Generated protobuf messages have a separate column.

Work that follows a chat after a delay, such as publishing KV blocks and checking invariants, may serve several chats at once. So
two runs may differ by a few functions.

The trace does not see:

- C++ and Triton kernels, and Redis;
- Python functions on a thread that a C++ library starts;
- forked processes, such as the trial compilation of a grammar;
- types without a Python constructor;
- functions that run once per connection.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.benchmarks.call_counts import Window, WindowFile
from tests.benchmarks.request_trace_runner import SOCKET, WINDOW, write_script
from tests.benchmarks.server_process import ROOT, running_server

PROCESSES = ("gateway", "tokenizer", "worker", "detokenizer")
DEMO = ROOT / "models" / "demo"
COMMAND = (
    "{{python}} -m tests.benchmarks.request_trace_runner '{folder}' rootstock_llm.services.local --model '{{model}}'"
    " --port {{port}} --no-demo --state-dir '' --log-dir '{folder}/logs'"
)
WARM_UP_CHATS = 3
CHATS = 10
MIN_RUNS = 10  # smallest number of runs in the chat window, and smallest ratio to the runs in the idle window
MAX_TOKENS = 32
SETTLE_S = 2.0  # seconds after the last chat, for the work that follows a chat
ANSWER_S = 60.0  # seconds; longest wait for a chat, and for the counts of a process


@dataclass(frozen=True, slots=True)
class ProcessTrace:
    """Functions and types that the chats use in one service's process and its children."""

    files: frozenset[str]  # paths from the root of the repository
    functions: frozenset[str]  # path:line qualified name
    kinds: Mapping[str, str]  # kind by the qualified name of a constructed type

    @property
    def types(self) -> frozenset[str]:
        """Qualified names of the constructed types, without protobuf messages."""
        return frozenset(name for name, kind in self.kinds.items() if kind != "message")

    @property
    def messages(self) -> frozenset[str]:
        """Qualified names of the constructed protobuf messages."""
        return frozenset(self.kinds) - self.types


def belongs_to_chat(with_chats: int, idle: int) -> bool:
    """Returns whether a function or a type belongs to the chats.

    Args:
        with_chats: calls of the function, or constructions of the type, in the window with chats.
        idle: the same number in the idle window.
    """
    return with_chats >= MIN_RUNS * max(1, idle)


def traces(found: Iterable[Mapping[str, Any]]) -> dict[str, ProcessTrace]:
    """Returns the trace of each service by its name.

    Args:
        found: counts of all processes, as the runner sends them. A child process counts for the service whose package has its
            module.

    Raises:
        RuntimeError: a service has sent no counts.
    """
    services: dict[str, list[Mapping[str, Any]]] = {name: [] for name in PROCESSES}
    for each in found:
        services.get(each["module"].split(".")[2], []).append(each)
    if missing := [name for name, sent in services.items() if not sent]:
        raise RuntimeError(f"these services sent no counts: {', '.join(missing)}")
    return {name: _trace(sent) for name, sent in services.items()}


def _trace(sent: Iterable[Mapping[str, Any]]) -> ProcessTrace:
    functions = {
        (file, f"{file}:{line} {name}")
        for each in sent
        for file, line, name, *runs in each["functions"]
        if belongs_to_chat(*runs)
    }
    kinds = {name: kind for each in sent for name, kind, *runs in each["types"] if belongs_to_chat(*runs)}
    return ProcessTrace(frozenset(file for file, _ in functions), frozenset(name for _, name in functions), kinds)


def total(by_process: Mapping[str, ProcessTrace]) -> ProcessTrace:
    """Returns the distinct files, functions and types of all processes."""
    found = by_process.values()
    return ProcessTrace(
        frozenset().union(*(each.files for each in found)),
        frozenset().union(*(each.functions for each in found)),
        {name: kind for each in found for name, kind in each.kinds.items()},
    )


def measure() -> list[dict[str, Any]]:
    """Starts the system, runs both windows and returns the counts of each process that lives until the end.

    Raises:
        ServerFailed: the system does not start.
        RuntimeError: a chat fails.
    """
    with tempfile.TemporaryDirectory(prefix="request-trace-") as path, socket.socket(socket.AF_UNIX) as listener:
        folder = Path(path)
        listener.bind(str(folder / SOCKET))
        listener.listen(64)
        window = WindowFile(folder / WINDOW)
        write_script(folder)
        with running_server(COMMAND.format(folder=folder), DEMO, folder / "server.log") as url:
            _run_windows(url, window)
            return collect(listener)


def _run_windows(url: str, window: WindowFile) -> None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_S)
    for index in range(WARM_UP_CHATS):
        _chat(connection, index)
    time.sleep(SETTLE_S)
    window.set(Window.CHATS)
    begun = time.monotonic()
    for index in range(CHATS):
        _chat(connection, WARM_UP_CHATS + index)
    time.sleep(SETTLE_S)
    window.set(Window.IDLE)
    time.sleep(time.monotonic() - begun)
    window.set(Window.END)
    connection.close()


def _chat(connection: http.client.HTTPConnection, index: int) -> None:
    messages = [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": f"{100 + 37 * index} spiders meet {900 - 41 * index} ants. How many legs do they have?"},
    ]
    body = {"model": "demo", "messages": messages, "max_tokens": MAX_TOKENS, "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    if response.status != 200 or not text.endswith("data: [DONE]\n\n"):
        raise RuntimeError(f"a chat failed with status {response.status}: {text[-300:]}")


def collect(listener: socket.socket) -> list[dict[str, Any]]:
    """Returns the counts of all processes that have connected and still live."""
    found: list[dict[str, Any]] = []
    listener.settimeout(0)  # all processes have connected before
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return found
        with connection, connection.makefile("rb") as lines:
            connection.settimeout(ANSWER_S)
            try:
                connection.sendall(b".")
                line = lines.readline()
            except (BrokenPipeError, ConnectionResetError):
                continue  # the process has ended
            if line:
                found.append(json.loads(line))


def summary(by_process: Mapping[str, ProcessTrace]) -> str:
    """Returns a table with a row for each process and one for all together."""
    rows = [f"{'process':12}{'files':>11}{'functions':>11}{'types':>11}{'messages':>11}"]
    for name, trace in (*by_process.items(), ("distinct", total(by_process))):
        sizes = (trace.files, trace.functions, trace.types, trace.messages)
        rows.append(f"{name:12}" + "".join(f"{len(size):>11}" for size in sizes))
    return "\n".join(rows)


def listing(by_process: Mapping[str, ProcessTrace]) -> str:
    """Returns the files and types of each process, one per line."""
    lines = []
    for name, trace in by_process.items():
        lines += [f"\n{name}: files", *(f"  {file}" for file in sorted(trace.files))]
        lines += [f"\n{name}: types", *(f"  {each}  ({trace.kinds[each]})" for each in sorted(trace.types))]
        lines += [f"\n{name}: messages", *(f"  {each}" for each in sorted(trace.messages))]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each file and type")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write files, functions and types of each process")
    args = parser.parse_args()
    by_process = traces(measure())
    print(summary(by_process))
    if args.list:
        print(listing(by_process))
    if args.json:
        found = {
            name: {"files": sorted(trace.files), "functions": sorted(trace.functions), "types": dict(sorted(trace.kinds.items()))}
            for name, trace in by_process.items()
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
