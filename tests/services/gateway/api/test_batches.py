"""Tests of files and batches with OpenAI's official client."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Batch

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.services.gateway.batches import batch_run, batch_runner, lanes
from rootstock_llm.services.gateway.batches.line_call import LineAttempt, LineCalls
from rootstock_llm.services.gateway.generation.origin import Caller
from rootstock_llm.services.gateway.http import answer
from rootstock_llm.services.gateway.keys import key_ring, key_table
from rootstock_llm.services.gateway.store.batch_record import BatchStatus
from rootstock_llm.services.gateway.store.batch_store import BatchStore, LineResult, batch_lease
from rootstock_llm.services.gateway.store.lease import Lease, Leases
from rootstock_llm.services.gateway.store.owner import owner_of
from rootstock_llm.services.shared.limits import PRIORITY_RANGE
from tests.services.gateway.fakes import MODEL, FakeWorker
from tests.services.gateway.system import System, wait_until
from tests.services.redis_server import RedisServer, redis_server

CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"model": MODEL, "prompt": "Hi"},
    EMBEDDINGS: {"model": MODEL, "input": "Hi"},
    RESPONSES: {"model": MODEL, "input": "Hi"},
    "/v1/score": {"model": MODEL, "query": "Hi", "items": ["a", "b"], "label_token_ids": [5]},
}
TERMINAL = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module", autouse=True)
def short_intervals() -> Iterator[None]:
    """Shortens the interval at which gateways look for work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_runner, "LOOK_S", 0.05)
        yield


@pytest.fixture(scope="module")
def system(store: RedisServer, short_intervals: None) -> Iterator[System]:
    with System(state_redis_url=store.url, batch_lines_beside=16, keys=["alice", "bob"]) as started:
        yield started


@pytest.fixture
def client(system: System) -> OpenAI:
    return system.openai(api_key="alice")


def line(number: int, endpoint: str = CHAT, **fields: Any) -> dict[str, Any]:
    return {"custom_id": f"line-{number}", "method": "POST", "url": endpoint, "body": BODIES[endpoint], **fields}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


def begin(client: OpenAI, lines: Sequence[Any], endpoint: Any = CHAT, window: Any = "24h", **fields: Any) -> Batch:
    file = client.files.create(file=("lines.jsonl", jsonl(lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **fields)


def wait_for_end(client: OpenAI, batch: Batch) -> Batch:
    """Waits until a batch has ended, and returns it."""
    found = batch

    def has_ended() -> bool:
        nonlocal found
        found = client.batches.retrieve(batch.id)
        return found.status in TERMINAL

    wait_until(has_ended, f"the end of {batch.id}", 60)
    return found


def results(client: OpenAI, file_id: str | None) -> list[Any]:
    return [] if file_id is None else [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


@pytest.mark.parametrize("endpoint", [pytest.param(path, id=path[4:]) for path in BODIES])
def test_result_of_a_batch_line_equals_the_response_of_the_endpoint(system: System, client: OpenAI, endpoint: str) -> None:
    batch = wait_for_end(
        client, begin(client, [line(1, endpoint), line(2, endpoint, body={"n": []})], endpoint, metadata={"a": "b"})
    )
    assert (batch.status, batch.metadata, batch.errors) == ("completed", {"a": "b"}, None)
    assert batch.request_counts is not None and batch.request_counts.to_dict() == {"total": 2, "completed": 1, "failed": 1}
    (good,) = results(client, batch.output_file_id)
    (bad,) = results(client, batch.error_file_id)
    lookups = {"headers": {"authorization": "Bearer alice"}}
    same = system.post(endpoint, BODIES[endpoint], **lookups).json()
    wrong = system.post(endpoint, {"n": []}, **lookups)
    assert good["custom_id"] == "line-1" and good["error"] is None and good["response"]["status_code"] == 200
    assert good["response"]["body"].keys() == same.keys() and good["response"]["body"]["usage"] == same["usage"]
    assert bad["custom_id"] == "line-2" and bad["error"] is None
    assert (bad["response"]["status_code"], bad["response"]["body"]) == (wrong.status_code, wrong.json())
    assert batch.usage is not None and batch.usage.total_tokens == same["usage"]["total_tokens"]


def test_batch_reports_input_errors_with_line_numbers(client: OpenAI) -> None:
    lines = [
        line(1),
        b"{nonsense",
        b"",
        b"[]",
        line(1),
        line(6, custom_id=7),
        line(7, method="GET"),
        line(8, url="/v1/embeddings"),
        line(9, body="Hi"),
        line(10),
    ]
    batch = wait_for_end(client, begin(client, lines))
    assert batch.status == "failed" and batch.failed_at and batch.output_file_id is batch.error_file_id is None
    assert batch.errors is not None and batch.errors.data is not None
    found = [(error.line, error.code, error.param) for error in batch.errors.data]
    assert found == [
        (2, "invalid_json_line", None),
        (4, "invalid_json_line", None),
        (5, "duplicate_custom_id", "custom_id"),
        (6, "invalid_custom_id", "custom_id"),
        (7, "invalid_method", "method"),
        (8, "mismatched_endpoint", "url"),
        (9, "invalid_body", "body"),
    ]
    assert batch.request_counts is not None and batch.request_counts.total == 0
    (blank,) = wait_for_end(client, begin(client, [b""])).errors.data or ()  # type: ignore[union-attr]
    assert blank.code == "empty_file"


def test_error_names_the_refused_field_of_a_batch(client: OpenAI) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("endpoint", {"endpoint": "/v1/messages"}),
        ("completion_window", {"window": "a day"}),
        ("completion_window", {"window": "8d"}),  # longer than the longest completion_window
        ("metadata", {"metadata": {"a" * 65: "b"}}),
        ("output_expires_after", {"output_expires_after": {"anchor": "created_at", "seconds": 3}}),
    ]
    for param, fields in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            begin(client, [line(1)], **fields)
        assert str(refused.value.param).startswith(param)


def test_lists_of_files_and_batches_have_pages(client: OpenAI) -> None:
    begun = [wait_for_end(client, begin(client, [line(1)])) for _ in range(3)]
    first = client.batches.list(limit=2)
    assert [batch.id for batch in first.data] == [begun[2].id, begun[1].id] and first.has_more
    following = first.get_next_page()
    assert following.data[0].id == begun[0].id
    rising = client.files.list(order="asc", limit=1, after=begun[1].input_file_id, purpose="batch").data
    assert [file.id for file in rising] == [begun[2].input_file_id]
    outputs = client.files.list(purpose="batch_output", limit=2).data
    assert [file.id for file in outputs] == [begun[2].output_file_id, begun[1].output_file_id]
    for wrong in ({"limit": 0}, {"limit": 101}, {"limit": "9" * 5000}, {"after": "batch_none"}):
        with pytest.raises(openai.BadRequestError):
            client.batches.list(**wrong)


def test_files_and_batches_are_not_found_with_another_api_key(system: System, client: OpenAI) -> None:
    batch, bob = wait_for_end(client, begin(client, [line(1)])), system.openai(api_key="bob")
    ours: Any = batch.input_file_id, batch.output_file_id
    for find in (bob.files.retrieve, bob.files.content, bob.files.delete):
        for file_id in ours:
            with pytest.raises(openai.NotFoundError):
                find(file_id)
    for find_batch in (bob.batches.retrieve, bob.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            find_batch(batch.id)
    with pytest.raises(openai.NotFoundError):
        bob.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
    assert not bob.files.list().data and not bob.batches.list().data


def test_deletion_removes_a_file_unless_a_batch_reads_the_file(system: System, client: OpenAI) -> None:
    system.allow(0)
    batch = begin(client, [line(1)])
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    system.allow(None)
    done: Any = wait_for_end(client, batch)
    for file_id in (batch.input_file_id, done.output_file_id):
        assert client.files.delete(file_id).deleted
        for find in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                find(file_id)


def test_download_of_a_file_is_closed_when_the_client_does_not_read(
    system: System, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, server = jsonl([b" " * (16 << 20)]), system.gateway._http
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    with socket.socket() as reader, monkeypatch.context() as patch:
        patch.setattr(answer, "UNREAD_S", 0.2)
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", system.port))
        address = reader.getsockname()

        def is_open() -> bool:
            return any(each.client == address for each in list(server.server_state.connections))

        wait_until(is_open, "the connection")
        head = f"GET /v1/files/{file.id}/content HTTP/1.1\r\nhost: test\r\nauthorization: Bearer alice\r\n\r\n"
        reader.sendall(head.encode())
        wait_until(lambda: not is_open(), "the end of the connection")
        assert reader.recv(12) == b"HTTP/1.1 200"
    assert client.files.content(file.id).content == content


def test_cancelled_batch_keeps_the_results_of_completed_lines(system: System, client: OpenAI) -> None:
    """Running lines are aborted at the worker. Each custom_id has a result in one of the two files."""
    lines = [line(number, body={**BODIES[CHAT], "max_tokens": 1 if number < 3 else 20}) for number in range(40)]
    system.allow(0)
    batch = begin(client, lines)
    wait_until(lambda: system.running() == [16], "a line in every lane")
    assert system.metric("rootstock_gateway_batch_lines_in_flight") == 16
    system.allow(1)
    wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 3, "three results in the store")
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = wait_for_end(client, batch)
    wait_until(lambda: system.running() == [0], "the aborts at the worker")
    system.allow(None)
    good, bad = results(client, done.output_file_id), results(client, done.error_file_id)
    assert done.status == "cancelled" and done.cancelled_at and len(good) == 3
    assert {each["error"]["code"] for each in bad} == {"batch_cancelled"}
    assert sorted(each["custom_id"] for each in good + bad) == sorted(each["custom_id"] for each in lines)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(wait_for_end(client, begin(client, [line(1)])).id)
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_expired_batch_has_an_error_for_each_line_without_a_result(system: System, client: OpenAI) -> None:
    system.allow(0)
    done = wait_for_end(client, begin(client, [line(number) for number in range(3)], window="1s"))
    system.allow(None)
    assert done.status == "expired" and done.expired_at and done.output_file_id is None
    found = results(client, done.error_file_id)
    assert [(each["custom_id"], each["error"]["code"]) for each in found] == [(f"line-{at}", "batch_expired") for at in range(3)]
    assert all(each["response"] is None for each in found)


def test_results_are_in_the_order_of_the_input(system: System, client: OpenAI) -> None:
    lines = [line(number, COMPLETIONS, body={**BODIES[COMPLETIONS], "max_tokens": 1 + number % 7}) for number in range(60)]
    done = wait_for_end(client, begin(client, lines, COMPLETIONS))
    assert [each["custom_id"] for each in results(client, done.output_file_id)] == [each["custom_id"] for each in lines]
    assert client.files.retrieve(done.output_file_id or "").bytes == len(client.files.content(done.output_file_id or "").content)


def test_batch_line_that_requests_a_stream_fails(client: OpenAI) -> None:
    done = wait_for_end(client, begin(client, [line(1, body={**BODIES[CHAT], "stream": True})]))
    (found,) = results(client, done.error_file_id)
    assert found["response"]["status_code"] == 400 and found["response"]["body"]["error"]["param"] == "stream"


def test_batch_retries_a_failed_line_up_to_the_maximum_number_of_tries(
    system: System, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault may be caused by the line, so the number of tries is limited."""
    monkeypatch.setattr(batch_run, "PAUSES_S", (0.01, 0.05))
    fault = (pb.ERROR_CODE_INTERNAL, "a fault")
    for faults, counts in ((batch_run.TRIES - 1, (1, 0)), (batch_run.TRIES, (0, 1))):
        before = system.metric("rootstock_gateway_batch_retries_total")
        system.do(lambda: system.worker.refuse.extend([fault] * faults))  # noqa: B023
        done = wait_for_end(client, begin(client, [line(1)]))
        assert done.status == "completed" and done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.failed) == counts
        assert system.metric("rootstock_gateway_batch_retries_total") == before + batch_run.TRIES - 1
    (found,) = results(client, done.error_file_id)
    assert found["response"]["status_code"] == 500


def test_batch_line_releases_the_lane_while_waiting_for_a_retry(
    system: System, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other lines use the lane, and a gateway that ends does not wait for the retry."""
    monkeypatch.setattr(batch_run, "PAUSES_S", (600.0, 600.0))
    before = system.metric("rootstock_gateway_batch_retries_total")
    system.do(lambda: system.worker.refuse.append((pb.ERROR_CODE_INTERNAL, "a fault")))
    batch = begin(client, [line(1)])
    wait_until(lambda: system.metric("rootstock_gateway_batch_retries_total") == before + 1, "the first try")
    assert system.metric("rootstock_gateway_batch_lines_in_flight") == 0
    client.batches.cancel(batch.id)
    wait_for_end(client, batch)


def test_lines_have_the_lowest_priority_and_the_api_key_of_the_batch(system: System, client: OpenAI) -> None:
    before = len(system.worker.submits)
    wait_for_end(client, begin(client, [line(1, body={**BODIES[CHAT], "priority": 7})]))
    (submit,) = system.worker.submits[before:]
    assert submit.priority == PRIORITY_RANGE[0] and submit.tenant == Caller("alice").tenant


def test_line_fails_when_the_api_key_was_removed(system: System, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ring, "COMES_S", 0.0)
    system.allow(0)
    batch = begin(client, [line(1)])
    wait_until(lambda: system.running() == [1], "the line at the worker")
    system.write_keys("bob")
    wait_until(lambda: system.get("/v1/models", headers={"x-api-key": "alice"}).status_code == 401, "the removal of the API key")
    system.do(lambda: system.worker.end_running(pb.ERROR_CODE_INTERNAL))
    owner = owner_of("alice")

    def ended() -> Any:
        return system.call(work.batches.get(owner, batch.id))

    work = system.gateway._work
    assert work is not None
    wait_until(lambda: ended().status is BatchStatus.COMPLETED, "the end of the batch")
    system.allow(None)
    system.write_keys("alice", "bob")
    wait_until(lambda: system.get("/v1/models", headers={"x-api-key": "alice"}).status_code == 200, "the return of the API key")
    (found,) = results(client, wait_for_end(client, batch).error_file_id)
    assert found["response"]["status_code"] == 401


def test_gateway_takes_a_batch_only_after_the_api_key_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Secret may reach some nodes later than others. The gateway takes the batch when it has the API key."""
    monkeypatch.setattr(key_table, "POLL_S", 0.05)
    lookups, taken = list[str](), list[str]()
    named, take = key_ring.KeyRing.named, Leases.take

    def count_lookups(ring: key_ring.KeyRing, name: str, asked_at: float) -> Caller:
        lookups.append(name)
        return named(ring, name, asked_at)

    def record_take(leases: Leases, name: str) -> Awaitable[Lease | None]:
        taken.append(name)
        return take(leases, name)

    with redis_server() as state:
        with System(state_redis_url=state.url, keys=["alice"]) as first:
            first.allow(0)
            batch = begin(first.openai(api_key="alice"), [line(1)])
            wait_until(lambda: first.running() == [1], "the line at the worker")
        monkeypatch.setattr(key_ring.KeyRing, "named", count_lookups)
        monkeypatch.setattr(Leases, "take", record_take)
        with System(state_redis_url=state.url, keys=["bob"]) as second:
            wait_until(lambda: len(lookups) > 4, "lookups of the API key")
            assert len(taken) == 1, "the gateway does not take the lease at every lookup, and displaces no other batch"
            assert second.metric("rootstock_gateway_batches_running") == 0 and not second.worker.submits
            second.write_keys("alice", "bob")
            wait_until(
                lambda: second.get("/v1/models", headers={"x-api-key": "alice"}).status_code == 200, "the API key at the gateway"
            )
            client = second.openai(api_key="alice")
            (found,) = results(client, wait_for_end(client, batch).output_file_id)
            assert found["response"]["status_code"] == 200


def test_other_gateway_continues_a_batch_from_the_store() -> None:
    """The first gateway stopped with lines on its worker. Each line has one result from one of the gateways."""
    lines = [line(number, body={**BODIES[CHAT], "max_tokens": 1 if number < 3 else 20}) for number in range(20)]
    with redis_server() as state:
        with System(state_redis_url=state.url) as first:
            client = first.openai()
            first.allow(0)
            batch = begin(client, lines)
            wait_until(lambda: first.running() == [16], "the lines at the worker")
            first.allow(1)
            wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 3, "three results")
        with System(state_redis_url=state.url) as second:
            done = wait_for_end(second.openai(), batch)
            found = results(second.openai(), done.output_file_id)
            assert [each["custom_id"] for each in found] == [each["custom_id"] for each in lines]
            assert len(second.worker.submits) == 17 and done.request_counts is not None and done.request_counts.completed == 20


def test_line_is_repeated_when_the_call_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client did not cancel the batch, and a batch ends only when all lines have a result."""
    call, attempts = LineCalls.call, list[str]()

    async def cut(calls: LineCalls, path: str, body: bytes, caller: Caller, request_id: str) -> LineAttempt:
        attempts.append(request_id.rpartition(".")[2])
        if attempts.count("2") == 1 and attempts[-1] == "2":
            raise asyncio.CancelledError
        return await call(calls, path, body, caller, request_id)

    monkeypatch.setattr(LineCalls, "call", cut)
    with redis_server() as state, System(state_redis_url=state.url, batch_lease_s=3.0) as system:
        client = system.openai()
        done = wait_for_end(client, begin(client, [line(number) for number in range(1, 4)]))
        assert [each["custom_id"] for each in results(client, done.output_file_id)] == ["line-1", "line-2", "line-3"]
        assert done.status == "completed" and attempts.count("2") == 2


def test_gateway_records_no_result_when_another_gateway_has_the_lease_of_the_batch(
    system: System, store: RedisServer, client: OpenAI
) -> None:
    """Another gateway owns the lease, so this gateway aborts its running lines."""
    system.allow(0)
    batch = begin(client, [line(1)])
    wait_until(lambda: system.running() == [1], "the line at the worker")
    store.client.set(f"state:lease:{batch_lease(owner_of('alice'), batch.id)}", "another", px=60_000)
    system.allow(1)
    wait_until(lambda: system.metric("rootstock_gateway_batches_running") == 0, "the release of the batch")
    system.allow(None)
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None and counts.completed == counts.failed == 0
    store.client.delete(f"state:lease:{batch_lease(owner_of('alice'), batch.id)}")
    assert wait_for_end(client, batch).status == "completed"


def test_unreadable_batch_does_not_stop_other_batches(
    system: System, store: RedisServer, client: OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    """Unknown fields of a stored batch are ignored. A batch with an unknown status waits for a gateway that knows the status."""

    def logged(beginning: str) -> bool:
        messages = [each.getMessage() for each in caplog.records if each.name == batch_runner.__name__]
        return any(each.startswith(beginning) for each in messages)

    system.allow(0)
    newer = begin(client, [line(1)])
    wait_until(lambda: system.running() == [1], "the line at the worker")
    key, lease = (f"state:{kind}:{owner_of('alice')}:{newer.id}" for kind in ("batch", "lease:batch"))
    order = json.loads(store.client.hget(key, "order") or "")
    store.client.hset(key, "order", json.dumps({**order, "urgency": 1}))
    assert client.batches.retrieve(newer.id).input_file_id == newer.input_file_id
    store.client.hset(key, "status", "paused")
    wait_until(lambda: system.running() == [0], "the release of the batch")
    with pytest.raises(openai.APIStatusError) as refused:
        client.batches.retrieve(newer.id)
    assert (refused.value.status_code, refused.value.code) == (503, "store_unavailable")
    assert newer.id not in [each.id for each in client.batches.list()]
    system.allow(None)
    wait_until(lambda: logged("the record of a batch is unreadable"), "the next attempt to read the batch")
    assert wait_for_end(client, begin(client, [line(2)])).status == "completed"
    assert not logged("batches wait for the store"), "the other batches are still found"
    store.client.hset(key, "status", "in_progress")
    store.client.delete(lease)  # has the same effect as an expired lease
    assert wait_for_end(client, newer).status == "completed"


def test_interactive_request_overtakes_a_waiting_batch_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request overtakes without a priority, and no line is young enough to be displaced."""
    monkeypatch.setattr(lanes, "YOUNG_S", 0.0)

    def one_at_a_time(workers: list[FakeWorker]) -> None:
        workers[0].info.max_running_requests = 1  # the gateway sends up to three requests to such a worker

    with redis_server() as state, System(state_redis_url=state.url, configure=one_at_a_time, batch_lines_beside=16) as system:
        client = system.openai()
        system.allow(0)
        batch = begin(client, [line(number, body={**BODIES[CHAT], "max_tokens": 1 + number}) for number in range(6)])
        wait_until(lambda: system.num_waiting == 3, "the queued lines")
        with ThreadPoolExecutor(1) as pool:
            chat = pool.submit(system.chat, max_tokens=7)
            wait_until(lambda: system.num_waiting == 4, "the queued chat")
            system.allow(1)
            wait_until(lambda: len(system.worker.submits) == 4, "the submit of the chat")
            assert system.worker.submits[-1].sampling.max_new_tokens == 7
            system.allow(None)
            assert chat.result().status_code == 200
        assert wait_for_end(client, batch).status == "completed"


def test_batch_line_starts_only_when_no_interactive_request_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "FREE_LANE_S", 60.0)
    with redis_server() as state, System(state_redis_url=state.url) as system, ThreadPoolExecutor(1) as pool:
        client = system.openai()
        system.allow(0)
        chat = pool.submit(system.chat, max_tokens=7)
        wait_until(lambda: system.running() == [1], "the chat at the worker")
        batch = begin(client, [line(1)])
        wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress", "the start of the batch")
        time.sleep(4 * lanes.LOOK_S)
        assert system.running() == [1]
        system.allow(None)
        assert chat.result().status_code == 200 and wait_for_end(client, batch).status == "completed"


def test_stopping_gateway_finishes_running_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a slow store records the results. The lease is released, so another gateway does not wait for its expiry."""
    record = BatchStore.record

    async def record_slowly(*args: Any) -> Sequence[LineResult]:
        await asyncio.sleep(0.3)
        return await record(*args)

    monkeypatch.setattr(BatchStore, "record", record_slowly)
    with redis_server() as state:
        with System(state_redis_url=state.url, grace_s=10) as system:
            system.allow(0)
            batch = begin(system.openai(), [line(1), line(2)])
            wait_until(lambda: system.running() == [2], "the lines at the worker")
            system.do(system.stop.set)
            wait_until(lambda: system.gateway._http.should_exit, "the stop of the gateway")
            system.allow(None)
        owner = owner_of("")
        assert state.client.hget(f"state:batch:{owner}:{batch.id}", "completed") == b"2"
        assert not state.client.exists(f"state:lease:{batch_lease(owner, batch.id)}")


def test_waiting_batch_expires_and_can_be_cancelled(system: System, client: OpenAI) -> None:
    """Batches whose lines never finish occupy all slots."""
    system.allow(0)
    long = [begin(client, [line(1)]) for _ in range(batch_runner.AT_ONCE)]
    wait_until(lambda: system.metric("rootstock_gateway_batches_running") == len(long), "all slots for batches in use")
    late, unwanted = begin(client, [line(1)], window="1s"), begin(client, [line(1)])
    client.batches.cancel(unwanted.id)
    assert (wait_for_end(client, unwanted).status, wait_for_end(client, late).status) == ("cancelled", "expired")
    (found,) = results(client, client.batches.retrieve(late.id).error_file_id)
    assert found["error"]["code"] == "batch_expired"
    system.allow(None)
    assert {wait_for_end(client, batch).status for batch in long} == {"completed"}


def test_batch_of_another_api_key_pauses_the_newest_batch_when_all_slots_are_in_use(system: System, client: OpenAI) -> None:
    """If all slots are in use, the newest batch of an API key with several batches is paused. It continues later."""
    bob, before = system.openai(api_key="bob"), len(system.worker.submits)
    system.allow(0)
    long = [begin(client, [line(1)]) for _ in range(batch_runner.AT_ONCE)]
    wait_until(lambda: system.metric("rootstock_gateway_batches_running") == len(long), "all slots for batches in use")
    further, other = begin(client, [line(1)]), begin(bob, [line(1)])
    wait_until(
        lambda: any(each.tenant == Caller("bob").tenant for each in system.worker.submits[before:]), "bob's line at the worker"
    )
    system.allow(None)
    assert wait_for_end(bob, other).status == "completed"
    assert {wait_for_end(client, batch).status for batch in (*long, further)} == {"completed"}
