"""Tests of hedging: a second copy of a request whose first output is late."""

from __future__ import annotations

import json
import time

import pytest

from rootstock_llm.services.gateway.generation.abort import AbortScope
from tests.all_pairs import each_value
from tests.services.gateway.dispatch.test_dispatch_lost import stopped
from tests.services.gateway.dispatch.test_faults import ANSWER, Pending, content_of
from tests.services.gateway.fakes import Host, ids_of
from tests.services.gateway.system import RawClient, System, wait_until

AFTER_S = 0.1  # seconds until a hedge copy
LATE_S = 1.5  # seconds after which a faulty gateway would have made a copy


def hedged(system: System) -> tuple[Host, Host]:
    """Returns the worker with the request and the worker with the copy."""
    wait_until(lambda: sum(system.submits()) == 1, "the submit")
    first = next(host for host in system.workers if host.servicer.submits)
    wait_until(lambda: sum(system.submits()) == 2, "the hedge copy")
    return first, next(host for host in system.workers if host is not first)


def allow(system: System, host: Host, steps: int | None) -> None:
    system.do(lambda: host.servicer.allow(steps))


def test_hedging_is_off_by_default() -> None:
    with System(workers=2, configure=stopped) as system:
        pending = Pending(system)
        wait_until(lambda: sum(system.submits()) == 1, "the submit")
        time.sleep(0.3)
        assert sum(system.submits()) == 1
        system.allow(None)
        assert pending.result().status_code == 200


@each_value(copy_wins={"the first": False, "the copy": True}, stream={"whole": False, "stream": True})
def test_hedged_request_stays_at_the_worker_with_the_first_output(copy_wins: bool, stream: bool) -> None:
    with System(workers=2, configure=stopped, hedge_after_s=AFTER_S) as system:
        pending = Pending(system, stream=stream, temperature=1.0)
        first, second = hedged(system)
        winner, loser = (second, first) if copy_wins else (first, second)
        original, copy = first.servicer.submits[0], second.servicer.submits[0]
        assert (copy.prompt_ids, copy.sampling, copy.request_id) == (original.prompt_ids, original.sampling, original.request_id)
        allow(system, winner, 3)
        wait_until(lambda: not loser.servicer.running, "the abort")
        allow(system, loser, None)
        allow(system, winner, None)
        answer = pending.result()
        assert (content_of(answer.text) if stream else answer.json()["choices"][0]["message"]["content"]) == ANSWER
        assert system.submits() == [1, 1]
        assert system.metric("rootstock_gateway_routing_decisions_total", reason="hedge") == 1
        assert all(not link.open and link.open_tokens == 0 for link in system.links)


@pytest.mark.parametrize("copy_dies", [False, True], ids=["original", "copy"])
def test_hedged_request_continues_when_one_of_two_workers_is_lost(copy_dies: bool) -> None:
    with System(workers=2, configure=stopped, hedge_after_s=AFTER_S) as system:
        pending = Pending(system)
        first, second = hedged(system)
        system.call((second if copy_dies else first).stop())
        system.allow(None)
        assert pending.result().status_code == 200
        assert system.submits() == [1, 1]


def test_hedged_request_moves_when_both_workers_are_lost() -> None:
    with System(workers=2, configure=stopped, hedge_after_s=AFTER_S) as system:
        pending = Pending(system)
        first, second = hedged(system)
        for host in (first, second):
            system.call(host.stop())
        wait_until(lambda: system.num_waiting == 1, "the request in the gateway's queue")
        system.allow(None)
        system.call(first.start())
        assert pending.result().status_code == 200


def test_hedged_request_moves_when_the_remaining_worker_is_lost() -> None:
    with System(workers=2, configure=stopped, hedge_after_s=AFTER_S) as system:
        pending = Pending(system, stream=True)
        first, second = hedged(system)
        allow(system, second, 5)
        wait_until(lambda: not first.servicer.running and second.servicer.steps_left == 0, "the abort")
        wait_until(lambda: system.has_tokens(5), "the tokens of the lost worker")
        system.call(second.stop())
        system.allow(None)
        assert content_of(pending.result().text) == ANSWER
        assert list(first.servicer.submits[1].output_ids) == ids_of(ANSWER[:5])


def test_both_copies_of_a_hedged_request_are_aborted_when_the_client_leaves() -> None:
    with System(workers=2, configure=stopped, hedge_after_s=AFTER_S) as system:
        client = RawClient(system, "/v1/completions", {"prompt": "Hi"})
        hedged(system)
        client.vanish()
        wait_until(lambda: system.running() == [0, 0], "the aborts")
        assert all(not link.open for link in system.links)


@pytest.mark.parametrize("of_copy", [False, True], ids=["original", "copy"])
def test_abort_by_either_worker_id_ends_a_hedged_request(of_copy: bool) -> None:
    with System(workers=2, configure=stopped, hedge_after_s=AFTER_S) as system:
        pending = Pending(system)
        first, second = hedged(system)
        named = (second if of_copy else first).servicer.info.worker_id
        ended: list[int] = []
        system.do(lambda: ended.append(system.gateway.aborter.abort_here(AbortScope(None, None, named))))
        assert ended == [1] and pending.result().json()["choices"][0]["finish_reason"] == "abort"
        wait_until(lambda: system.running() == [0, 0], "the aborts")


def test_request_gets_no_hedge_copy_after_the_client_leaves() -> None:
    with System(workers=2, configure=stopped, hedge_after_s=LATE_S) as system:
        client = RawClient(system, "/v1/completions", {"prompt": "Hi"})
        wait_until(lambda: sum(system.running()) == 1, "the submit")
        client.vanish()
        time.sleep(1.3 * LATE_S)
        assert sum(system.submits()) == 1


def test_request_with_output_gets_no_hedge_copy() -> None:
    with System(workers=2, configure=stopped, hedge_after_s=LATE_S) as system:
        pending = Pending(system)
        wait_until(lambda: sum(system.running()) == 1, "the submit")
        system.allow(1)
        time.sleep(1.3 * LATE_S)
        assert sum(system.submits()) == 1
        system.allow(None)
        assert pending.result().status_code == 200


@pytest.mark.parametrize("early", [False, True], ids=["with the first token", "before the first token"])
def test_prompt_logprobs_of_a_hedged_request_come_from_one_copy(early: bool) -> None:
    with System(workers=2, configure=stopped, hedge_after_s=LATE_S if early else AFTER_S) as system:
        for host in system.workers:
            host.servicer.early_prompt = early
        body = {"text": "Hello", "return_logprob": True, "logprob_start_len": 0}
        client = RawClient(system, "/generate", body)
        wait_until(lambda: sum(system.submits()) == (1 if early else 2), "the submit, or the copy's")
        if early:
            time.sleep(1.3 * LATE_S)
            assert sum(system.submits()) == 1
        system.allow(None)
        client.read_until(b"}}")
        meta = json.loads(client.received.partition(b"\r\n\r\n")[2])["meta_info"]
        assert [token for _, token, *_ in meta["input_token_logprobs"]] == ids_of("Hello")
        assert len(meta["output_token_logprobs"]) == len(ANSWER) + 1


def test_request_gets_no_hedge_copy_without_another_worker() -> None:
    with System(configure=stopped, hedge_after_s=AFTER_S) as system:
        pending = Pending(system)
        wait_until(lambda: system.running() == [1], "the submit")
        time.sleep(2 * AFTER_S)
        system.allow(None)
        assert pending.result().status_code == 200 and system.submits() == [1]
