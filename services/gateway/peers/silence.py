"""Detects lost remote services by missing signs of life: a stopped or hanging process, or a machine that is cut off.

A sign of life is a message. The state of the connection does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

# Number of looks for a new sign of life within the limit of silence. The service is lost if all of them fail. A suspension of
# this process, however long, fails only one look.
LOOKS = 5
KNOCKS = 3  # overlapping attempts to connect; the first packet of one attempt may be lost

Signs = Callable[[], int | None]  # returns the number of signs of life so far; None while no sign is due


@dataclass(frozen=True, slots=True)
class Patience:
    """Times in seconds without a due sign of life after which a remote service is lost."""

    silence: float  # for any cause
    # If its machine takes no connection either; 0: no connection is tried. The limit may be short, because a kernel accepts
    # connections even for a process without CPU time.
    unreachable: float


async def until_lost(address: str, patience: Patience, signs: Signs, urgent: Signs | None = None) -> str:
    """Waits until a remote service is lost, and returns the reason.

    Args:
        signs: Signs of life for Patience.silence.
        urgent: Signs of life for Patience.unreachable, which are due only while a request waits for the service, so that no
            connections are tried otherwise. Default: `signs`.
    """
    silent = asyncio.create_task(until_silent(patience.silence, signs))
    tasks = {silent, asyncio.create_task(until_unreachable(address, patience.unreachable, urgent or signs))}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()  # raises a fault of this code, which is no loss of the service
    if silent in done:
        return f"silent for {patience.silence:g} s"
    return f"silent for {patience.unreachable:g} s, and takes no connection"


async def until_silent(silence_s: float, signs: Signs) -> None:
    """Returns when no sign of life has arrived for `silence_s` seconds while one was due."""
    before, silent = signs(), 0
    while silent < LOOKS:
        await asyncio.sleep(silence_s / LOOKS)
        now = signs()
        silent = silent + 1 if now is not None and now == before else 0
        before = now


async def until_unreachable(address: str, within_s: float, signs: Signs) -> None:
    """Returns when a machine is unreachable, because it has no power or its network is down.

    It is unreachable if no sign of life has arrived for `within_s` seconds while one was due, and no connection could be opened
    in the last two thirds of that time. If within_s is 0, the function never returns.
    """
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
    """Returns whether the machine accepts or refuses a connection. Also True if this process was suspended during the test."""
    clock = asyncio.get_running_loop().time
    begun = clock()
    knocks = {asyncio.create_task(_knock(address, at * within_s / KNOCKS)) for at in range(KNOCKS)}
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                for ended in asyncio.as_completed(knocks):
                    if await ended:
                        return True
                await asyncio.sleep(begun + within_s - clock())  # all attempts have failed early, for example without a route
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
        return True  # a refusal shows that the machine is reachable
    except OSError:
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True
