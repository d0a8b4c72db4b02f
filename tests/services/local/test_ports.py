"""Tests that processes that claim ports at the same time get different ports."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

from rootstock_llm.services.local.ports import BLOCKS, free_ports, is_taken

# For each argument, claims that number of ports. Then claims 300 ports outside the first claim. Runs until the end of stdin.
CLAIM_SCRIPT = """
import json, sys
from rootstock_llm.services.local.ports import free_ports
given = [free_ports(int(count)) for count in sys.argv[1:]]
print(json.dumps([*given, free_ports(300, besides=given[0])]), flush=True)
sys.stdin.read()
"""


def claim_in_process(*counts: int, stack: contextlib.ExitStack) -> list[list[int]]:
    """Runs CLAIM_SCRIPT with these arguments until the stack is closed. Returns the ports of each claim."""
    command = [sys.executable, "-c", CLAIM_SCRIPT, *map(str, counts)]
    asking = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    assert asking.stdin and asking.stdout
    stack.callback(asking.stdin.close)
    answer: list[list[int]] = json.loads(asking.stdout.readline())
    return answer


def blocks_of(claims: list[list[int]]) -> set[int]:
    return {(port - BLOCKS.start) // BLOCKS.step for ports in claims for port in ports}


def test_free_ports_differ_between_processes_and_are_reused_last() -> None:
    with contextlib.ExitStack() as stack:
        others = [claim_in_process(100, 100, 0, 100, stack=stack) for _ in range(3)]
        blocks = [blocks_of(each) for each in [*others, [free_ports(100)]]]
        assert len(set.union(*blocks)) == sum(map(len, blocks)) >= 7, (
            "processes share no block of ports; a process with 300 ports has two blocks"
        )
        assert not any(is_taken(port) for each in others for ports in each for port in ports), "a claimed port is not bound"
    for first, second, empty, third, further in others:
        assert len({*first, *second}) == 200 and empty == []
        assert len({*third} & {*first}) >= 44 and not {*third} & {*second}, "blocks are reused from the start"
        assert len({*further}) == 300 and not {*further} & {*first}
