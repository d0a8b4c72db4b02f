"""The command `rootstock status`: shows the state of a gateway and its workers, once or repeatedly."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from rootstock_llm.services.cli.shared.exits import CommandFailed, Exit
from rootstock_llm.services.cli.shared.flags import add_server_flags, target_of
from rootstock_llm.services.cli.shared.server import Server
from rootstock_llm.services.cli.shared.terminal import Terminal
from rootstock_llm.services.cli.status.gateway_state import GatewayState, Observer
from rootstock_llm.services.cli.status.table import lines
from rootstock_llm.services.cli.status.trouble import troubles

REPORT_S = 1.1  # seconds within which every worker reports its load at least once


def add_flags(parser: argparse.ArgumentParser) -> None:
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--watch", action="store_true", help="refresh until Ctrl-C; the default on a terminal")
    modes.add_argument("--once", action="store_true", help="print once and end, after measuring the rates for a second")
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="S", help="seconds between two refreshes (%(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print each refresh as a line of JSON")
    add_server_flags(parser, timeout_s=2.0)


def run(args: argparse.Namespace) -> int:
    """Prints the state once, or until Ctrl-C.

    Raises:
        CommandFailed: The first request failed. Later failures are shown, and the next refresh tries again.
    """
    server, out = Server(target_of(args, os.environ)), Terminal.of(sys.stdout)
    observer = Observer()

    def observe() -> GatewayState:
        return observer.state(server.get("/server_info"), time.monotonic())

    state = observe()
    if args.once or not (args.watch or out.is_tty):
        time.sleep(REPORT_S)
        _print(observe(), server, out, args.json)
        return Exit.DONE
    while True:
        _draw(state, server, out, args.json)
        state = _next_state(observe, args.interval, out, args.json)


def _next_state(observe: Callable[[], GatewayState], interval_s: float, out: Terminal, is_json: bool) -> GatewayState:
    while True:
        time.sleep(interval_s)
        try:
            return observe()
        except CommandFailed as error:
            record: dict[str, Any] = {"at": _now(), "error": str(error)}
            text = json.dumps(record) if is_json else f"{_now()}  {error}"
            if out.is_tty and not is_json:
                out.redraw([out.painted(text, "red")])
            else:
                out.write(f"{text}\n")


def _draw(state: GatewayState, server: Server, out: Terminal, is_json: bool) -> None:
    """Replaces the screen if the output is a terminal, otherwise appends to the output."""
    if out.is_tty and not is_json:
        out.redraw(lines(state, server.target.url, out))
        return
    _print(state, server, out, is_json)
    if not is_json:
        out.line()


def _print(state: GatewayState, server: Server, out: Terminal, is_json: bool) -> None:
    if is_json:
        out.line(json.dumps({"at": _now(), "url": server.target.url, **state.as_json(), "troubles": troubles(state)}))
        return
    for line in lines(state, server.target.url, out):
        out.line(line)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _interval(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("must be 0.1 to 3600 seconds")
    return value
