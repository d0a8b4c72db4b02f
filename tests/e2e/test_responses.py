"""Chains of stored responses over two gateways, while processes are killed one at a time.

No stored response is lost, and each gateway can continue a chain that the other gateway began.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from tests.e2e.system import START_S, System, wait_until
from tests.night import NIGHTLY

CHAINS, TURNS = (8, 25) if NIGHTLY else (4, 5)
VICTIMS = ("gateway-1", "state", "tokenizer", "worker-0")
PATIENCE_S = 120.0


@dataclass
class Chain:
    """A chain of responses, each of which continues the previous one, and the results of its requests."""

    stored: list[str] = field(default_factory=list)  # ids of stored responses, in order
    unstored: int = 0  # number of responses that were not stored
    lost: list[str] = field(default_factory=list)  # ids of stored responses that were not found later
    tries: int = 0  # number of all requests


def clients(system: System) -> list[OpenAI]:
    urls = [part.url for part in system.parts.values() if part.url]
    return [OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) for url in urls]


def continue_chain(both: list[OpenAI], number: int, chain: Chain) -> None:
    """Sends requests, alternately to both gateways, until all turns of the chain are stored."""
    while len(chain.stored) < TURNS:
        chain.tries += 1
        client, streams = both[(number + chain.tries) % 2], chain.tries % 3 == 0
        previous = {"previous_response_id": chain.stored[-1]} if chain.stored else {}
        try:
            asked = {"model": "demo", "input": f"Turn {len(chain.stored)} of {number}.", "max_output_tokens": 8, **previous}
            if streams:
                with client.responses.stream(**asked) as stream:
                    answer = stream.until_done().get_final_response()
            else:
                answer = client.responses.create(**asked)
        except openai.NotFoundError:
            chain.lost.append(chain.stored.pop())
        except (openai.APIError, openai.OpenAIError, RuntimeError):
            time.sleep(0.3)
        else:
            if answer.store:
                chain.stored.append(answer.id)
            else:
                chain.unstored += 1


@pytest.mark.timeout(900)
def test_stored_responses_are_not_lost_when_processes_are_killed(tmp_path: Path) -> None:
    with System(tmp_path, gateways=2, log_level="warning") as system, ThreadPoolExecutor(CHAINS) as pool:
        both, chains = clients(system), [Chain() for _ in range(CHAINS)]
        running = [pool.submit(continue_chain, both, number, chain) for number, chain in enumerate(chains)]
        for step, victim in enumerate(VICTIMS, 1):
            goal = step * TURNS // (len(VICTIMS) + 1)
            wait_until(lambda: min(len(chain.stored) for chain in chains) >= goal, PATIENCE_S, f"{goal} responses")  # noqa: B023
            system.kill(victim)
            time.sleep(0.3)
            system.start(victim)
        for each in running:
            each.result(timeout=START_S + PATIENCE_S)
        print([(chain.tries, chain.unstored, len(chain.lost)) for chain in chains])
        assert not [lost for chain in chains for lost in chain.lost]
        system.wait_ready()
        for client in both:
            for chain in chains:
                found = [client.responses.retrieve(kept) for kept in chain.stored]
                assert [response.previous_response_id for response in found] == [None, *chain.stored[:-1]]
        last = [client.responses.input_items.list(chain.stored[-1]).data for client in both for chain in chains]
        assert all(len(items) == 1 for items in last)
