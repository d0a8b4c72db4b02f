"""Tests of background responses with OpenAI's official client, at two gateways with one store."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from rootstock_llm.services.gateway.background import background_run, background_runner, background_work, journal
from rootstock_llm.services.gateway.keys import key_table
from rootstock_llm.services.gateway.store import background_store
from rootstock_llm.services.gateway.store.owner import owner_of
from rootstock_llm.services.gateway.store.state_store import StoreAway
from rootstock_llm.services.shared.limits import MAX_JSON_DEPTH, MAX_RECORD_BYTES
from tests.services.gateway.fakes import MODEL, FakeWorker
from tests.services.gateway.system import RawClient, System, wait_until
from tests.services.redis_server import RedisServer, redis_server

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
ALL = "<think>Hm.</think>It rains.\n" + CALL
LONG = "So it goes on. " * 12
OPEN = ("queued", "in_progress")


@pytest.fixture(scope="module", autouse=True)
def short_intervals() -> Iterator[None]:
    """Shortens the intervals at which gateways look for work and write events, and the pauses after failed attempts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background_runner, "LOOK_S", 0.05)
        patch.setattr("rootstock_llm.services.gateway.background.journal.PIECE_S", 0.01)
        patch.setattr(background_run, "PAUSES_S", (0.02, 0.1))
        yield


@pytest.fixture(scope="module")
def module_system(store: RedisServer, short_intervals: None) -> Iterator[System]:
    formats, keys = ("hermes", "think"), ["alice", "bob"]
    with System(formats=formats, gateways=2, state_redis_url=store.url, keys=keys, background_per_key=8) as started:
        yield started


@pytest.fixture
def system(module_system: System) -> Iterator[System]:
    module_system.worker.answer = lambda submit: LONG
    yield module_system
    module_system.allow(None)


@pytest.fixture
def clients(system: System) -> list[OpenAI]:
    return [system.openai(api_key="alice", base_url=system.url("/v1", gateway=number)) for number in range(2)]


def begin(client: OpenAI, **fields: Any) -> Response:
    return client.responses.create(**{"model": MODEL, "input": "Hi", "background": True, **fields})


def wait_for_end(client: OpenAI, response: Response) -> Response:
    """Waits until a response has ended, and returns it."""
    found = response

    def has_ended() -> bool:
        nonlocal found
        found = client.responses.retrieve(response.id)
        return found.status not in OPEN

    wait_until(has_ended, f"the end of {response.id}")
    return found


def stream_events(client: OpenAI, response: Response, **options: int) -> list[Any]:
    return list(client.responses.retrieve(response.id, stream=True, **options))


def text_of(events: Sequence[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def plain(value: Any) -> Any:
    """Returns the value without random ids."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: plain(each) for name, each in value.items() if name not in ("id", "call_id")}


def lease_of(response: Response, key: str = "alice") -> str:
    return f"state:lease:background:{owner_of(key)}:{response.id}"


def expire_lease(store: RedisServer, response: Response) -> None:
    """Gives the lease of a response to another owner, as if its gateway had been suspended for longer than the lease."""
    store.client.set(lease_of(response), "another", px=2000)


def code_of(call: Any) -> tuple[int, str | None]:
    with pytest.raises(openai.APIStatusError) as refused:
        call()
    return refused.value.status_code, refused.value.code


def test_background_response_returns_before_generation(system: System, clients: list[OpenAI]) -> None:
    system.allow(0)
    first = begin(clients[0], metadata={"a": "b"})
    assert (first.status, first.background, first.store, first.output) == ("queued", True, True, [])
    wait_until(lambda: clients[1].responses.retrieve(first.id).status == "in_progress", "the submit")
    assert code_of(lambda: clients[1].responses.create(model=MODEL, input="So?", previous_response_id=first.id)) == (
        400,
        "previous_response_not_finished",
    )
    assert [item.type for item in clients[1].responses.input_items.list(first.id)] == ["message"]
    system.allow(None)
    last = wait_for_end(clients[1], first)
    assert (last.status, last.output_text, last.metadata, last.background) == ("completed", LONG, {"a": "b"}, True)
    assert last.usage is not None and last.usage.output_tokens == len(LONG) + 1
    then = clients[0].responses.create(model=MODEL, input="So?", previous_response_id=first.id)
    assert then.status == "completed" and LONG in str(system.tokenizer.calls[-1].messages_json)


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("fields", [{"tools": [WEATHER]}, {"include": ["message.output_text.logprobs"], "top_logprobs": 1}])
def test_background_stream_ends_with_the_output_of_a_foreground_response(
    system: System, clients: list[OpenAI], fields: Any
) -> None:
    if "tools" in fields:
        system.worker.answer = lambda submit: ALL
    whole = clients[0].responses.create(model=MODEL, input="Hi", **fields)
    events = list(clients[0].responses.create(model=MODEL, input="Hi", background=True, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"] and kinds[-1] == "response.completed"
    last = events[-1].response
    assert plain([item.to_dict() for item in last.output]) == plain([item.to_dict() for item in whole.output])
    assert last.usage == whole.usage and text_of(events) == whole.output_text
    again = stream_events(clients[1], last)
    assert [event.to_dict() for event in again] == [event.to_dict() for event in events]


def test_background_stream_resumes_at_any_gateway(system: System, clients: list[OpenAI]) -> None:
    system.allow(20)
    stream = begin(clients[0], stream=True)
    seen = []
    for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    stream.close()
    response = seen[0].response
    assert clients[1].responses.retrieve(response.id).status == "in_progress"
    system.allow(None)
    rest = stream_events(clients[1], response, starting_after=seen[-1].sequence_number)
    assert [event.sequence_number for event in [*seen, *rest]] == list(range(len(seen) + len(rest)))
    assert text_of(seen) + text_of(rest) == LONG == rest[-1].response.output_text


def test_background_stream_starts_after_the_event_given_in_starting_after(system: System, clients: list[OpenAI]) -> None:
    client = clients[0]
    done = wait_for_end(client, begin(client))
    events = stream_events(client, done)
    assert [event.sequence_number for event in stream_events(client, done, starting_after=0)] == list(range(1, len(events)))
    assert stream_events(client, done, starting_after=len(events) - 1) == []
    url = f"/v1/responses/{done.id}"
    for query in (f"starting_after={len(events)}", "starting_after=-1", "starting_after=a", "starting_after=" + "9" * 50):
        refused = system.get(f"{url}?stream=true&{query}", headers={"x-api-key": "alice"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "starting_after"), query
    assert system.get(f"{url}?starting_after=1", headers={"x-api-key": "alice"}).status_code == 400
    other = client.responses.create(model=MODEL, input="Hi")
    assert code_of(lambda: stream_events(client, other)) == (400, "unsupported_parameter")
    assert code_of(lambda: client.responses.cancel(other.id)) == (400, "unsupported_operation")


def test_repeated_cancellation_of_a_background_response_returns_the_same_response_at_any_gateway(
    system: System, clients: list[OpenAI]
) -> None:
    system.allow(10)
    stream = begin(clients[0], stream=True)
    events = [next(stream)]
    response = events[0].response
    wait_until(lambda: len(text_of(streamed_so_far(system, response))) == 10, "ten tokens in the store")
    aborted = len(system.worker.aborted)
    ended = clients[1].responses.cancel(response.id)
    assert (ended.status, ended.output_text, ended.output[0].status) == ("cancelled", LONG[:10], "incomplete")
    wait_until(lambda: len(system.worker.aborted) > aborted, "the abort at the worker")
    events += stream
    assert events[-1].type == "response.incomplete" and events[-1].response.status == "cancelled" and text_of(events) == LONG[:10]
    for client in clients:
        assert client.responses.cancel(response.id) == ended == client.responses.retrieve(response.id)
    system.allow(None)
    done = wait_for_end(clients[0], begin(clients[0]))
    assert clients[1].responses.cancel(done.id) == done


def streamed_so_far(system: System, response: Response) -> list[Any]:
    """Streams the response until 0.5 s pass without an event. Returns the events, all of which are in the store."""
    found = []
    url = system.url(f"/v1/responses/{response.id}?stream=true")
    try:
        with httpx.stream("GET", url, headers={"x-api-key": "alice"}, timeout=0.5) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    found.append(type("Event", (), json.loads(line[6:])))
    except httpx.ReadTimeout:
        return found
    return found


def test_deletion_aborts_a_background_response(system: System, clients: list[OpenAI], store: RedisServer) -> None:
    system.allow(5)
    response = begin(clients[0])
    wait_until(lambda: len(text_of(streamed_so_far(system, response))) == 5, "five tokens in the store")
    aborted = len(system.worker.aborted)
    clients[1].responses.delete(response.id)
    wait_until(lambda: len(system.worker.aborted) > aborted, "the abort at the worker")
    assert code_of(lambda: clients[0].responses.retrieve(response.id)) == (404, "response_not_found")
    assert code_of(lambda: clients[0].responses.delete(response.id)) == (404, "not_found")
    assert not list(store.client.scan_iter(f"*{response.id}*"))


def test_background_response_is_not_found_with_another_api_key(system: System, clients: list[OpenAI]) -> None:
    bob, response = system.openai(api_key="bob"), begin(clients[0])
    for call in (bob.responses.retrieve, bob.responses.cancel, bob.responses.delete, lambda id: stream_events(bob, response)):
        assert code_of(lambda: call(response.id))[0] == 404  # noqa: B023
    assert wait_for_end(clients[0], response).status == "completed"


def test_invalid_and_excess_background_requests_are_refused(
    system: System, clients: list[OpenAI], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert code_of(lambda: begin(clients[0], store=False)) == (400, "invalid_value")
    assert code_of(lambda: begin(clients[0], input=[])) == (400, "missing_required_parameter")
    assert code_of(lambda: begin(clients[0], instructions="x" * MAX_RECORD_BYTES)) == (413, "request_too_large")
    system.allow(0)
    begun = [begin(clients[number % 2]) for number in range(8)]
    assert code_of(lambda: begin(clients[0])) == (429, "background_full")
    monkeypatch.setattr(system.gateway._background._runner, "_max_runs", 4)
    assert code_of(lambda: begin(clients[0])) == (503, "queue_full")
    monkeypatch.setattr(system.gateway._background, "_most_streams", 0)
    assert background_work.MAX_BACKGROUND_STREAMS and code_of(lambda: stream_events(clients[0], begun[0])) == (503, "queue_full")
    monkeypatch.setattr(system.gateway._background, "_most_own_streams", 0)
    assert background_work.MAX_OWN_BACKGROUND_STREAMS and code_of(lambda: stream_events(clients[0], begun[0])) == (
        429,
        "streams_full",
    )
    system.allow(None)
    assert {wait_for_end(clients[0], each).status for each in begun} == {"completed"}
    with System() as without:
        assert code_of(lambda: begin(without.openai())) == (400, "no_store")


def test_background_response_is_deleted_when_the_reply_of_the_store_is_lost(
    system: System, clients: list[OpenAI], store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has recorded the response, but its reply to the gateway was lost."""
    background = system.gateway._background
    assert background is not None
    began, seen = background._store.begin, list[str]()

    async def lose_reply(lease: Any, order: Any, *rest: Any) -> Any:
        await began(lease, order, *rest)
        seen.append(f"state:of:{order.member}")
        assert store.client.exists(*seen)
        raise StoreAway("the reply was lost")

    monkeypatch.setattr(background._store, "begin", lose_reply)
    assert code_of(lambda: begin(clients[0])) == (503, "store_unavailable")
    wait_until(lambda: not store.client.exists(*seen), "the deletion of the records")


def test_refused_background_response_frees_slots_of_the_api_key_and_of_the_gateway() -> None:
    """A background response counts against max_concurrent of the API key and against the gateway's limit."""
    key = {"name": "a", "key": "a", "max_concurrent": 1}
    deepest: Any = {}
    for _ in range(MAX_JSON_DEPTH - 4):  # the other levels: the innermost object, the tool, the list of tools and the body
        deepest = {"a": deepest}
    with redis_server() as own, System(keys=[key], state_redis_url=own.url, max_concurrent_requests=1) as system:
        client = system.openai(api_key="a")
        for _ in range(2):
            too_deep: Any = {**WEATHER, "parameters": {"a": deepest}}
            assert code_of(lambda: begin(client, tools=[too_deep])) == (400, "invalid_json")  # noqa: B023
            assert code_of(lambda: begin(client, instructions="x" * (MAX_RECORD_BYTES - 1000))) == (413, "request_too_large")
        asked = begin(client, tools=[{**WEATHER, "parameters": deepest}], extra_body={"routing_key": "\u00fc" * 200})
        assert wait_for_end(client, asked).status == "completed"
        assert not system.metric("rootstock_gateway_requests_in_flight")
        head = system.request("HEAD", f"/v1/responses/{asked.id}?stream=true", headers={"x-api-key": "a"}, timeout=5)
        assert (head.status_code, head.content) == (200, b"")


def test_background_response_ends_when_stored_events_are_unreadable_or_the_state_is_lost(
    system: System, clients: list[OpenAI], store: RedisServer
) -> None:
    system.allow(4)
    response = begin(clients[0])
    wait_until(lambda: len(text_of(streamed_so_far(system, response))) == 4, "four tokens in the store")
    store.client.lset(f"state:background:events:{owner_of('alice')}:{response.id}", 2, "{")
    ended = clients[1].responses.cancel(response.id)
    assert (ended.status, ended.output) == ("cancelled", []) and ended == clients[0].responses.retrieve(response.id)
    expired = begin(clients[0])
    store.client.delete(f"state:background:{owner_of('alice')}:{expired.id}")
    assert clients[1].responses.retrieve(expired.id).status == "failed"
    assert code_of(lambda: clients[1].responses.create(model=MODEL, input="So?", previous_response_id=expired.id)) == (
        400,
        "previous_response_failed",
    )


def test_background_response_counts_against_max_concurrent_of_the_api_key() -> None:
    with redis_server() as own, System(keys=[{"name": "a", "key": "a", "max_concurrent": 1}], state_redis_url=own.url) as system:
        client = system.openai(api_key="a")
        system.allow(0)
        first = begin(client)
        assert code_of(lambda: begin(client)) == code_of(lambda: client.responses.create(model=MODEL, input="Hi"))
        system.allow(None)
        wait_for_end(client, first)
        wait_until(lambda: wait_for_end(client, begin(client)).status == "completed", "a free slot of the API key")


@pytest.mark.by_day(one_in=3, seed=2)
@pytest.mark.parametrize("tokens", [1, 9, 20, 60, 95])
def test_other_gateway_continues_a_background_response_after_the_last_stored_token(
    system: System, clients: list[OpenAI], store: RedisServer, tokens: int
) -> None:
    """The first gateway is lost within a reasoning mark, reasoning, text, a call, or the arguments of a call.

    No event is repeated, and a call keeps its id.
    """
    system.worker.answer = lambda submit: ALL
    whole = clients[0].responses.create(model=MODEL, input="Hi", tools=[WEATHER])
    before = len(system.worker.submits)
    system.allow(tokens)
    response = begin(clients[0], tools=[WEATHER])
    key = f"state:background:ids:{owner_of('alice')}:{response.id}"
    wait_until(lambda: store.client.strlen(key) == 4 * tokens or tokens in (1, 9), "the tokens in the store")
    expire_lease(store, response)
    wait_until(lambda: len(system.worker.submits) == before + 2, "the submit of the other gateway")
    first, second = system.worker.submits[before:]
    assert list(second.output_ids) == [ord(char) for char in ALL[: len(second.output_ids)]]
    assert len(second.output_ids) <= tokens and (second.output_ids or tokens in (1, 9))
    assert (first.prompt_ids, first.sampling.seed) == (second.prompt_ids, second.sampling.seed)
    system.allow(None)
    last = wait_for_end(clients[1], response)
    assert last.status == "completed" and last.usage == whole.usage
    assert plain([item.to_dict() for item in last.output]) == plain([item.to_dict() for item in whole.output])
    events = stream_events(clients[1], response)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.item for event in events if event.type == "response.output_item.done"] == last.output


def test_log_probabilities_continue_at_another_gateway(system: System, clients: list[OpenAI], store: RedisServer) -> None:
    """The request to the second worker has the same parameters, including nulls in the schema."""
    schema = {"type": "json_schema", "name": "a", "schema": {"anyOf": [{"const": None}, {"type": "string", "default": None}]}}
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "text": {"format": schema}}
    before = len(system.worker.submits) + 1
    whole = clients[0].responses.create(model=MODEL, input="Hi", **asked)
    system.allow(30)
    response = begin(clients[0], **asked)
    key = f"state:background:ids:{owner_of('alice')}:{response.id}"
    wait_until(lambda: store.client.strlen(key) == 4 * 30, "the tokens in the store")
    expire_lease(store, response)
    system.allow(None)
    last = wait_for_end(clients[1], response)
    assert plain([item.to_dict() for item in last.output]) == plain([item.to_dict() for item in whole.output])
    first, second = system.worker.submits[before:]
    assert first.sampling == second.sampling and second.output_ids


def test_background_response_fails_after_the_maximum_number_of_takeovers(
    system: System, clients: list[OpenAI], store: RedisServer
) -> None:
    system.allow(4)
    response = begin(clients[0])
    wait_until(lambda: len(text_of(streamed_so_far(system, response))) == 4, "four tokens in the store")
    store.client.hset(f"state:background:{owner_of('alice')}:{response.id}", "takes", background_run.MAX_TAKES)
    expire_lease(store, response)
    last = wait_for_end(clients[1], response)
    assert last.status == "failed" and last.error is not None and last.error.code == "server_error"
    assert last.output_text == LONG[:4] and stream_events(clients[1], response)[-1].type == "response.failed"


def begin_unreadable(system: System, clients: list[OpenAI], store: RedisServer) -> Response:
    """Begins a response with an unreadable stored request and so many takeovers that the next gateway ends the response."""
    system.allow(4)
    response = begin(clients[0])
    wait_until(lambda: len(text_of(streamed_so_far(system, response))) == 4, "four tokens in the store")
    spoilt: Any = {"order": "{", "takes": background_store.GIVEN_UP}
    store.client.hset(f"state:background:{owner_of('alice')}:{response.id}", mapping=spoilt)
    expire_lease(store, response)
    return response


def test_response_is_failed_for_every_reader_when_no_gateway_can_read_the_stored_request(
    system: System, clients: list[OpenAI], store: RedisServer
) -> None:
    """The store has a record of the failed response. The state of the running response is deleted."""
    response, owner = begin_unreadable(system, clients, store), owner_of("alice")
    last = wait_for_end(clients[1], response)
    record = json.loads(store.client.hget(f"state:of:{owner}:{response.id}", "c") or "")
    assert record["response"]["status"] == "failed" and record["input"] and record["response"]["id"] == response.id
    assert last.error is not None and (last.status, last.error.code, last.output) == ("failed", "server_error", [])
    assert last.to_dict()["error"] == record["response"]["error"] and "No gateway could continue" in last.error.message
    assert clients[0].responses.cancel(response.id) == last
    assert code_of(lambda: list(clients[0].responses.retrieve(response.id, stream=True))) == (400, "stream_expired")
    assert not list(store.client.scan_iter(f"state:background:*{response.id}"))


def test_retrieval_returns_the_final_response_when_the_response_ends_between_two_store_reads(
    system: System, clients: list[OpenAI], store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway reads the record before the response ends, and the status after the response has ended."""
    status = background_work.BackgroundWork.status

    async def late(work: background_work.BackgroundWork, owner: str, response_id: str) -> Any:
        while (found := await status(work, owner, response_id)) in OPEN:
            await asyncio.sleep(0.01)
        return found

    response = begin_unreadable(system, clients, store)
    monkeypatch.setattr(background_work.BackgroundWork, "status", late)
    last = clients[1].responses.retrieve(response.id)
    assert last.error is not None and "No gateway could continue" in last.error.message


def test_stopping_gateway_releases_the_leases_of_background_responses() -> None:
    with redis_server() as own:
        with System(state_redis_url=own.url) as first:
            first.worker.answer = lambda submit: LONG
            first.allow(25)
            response = begin(first.openai())
            key = f"state:background:ids:{owner_of('')}:{response.id}"
            wait_until(lambda: own.client.strlen(key) == 100, "the tokens in the store")
        assert not own.client.exists(lease_of(response, "")), (
            "the gateway releases the lease, so the other gateway does not wait for its expiry"
        )
        with System(state_redis_url=own.url) as second:
            second.worker.answer = lambda submit: LONG
            last = wait_for_end(second.openai(), response)
            assert (last.status, last.output_text) == ("completed", LONG)
            (submit,) = second.worker.submits
            assert (
                len(submit.output_ids) == 25
                and own.client.hget(f"state:background:{owner_of('')}:{response.id}", "takes") == b"1"
            )


def test_other_gateway_continues_a_response_with_the_stored_parameters() -> None:
    """The tokenizer and the worker of the second gateway report other values than those of the first gateway.

    A tool call that the first gateway has dropped is not counted again.
    """
    answer = "<think>Hm.</think>" + CALL.replace("weather", "wether")
    seen, answer = len(answer), answer + "It rains.\n" + CALL
    with redis_server() as own:
        marks = ord("<"), ord(">")
        with System(formats=("hermes", "think"), reasoning_marks=marks, state_redis_url=own.url) as first:
            first.worker.answer = lambda submit: answer
            first.allow(seen)
            response = begin(first.openai(), tools=[WEATHER])
            key = f"state:background:ids:{owner_of('')}:{response.id}"
            wait_until(lambda: own.client.strlen(key) == 4 * seen, "the tokens in the store")
            (began,) = first.worker.submits

        def other(workers: list[FakeWorker]) -> None:
            workers[0].info.context_len *= 2
            workers[0].info.sampling_defaults.top_k = 5

        with System(formats=("pythonic", ""), state_redis_url=own.url, configure=other) as second:
            second.worker.answer = lambda submit: answer
            last = wait_for_end(second.openai(), response)
            assert [item.type for item in last.output] == ["reasoning", "message", "function_call"]
            assert last.usage is not None and last.usage.output_tokens_details.reasoning_tokens == len("<think>")
            (submit,) = second.worker.submits
            assert submit.output_ids and submit.sampling == began.sampling
            assert not second.metric("rootstock_gateway_tool_calls_dropped_total")


def test_gateway_continues_a_response_when_the_stored_record_has_no_output_formats() -> None:
    """An older gateway stored the BackgroundOrder without formats, so the tokenizer's formats apply.

    A new BackgroundOrder has every field that an older gateway reads.
    """
    known = {"id", "owner", "key", "request_id", "routing_key", "created_at", "ends_at", "model", "asked", "rendered_end"}
    with redis_server() as own:
        with System(formats=("hermes", "think"), state_redis_url=own.url) as first:
            first.allow(0)
            response = begin(first.openai(), tools=[WEATHER])
            wait_until(lambda: bool(first.worker.submits), "the submit")
        name = f"state:background:{owner_of('')}:{response.id}"
        written = json.loads(own.client.hget(name, "order") or b"")
        own.client.hset(name, "order", json.dumps({each: written[each] for each in known | {"context_bytes"}}))
        with System(formats=("hermes", "think"), state_redis_url=own.url) as second:
            second.worker.answer = lambda submit: "<think>Hm.</think>" + CALL
            last = wait_for_end(second.openai(), response)
            assert (last.status, [item.type for item in last.output]) == ("completed", ["reasoning", "function_call"])


def test_response_fails_when_the_tokenizer_has_changed() -> None:
    def other(workers: list[FakeWorker]) -> None:
        workers[0].info.tokenizer = "another"

    with redis_server() as own:
        with System(state_redis_url=own.url) as first:
            first.allow(0)
            response = begin(first.openai())
            wait_until(lambda: bool(first.worker.submits), "the submit")
        with System(state_redis_url=own.url, configure=other) as second:
            last = wait_for_end(second.openai(), response)
            assert last.status == "failed" and last.error is not None and "has been replaced" in last.error.message
            assert not second.worker.submits


def test_gateway_waits_for_the_model_of_a_stored_response() -> None:
    """No worker of the model is connected, so the response stays open."""

    def other(workers: list[FakeWorker]) -> None:
        workers[0].info.model = "other"

    with redis_server() as own:
        with System(state_redis_url=own.url) as first:
            first.allow(4)
            response = begin(first.openai())
            wait_until(lambda: bool(first.worker.submits), "the submit")
        with System(state_redis_url=own.url, configure=other) as second:
            client = second.openai()
            wait_until(lambda: second.metric("rootstock_gateway_background_takeovers_total") == 1, "the takeover")
            time.sleep(0.5)
            assert client.responses.retrieve(response.id).status in OPEN


def test_gateway_waits_for_the_api_key_of_a_stored_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_table, "POLL_S", 0.05)
    with redis_server() as own:
        with System(state_redis_url=own.url, keys=["alice"]) as first:
            first.allow(4)
            response = begin(first.openai(api_key="alice"))
            wait_until(lambda: bool(first.worker.submits), "the submit")
        with System(state_redis_url=own.url, keys=["bob"]) as second:
            wait_until(lambda: second.metric("rootstock_gateway_background_takeovers_total") == 1, "the takeover")
            second.write_keys("alice", "bob")
            wait_until(
                lambda: second.get("/v1/models", headers={"x-api-key": "alice"}).status_code == 200, "the API key at the gateway"
            )
            assert wait_for_end(second.openai(api_key="alice"), response).status == "completed"


def test_gateway_recomputes_output_that_the_store_did_not_record(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the outage of the store, the gateway serves other requests."""
    own = RedisServer(folder=tmp_path_factory.mktemp("away"))
    own.start()
    with System(state_redis_url=own.url, state_patience_s=0.1) as system:
        system.worker.answer = lambda submit: LONG
        client = system.openai()
        for hold_s, tries in ((30.0, 1), (0.2, 2)):
            monkeypatch.setattr(journal, "HOLD_S", hold_s)
            before = len(system.worker.submits)
            system.allow(10)
            response = begin(client)
            key = f"state:background:ids:{owner_of('')}:{response.id}"
            wait_until(lambda: own.client.strlen(key) == 40, "the tokens in the store")  # noqa: B023
            own.wait_until_written()
            own.kill()
            system.allow(5)
            if tries == 2:
                wait_until(lambda: system.running() == [0], "the end of the attempt")
            system.allow(None)
            assert client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}]).choices
            own.start()
            last = wait_for_end(client, response)
            assert (last.status, last.output_text) == ("completed", LONG)
            assert len(system.worker.submits) - before == tries + 1, "the attempts, and the request of another client"
    own.kill()


def test_background_response_fails_when_its_stored_output_is_too_large(
    system: System, clients: list[OpenAI], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_store, "MAX_BACKGROUND_BYTES", 6000)
    last = wait_for_end(clients[0], begin(clients[0]))
    assert last.status == "failed" and last.error is not None and "larger" in last.error.message


def test_conversation_gets_the_items_of_a_background_response(clients: list[OpenAI], store: RedisServer) -> None:
    conversation = clients[0].conversations.create()
    wait_for_end(clients[0], begin(clients[0], conversation=conversation.id))
    items = clients[1].conversations.items.list(conversation.id, order="asc").data
    assert [(item.type, getattr(item, "role", None)) for item in items] == [("message", "user"), ("message", "assistant")]


def test_background_response_fails_after_the_time_limit() -> None:
    with redis_server() as own, System(state_redis_url=own.url, background_timeout_s=2) as system:
        system.worker.answer = lambda submit: LONG
        system.allow(3)
        last = wait_for_end(system.openai(), begin(system.openai()))
        assert last.status == "failed" and last.error is not None and "time limit" in last.error.message
        assert last.output_text == LONG[:3]
        wait_until(lambda: system.running() == [0], "the abort at the worker")


def test_background_stream_sends_comments_during_a_wait() -> None:
    """No comment is sent before the first event, even if the tokenizer takes longer than the interval between comments."""
    with redis_server() as own, System(state_redis_url=own.url, sse_comment_s=0.05) as system:
        system.allow(0)
        system.do(system.tokenizer.gate.clear)
        client = RawClient(system, "/v1/responses", {"input": "Hi", "background": True, "stream": True})
        wait_until(lambda: bool(system.tokenizer.calls), "the tokenizer's call")
        time.sleep(0.2)
        system.do(system.tokenizer.gate.set)
        client.read_until(b": waiting")
        system.allow(None)
        received = client.read_to_end_of_stream()
        assert received.count(b"HTTP/1.1 ") == 1 and received.index(b"response.created") < received.index(b": waiting")
        assert b"event: response.completed" in received


def test_response_fails_when_no_worker_has_the_model_version() -> None:
    """All tokens of a response come from one model version."""
    with redis_server() as own:
        with System(state_redis_url=own.url) as first:
            first.allow(5)
            response = begin(first.openai())
            member = f"{owner_of('')}:{response.id}"
            wait_until(lambda: own.client.strlen(f"state:background:ids:{member}") == 20, "the tokens in the store")
            texts = f"state:background:texts:{member}"
            wait_until(lambda: b"".join(own.client.lrange(texts, 0, -1)).startswith(b"Hell"), "the text in the store")

        def others(workers: list[FakeWorker]) -> None:
            workers[0].info.revision = "others"

        with System(state_redis_url=own.url, configure=others) as second:
            last = wait_for_end(second.openai(), response)
            assert last.status == "failed" and last.error is not None and "model version" in last.error.message
            assert (
                last.output_text in ("Hell", "Hello") and not second.worker.submits
            )  # the store gets the text of a token after the token itself
