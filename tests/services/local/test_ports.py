"""Ports for processes that are about to start: two who ask at once are not given the same."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from services.local.ports import BLOCKS, free_ports, is_taken

ASKS = """
import json, sys
from services.local.ports import free_ports
print(json.dumps(free_ports(100)), flush=True)
sys.stdin.read()
"""


def test_no_other_process_is_given_them_while_this_one_lives() -> None:
    others = [subprocess.Popen([sys.executable, "-c", ASKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)]
    given = [free_ports(100), *(json.loads(other.stdout.readline()) for other in others if other.stdout)]
    blocks = [{(port - BLOCKS.start) // BLOCKS.step for port in ports} for ports in given]
    assert len(set.union(*blocks)) == sum(map(len, blocks)) == 4, "a block for each"
    claims = [BLOCKS[block] for each in blocks for block in each]
    assert all(map(is_taken, claims)) and not any(is_taken(port) for ports in given for port in ports)
    for other in others:
        other.communicate()
    assert [is_taken(claim) for claim in claims] == [True, False, False, False]


def test_what_was_given_comes_again_as_late_as_it_can() -> None:
    first, second = free_ports(100), free_ports(100)
    assert not set(first) & set(second)
    assert set(free_ports(BLOCKS.step // 2)) & set(first), "the block is used up, and begins again"
    with pytest.raises(RuntimeError, match="no 256 ports of"):
        free_ports(BLOCKS.step)
