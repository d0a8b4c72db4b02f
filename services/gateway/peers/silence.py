"""When a peer that owes a sign of life is taken for gone, whatever its connection looks like: stopped, cut off, or hanging."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

LOOKS = 5  # that find nothing new, within the time that a peer may be silent: a pause of this process is one, however long
KNOCKS = 3  # connections that are tried, none waiting for the one before: each begins with a packet that may be lost

Signs = Callable[[], int | None]  # their number so far; None while none is due


@dataclass(frozen=True, slots=True)
class Patience:
    """In seconds. silence: without a sign of life from the peer's process. unreachable: without one, while its machine takes no
    connection either; 0: that is not tried. A kernel answers for a process that is starved, so that this may be short."""

    silence: float
    unreachable: float


async def until_lost(address: str, patience: Patience, signs: Signs, urgent: Signs | None = None) -> str:
    """Why the peer is lost, as soon as it is. urgent: signs that are due only while somebody waits for them, for connections are
    tried for no others; those of `signs` unless given."""
    silent = asyncio.create_task(until_silent(patience.silence, signs))
    tasks = {silent, asyncio.create_task(until_unreachable(address, patience.unreachable, urgent or signs))}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()  # a fault of ours is no loss of the peer
    if silent in done:
        return f"silent for {patience.silence:g} s"
    return f"silent for {patience.unreachable:g} s, and takes no connection"


async def until_silent(silence_s: float, signs: Signs) -> None:
    """Returns when no sign of life has come for so long while one was due."""
    before, silent = signs(), 0
    while silent < LOOKS:
        await asyncio.sleep(silence_s / LOOKS)
        now = signs()
        silent = silent + 1 if now is not None and now == before else 0
        before = now


async def until_unreachable(address: str, within_s: float, signs: Signs) -> None:
    """Returns when no sign of life has come for so long while one was due, and no connection came about in the last two thirds of
    that time: the machine's power is gone, or the way to it. Never, where within_s is 0."""
    while not within_s:
        await asyncio.sleep(3600)
    while True:
        before = signs()
        await asyncio.sleep(within_s / 3)
        if before is None or signs() != before:
            continue
        if not await _is_there(address, 2 * within_s / 3) and signs() == before:
            return


async def _is_there(address: str, within_s: float) -> bool:
    """Whether it takes a connection, or refuses one. True as well where this process itself stood still meanwhile."""
    clock = asyncio.get_running_loop().time
    begun = clock()
    knocks = {asyncio.create_task(_knock(address, at * within_s / KNOCKS)) for at in range(KNOCKS)}
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                for ended in asyncio.as_completed(knocks):
                    if await ended:
                        return True
                await asyncio.sleep(begun + within_s - clock())  # no way there at the moment
    finally:
        for knock in knocks:
            knock.cancel()
    return clock() - begun > 1.1 * within_s


async def _knock(address: str, after_s: float) -> bool:
    await asyncio.sleep(after_s)
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionError:
        return True  # somebody said no
    except OSError:
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True
