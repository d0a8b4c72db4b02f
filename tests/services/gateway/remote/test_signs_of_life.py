"""Tests of the detection of lost services with real sockets.

A socket with a full backlog answers no packet, like a machine without power.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from rootstock_llm.services.gateway.remote.connection import Patience, until_lost, until_unreachable

WITHIN_S = 0.3  # seconds without a message after which a connection is tried


@contextlib.contextmanager
def machine(answers: bool) -> Iterator[str]:
    """Yields the address of a port on which no process calls accept(), as if the process had stopped.

    Args:
        answers: True: the kernel completes TCP handshakes. False: the backlog is full, so that a client gets no response.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(64 if answers else 0)
        for _ in range(0 if answers else 8):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield "{}:{}".format(*listener.getsockname())


async def ends(work: Coroutine[Any, Any, Any], within_s: float) -> Any:
    """Returns the result of a coroutine (True for a false result), or None if the coroutine does not end within `within_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            return await work or True
    return None


def test_unreachable_machine_is_reported_before_the_silence_limit() -> None:
    with machine(answers=False) as address:
        why = asyncio.run(ends(until_lost(address, Patience(60.0, WITHIN_S), lambda: 0), 20))
    assert why == "silent for 0.3 s, and accepts no connection"


def test_machine_with_a_stopped_process_is_not_reported_as_unreachable() -> None:
    with machine(answers=True) as address:
        assert asyncio.run(ends(until_unreachable(address, WITHIN_S, lambda: 0), 6 * WITHIN_S)) is None


def test_machine_that_refuses_connections_is_not_reported_as_unreachable() -> None:
    with machine(answers=True) as address:
        pass
    assert asyncio.run(ends(until_unreachable(address, WITHIN_S, lambda: 0), 4 * WITHIN_S)) is None


@pytest.mark.parametrize("due", [True, False])
def test_probe_opens_no_connection_while_messages_arrive_or_no_message_is_due(due: bool) -> None:
    async def test() -> None:
        connections = 0

        async def count_connection(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            writer.close()

        server = await asyncio.start_server(count_connection, "127.0.0.1", 0)
        address = "{}:{}".format(*server.sockets[0].getsockname())
        signs = iter(range(10**6))
        await ends(until_unreachable(address, WITHIN_S, lambda: next(signs) if due else None), 4 * WITHIN_S)
        server.close()
        assert connections == 0

    asyncio.run(test())


def test_unreachable_machine_is_reported_only_after_the_silence_limit_when_probes_are_disabled() -> None:
    with machine(answers=False) as address:
        assert asyncio.run(ends(until_unreachable(address, 0.0, lambda: 0), 4 * WITHIN_S)) is None
        why = asyncio.run(ends(until_lost(address, Patience(WITHIN_S, 0.0), lambda: 0), 20))
    assert why == "silent for 0.3 s"


def test_machine_that_sends_a_message_during_the_probes_is_not_reported_as_unreachable() -> None:
    async def test(address: str) -> Any:
        signs = [0]
        asyncio.get_running_loop().call_later(WITHIN_S / 2, signs.append, 1)
        return await ends(until_unreachable(address, WITHIN_S, lambda: len(signs) if len(signs) < 3 else None), 1.2 * WITHIN_S)

    with machine(answers=False) as address:
        assert asyncio.run(test(address)) is None
