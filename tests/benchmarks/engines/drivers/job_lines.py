"""The driver's side of the lines of JSON that running_engine.py describes.

Only lines of replies go to the benchmark's pipe. All other output of the process, also that of C++ code, goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Engine(Protocol):
    """An engine inside the driver's process."""

    def generate(self, prompts: Sequence[list[int]], output_len: int, in_flight: int) -> list[int]:
        """Computes greedy completions of output_len tokens, with at most in_flight prompts at once.

        Returns:
            The number of tokens that each prompt got.
        """


class Stepped(Protocol):
    """An engine that computes the tokens of all its requests in steps."""

    def add(self, request: int, prompt: list[int], output_len: int) -> None: ...

    def step(self) -> dict[int, int]:
        """Computes one step. Returns the number of tokens of each request that ended."""


def closed_loop(engine: Stepped, prompts: Sequence[list[int]], output_len: int, in_flight: int) -> list[int]:
    """Keeps in_flight prompts in flight until all have ended. Returns the number of tokens that each prompt got."""
    lengths: dict[int, int] = {}
    num_added = 0
    while len(lengths) < len(prompts):
        while num_added < len(prompts) and num_added - len(lengths) < in_flight:
            engine.add(num_added, prompts[num_added], output_len)
            num_added += 1
        lengths |= engine.step()
    return [lengths[request] for request in range(len(prompts))]


def serve(start: Callable[[dict[str, Any]], Engine]) -> None:
    """Starts the engine with the first line of stdin, and runs a job for each further line until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = start(json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        job = json.loads(line)
        begun = time.perf_counter()
        lengths = engine.generate(**job)
        print(json.dumps({"seconds": time.perf_counter() - begun, "lengths": lengths}), file=replies)
