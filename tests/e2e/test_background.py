"""Background responses over two gateways. One gateway is killed, or stopped for longer than its leases last."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.system import System, wait_until
from tests.night import NIGHTLY

RESPONSES, TOKENS = 20, 900 if NIGHTLY else 450
END = "response.incomplete"  # last event of each response, which ends at max_output_tokens
FLAGS = "--background-lease-s 2"
PATIENCE_S = 120.0  # time limit for thousands of tokens on a machine that also runs other tests


def asked(number: int) -> dict[str, Any]:
    """Returns the body of request `number`: sampled with a seed if the number is odd, greedy if it is even."""
    chance = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
    body = {"ignore_eos": True, "seed": number, **chance}
    extra = {name: body[name] for name in ("ignore_eos", "seed")}
    asks = {"model": "demo", "input": f"Count from {number} on.", "max_output_tokens": TOKENS, "temperature": body["temperature"]}
    return {**asks, "extra_body": extra}


by_night = pytest.mark.skipif(not NIGHTLY, reason="takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1")


class Follower:
    """A client that reads a response's stream to its last event.

    After an error or an early end, it resumes the stream at the next gateway.
    """

    def __init__(self, clients: Sequence[OpenAI], response_id: str) -> None:
        self._clients = clients
        self._id = response_id
        self.events: list[Any] = []
        self.resumed = 0
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        return "".join(event.delta for event in self.events if event.type == "response.output_text.delta")

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"the stream of {self._id} did not end within {PATIENCE_S:.0f} s"

    def _follow(self) -> None:
        turn = 0
        while not self.events or self.events[-1].type != END:
            client = self._clients[turn % len(self._clients)]
            behind: Any = {"starting_after": self.events[-1].sequence_number} if self.events else {}
            try:
                for event in client.responses.retrieve(self._id, stream=True, **behind):
                    self.events.append(event)
            except openai.OpenAIError:
                time.sleep(0.1)
            turn, self.resumed = turn + 1, self.resumed + 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "fault", [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped", marks=by_night)]
)
def test_gateway_takes_over_background_responses_when_the_other_gateway_is_lost(tmp_path: Path, fault: signal.Signals) -> None:
    with System(tmp_path, gateways=2, gateway_flags=FLAGS, worker_flags="--deterministic", log_level="info") as system:
        urls = [part.url for part in system.parts.values() if part.url]
        first, second = [OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=180) for url in urls]
        with ThreadPoolExecutor(RESPONSES) as pool:
            whole = list(pool.map(lambda number: second.responses.create(**asked(number)), range(RESPONSES)))
            answers = pool.map(lambda number: first.responses.create(background=True, **asked(number)), range(RESPONSES))
            begun = dict(enumerate(answers))
        assert {each.status for each in begun.values()} == {"queued"}
        followers = {number: Follower((first, second), each.id) for number, each in begun.items()}

        def begun_streams() -> int:
            return sum(bool(follower.text) for follower in followers.values())

        wait_until(lambda: begun_streams() >= RESPONSES / 4, PATIENCE_S, "the first text of a quarter of the streams")
        ended = [each for each in followers.values() if each.events and each.events[-1].type == END]
        assert len(ended) < RESPONSES / 2, "at least half of the streams must still run at the fault"
        system.children["gateway-0"].signal(fault)
        if fault is signal.SIGSTOP:
            time.sleep(4)  # longer than the stopped gateway's leases last
            system.children["gateway-0"].signal(signal.SIGCONT)
        for number, follower in followers.items():
            follower.join()
            assert [each.sequence_number for each in follower.events] == list(range(len(follower.events)))
            last = second.responses.retrieve(begun[number].id)
            assert last.status == "incomplete", last.error
            assert follower.text == last.output_text == whole[number].output_text, f"text of response {number}"
            assert last.usage is not None and last.usage.output_tokens == TOKENS
            assert follower.events[-1].response.output == last.output
        assert system.metric("gateway-1", "rootstock_gateway_background_takeovers_total") >= RESPONSES / 2
        logged = [json.loads(line) for line in system.log("access").splitlines()]
        complete = [line for line in logged if line["source"] == "background" and line["end"] == "complete"]
        assert len(complete) >= RESPONSES and {line["output_tokens"] for line in complete} == {TOKENS}
