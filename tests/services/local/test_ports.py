"""Processes that ask for ports at the same time get different ports."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

from rootstock_llm.services.local.ports import BLOCKS, free_ports, is_taken

# Takes ports as each argument says, then 300 ports that are not in the first list, and lives until stdin ends.
ASKS = """
import json, sys
from rootstock_llm.services.local.ports import free_ports
given = [free_ports(int(count)) for count in sys.argv[1:]]
print(json.dumps([*given, free_ports(300, besides=given[0])]), flush=True)
sys.stdin.read()
"""


def given_to(*counts: int, stack: contextlib.ExitStack) -> list[list[int]]:
    """Returns the ports of each request by a process that lives as long as the stack."""
    command = [sys.executable, "-c", ASKS, *map(str, counts)]
    asking = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    assert asking.stdin and asking.stdout
    stack.callback(asking.stdin.close)
    answer: list[list[int]] = json.loads(asking.stdout.readline())
    return answer


def blocks_of(asks: list[list[int]]) -> set[int]:
    return {(port - BLOCKS.start) // BLOCKS.step for ports in asks for port in ports}


def test_free_ports_differ_between_processes_and_are_reused_last() -> None:
    with contextlib.ExitStack() as stack:
        others = [given_to(100, 100, 0, 100, stack=stack) for _ in range(3)]
        blocks = [blocks_of(each) for each in [*others, [free_ports(100)]]]
        assert len(set.union(*blocks)) == sum(map(len, blocks)) >= 7, "of its own, two for each that took 300 at once"
        assert not any(is_taken(port) for each in others for ports in each for port in ports), "a claim listens on nothing"
    for first, second, none, third, many in others:
        assert len({*first, *second}) == 200 and none == []
        assert len({*third} & {*first}) >= 44 and not {*third} & {*second}, "the block ends, and begins again"
        assert len({*many}) == 300 and not {*many} & {*first}
