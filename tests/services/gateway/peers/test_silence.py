"""When a peer is lost, by real sockets. One whose backlog is full answers no packet, as a machine without power."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from services.gateway.peers.silence import Patience, until_lost, until_unreachable

WITHIN_S = 0.3


@contextlib.contextmanager
def machine(answers: bool) -> Iterator[str]:
    """Its address. Nobody accepts what it takes: its process stands still."""
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
    """Its result; None if it has not ended by then."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            return await work or True
    return None


def test_one_without_a_machine_is_lost_long_before_silence_is() -> None:
    with machine(answers=False) as address:
        why = asyncio.run(ends(until_lost(address, Patience(60.0, WITHIN_S), lambda: 0), 20))
    assert why == "silent for 0.3 s, and takes no connection"


def test_a_process_that_stands_still_is_not_unreachable() -> None:
    with machine(answers=True) as address:
        assert asyncio.run(ends(until_unreachable(address, WITHIN_S, lambda: 0), 6 * WITHIN_S)) is None


def test_a_port_that_nobody_has_is_a_machine_that_answers() -> None:
    with machine(answers=True) as address:
        pass
    assert asyncio.run(ends(until_unreachable(address, WITHIN_S, lambda: 0), 4 * WITHIN_S)) is None


@pytest.mark.parametrize("due", [True, False])
def test_while_there_are_signs_or_none_is_due_nothing_is_tried(due: bool) -> None:
    async def test() -> None:
        tries = 0

        async def took(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal tries
            tries += 1
            writer.close()

        server = await asyncio.start_server(took, "127.0.0.1", 0)
        address = "{}:{}".format(*server.sockets[0].getsockname())
        signs = iter(range(10**6))
        await ends(until_unreachable(address, WITHIN_S, lambda: next(signs) if due else None), 4 * WITHIN_S)
        server.close()
        assert tries == 0

    asyncio.run(test())


def test_it_is_not_tried_where_it_is_switched_off() -> None:
    with machine(answers=False) as address:
        assert asyncio.run(ends(until_unreachable(address, 0.0, lambda: 0), 4 * WITHIN_S)) is None
        why = asyncio.run(ends(until_lost(address, Patience(WITHIN_S, 0.0), lambda: 0), 20))
    assert why == "silent for 0.3 s"


def test_an_answer_that_comes_meanwhile_counts() -> None:
    async def test(address: str) -> Any:
        signs = [0]
        asyncio.get_running_loop().call_later(WITHIN_S / 2, signs.append, 1)
        return await ends(until_unreachable(address, WITHIN_S, lambda: len(signs) if len(signs) < 3 else None), 1.2 * WITHIN_S)

    with machine(answers=False) as address:
        assert asyncio.run(test(address)) is None
