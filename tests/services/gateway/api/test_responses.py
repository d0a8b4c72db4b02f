"""Tests of the Responses API with OpenAI's official client: output items, streams, stored responses and follow-ups."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import openai
import orjson
import pytest
from openai import OpenAI

from rootstock_llm.services.gateway.api.responses.output import OutputItems
from rootstock_llm.services.gateway.generation.bodies import RequestBody
from rootstock_llm.services.gateway.output.output_parser import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from rootstock_llm.services.shared import limits
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.system import System, wait_until
from tests.services.redis_server import RedisServer

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
ALL = "<think>Hm.</think>It rains.\n" + CALL


@pytest.fixture(scope="module")
def system(store: RedisServer) -> Iterator[System]:
    with System(formats=("hermes", "think"), gateways=2, state_redis_url=store.url) as started:
        yield started


@pytest.fixture
def set_output(system: System) -> Iterator[Any]:
    """Yields a function that sets the model's output."""
    yield lambda text: setattr(system.worker, "answer", lambda submit: text)
    system.worker.answer = lambda submit: "Hello, world!"


@pytest.fixture
def client(system: System) -> OpenAI:
    return system.openai()


def messages(system: System) -> list[dict[str, Any]]:
    """Returns the messages of the latest tokenizer call."""
    found: list[dict[str, Any]] = orjson.loads(system.tokenizer.calls[-1].messages_json)
    return found


def plain(value: Any) -> Any:
    """Returns the value without random ids and without the fields that the client adds."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if not isinstance(value, dict):
        return value
    return {name: plain(each) for name, each in value.items() if name not in ("id", "call_id", "parsed", "parsed_arguments")}


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        pytest.param("Hello.", ["message"], id="text"),
        pytest.param(CALL, ["function_call"], id="call"),
        pytest.param(CALL + "\n" + CALL.replace("Bonn", "Rome"), ["function_call"] * 2, id="two calls"),
        pytest.param(ALL, ["reasoning", "message", "function_call"], id="reasoning, text and call"),
    ],
)
def test_stream_and_response_have_the_same_output(client: OpenAI, set_output: Any, text: str, kinds: list[str]) -> None:
    set_output(text)
    asked: Any = {
        "model": MODEL,
        "input": "Hi",
        "tools": [WEATHER],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
    }
    whole = client.responses.create(**asked)
    assert whole.status == "completed" and [item.type for item in whole.output] == kinds
    assert whole.usage is not None and whole.usage.output_tokens == len(text) + 1
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type, events[-1].type] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    assert plain(final.output) == plain(whole.output) and final.output_text == whole.output_text
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert plain(done) == plain(final.output)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text


def test_previous_response_becomes_one_chat_message_in_the_next_prompt(system: System, client: OpenAI, set_output: Any) -> None:
    """The chat message is followed by the tool's result. The second request goes to another gateway than the first request."""
    set_output(ALL)
    first = client.responses.create(model=MODEL, input="Weather?", tools=[WEATHER], instructions="Be brief.")
    call = next(item for item in first.output if item.type == "function_call")
    set_output("So it is.")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    other = system.openai(base_url=system.url("/v1", gateway=1))
    second = other.responses.create(model=MODEL, input=[result], previous_response_id=first.id, tools=[WEATHER])
    assert first.store is True and second.previous_response_id == first.id and second.output_text == "So it is."
    function = {"name": "weather", "arguments": '{"city": "Bonn"}'}
    assert messages(system) == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "It rains.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
    ], "instructions apply only to the response that sets them"
    third = client.responses.create(input="And then?", previous_response_id=second.id)  # type: ignore[call-overload]
    assert [message["role"] for message in messages(system)] == ["user", "assistant", "tool", "assistant", "user"]
    assert client.responses.retrieve(third.id).to_dict() == third.to_dict()


def test_history_can_be_sent_as_items(system: System, client: OpenAI, set_output: Any) -> None:
    set_output(ALL)
    sealed: Any = {"include": ["reasoning.encrypted_content"], "store": False}
    first = client.responses.create(model=MODEL, input="Weather?", tools=[WEATHER], **sealed)
    assert first.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    carried: list[Any] = [item.to_dict() for item in first.output]
    carried[0] = {name: value for name, value in carried[0].items() if name != "content"}
    call_id = carried[2]["call_id"]
    carried = [{"role": "user", "content": "Weather?"}, *carried]
    carried.append({"type": "function_call_output", "call_id": call_id, "output": [{"type": "input_text", "text": "rain"}]})
    client.responses.create(model=MODEL, input=carried, tools=[WEATHER], **sealed)
    assert [message["role"] for message in messages(system)] == ["user", "assistant", "tool"]
    assert messages(system)[1]["reasoning_content"] == "Hm." and messages(system)[2]["content"] == "rain"


def test_item_reference_is_replaced_by_the_stored_item(system: System, client: OpenAI, set_output: Any) -> None:
    set_output("One.")
    first = client.responses.create(model=MODEL, input="Hi")
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    client.responses.create(model=MODEL, input=[reference, {"role": "user", "content": "And?"}])
    assert messages(system) == [{"role": "assistant", "content": "One."}, {"role": "user", "content": "And?"}]
    client.responses.create(model=MODEL, input=[reference], previous_response_id=first.id)
    assert [message["role"] for message in messages(system)] == ["user", "assistant"], (
        "an item that the history contains is not repeated"
    )
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_" + "0" * 36}])
    assert refused.value.param == "input[0].id"


def test_item_reference_in_a_conversation_is_replaced_by_the_stored_item(system: System, client: OpenAI, set_output: Any) -> None:
    set_output("One.")
    reference: Any = {"type": "item_reference", "id": client.responses.create(model=MODEL, input="Hi").output[0].id}
    conversation = client.conversations.create(items=[reference])
    client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "And?"}, reference])
    client.responses.create(model=MODEL, input="Go on.", conversation=conversation.id)
    assert [message["content"] for message in messages(system)] == ["One.", "And?", "Go on."], "an item is not added twice"
    unknown: Any = {"type": "item_reference", "id": "msg_" + "0" * 36}
    with pytest.raises(openai.NotFoundError) as refused:
        client.conversations.items.create(conversation.id, items=[unknown])
    assert refused.value.param == "items[0].id"


def test_added_item_is_returned_as_stored_when_the_conversation_already_has_the_id(client: OpenAI) -> None:
    first, second, new = (
        {"type": "message", "id": name, "role": "user", "content": text} for name, text in (("x", "1"), ("x", "2"), ("y", "3"))
    )
    conversation = client.conversations.create(items=[first])  # type: ignore[list-item]
    added: Any = client.conversations.items.create(conversation.id, items=[second, new])  # type: ignore[list-item]
    stored: Any = client.conversations.items.list(conversation.id, order="asc").data
    assert [item.content[0].text for item in added.data] == [item.content[0].text for item in stored] == ["1", "3"]


def test_client_lists_each_item_once_when_a_request_repeats_an_item_id(client: OpenAI) -> None:
    """The client reads a list until its last page, and names the last item of each page by its id."""
    items: Any = [{"type": "message", "id": "x", "role": "user", "content": str(number)} for number in range(3)]
    texts = ["0", "1", "2"]
    conversation = client.conversations.create(items=items)
    pages: Any = client.conversations.items.list(conversation.id, limit=1, order="asc")
    assert [item.content[0].text for item in islice(pages, 4)] == texts
    reference: Any = {"type": "item_reference", "id": client.responses.create(model=MODEL, input="Hi").output[0].id}
    response = client.responses.create(model=MODEL, input=[*items, reference, reference])
    listed: Any = client.responses.input_items.list(response.id, limit=1, order="asc")
    assert [item.content[0].text for item in islice(listed, 6)] == [*texts, "Hello, world!", "Hello, world!"]


def test_stored_responses_can_be_listed_and_deleted(client: OpenAI) -> None:
    items: Any = [{"role": "user", "content": str(number)} for number in range(3)]
    first = client.responses.create(model=MODEL, input=items, metadata={"a": "b"})
    assert client.responses.retrieve(first.id).metadata == {"a": "b"}
    listed = client.responses.input_items.list(first.id, limit=2, order="asc")
    assert [item.content[0].text for item in listed] == ["0", "1", "2"], "the client reads two pages"  # type: ignore[union-attr]
    conversation = client.conversations.create(metadata={"c": "d"})
    others: list[tuple[Any, str]] = [(client.conversations.delete, first.id), (client.responses.delete, conversation.id)]
    for forget, name in others:
        with pytest.raises(openai.NotFoundError):
            forget(name)
    assert client.responses.retrieve(first.id).metadata == {"a": "b"}
    assert client.conversations.retrieve(conversation.id).metadata == {"c": "d"}
    client.responses.delete(first.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            gone(first.id)
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model=MODEL, input="Hi", previous_response_id=first.id)
    assert refused.value.code == "previous_response_not_found"


def test_conversation_collects_items_of_responses(system: System, client: OpenAI, set_output: Any) -> None:
    begun: Any = [{"role": "system", "content": "Be kind."}]
    conversation = client.conversations.create(items=begun, metadata={"a": "b"})
    set_output("One.")
    first = client.responses.create(model=MODEL, input="Hi", conversation=conversation.id)
    assert first.conversation is not None and first.conversation.id == conversation.id
    client.responses.create(model=MODEL, input="And?", conversation={"id": conversation.id}, stream=True).response.read()
    assert [message["content"] for message in messages(system)] == ["Be kind.", "Hi", "One.", "And?"]
    items = list(client.conversations.items.list(conversation.id, order="asc"))
    assert [item.role for item in items] == ["system", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]
    client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "More."}])
    newest = client.conversations.items.list(conversation.id, limit=1).data[0]
    assert client.conversations.items.retrieve(newest.id or "", conversation_id=conversation.id) == newest
    client.conversations.items.delete(newest.id or "", conversation_id=conversation.id)
    assert client.conversations.update(conversation.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.conversations.retrieve(conversation.id).metadata == {"c": "d"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="Hi", conversation=conversation.id)


def test_logprobs_of_a_response_are_complete() -> None:
    with System() as system:
        client = system.openai()
        asked: Any = {"model": MODEL, "input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            list(stream)
            final = stream.get_final_response()
    assert plain(final.output) == plain(whole.output)
    (item,) = plain(whole.output)
    assert len(item["content"][0]["logprobs"]) == len("Hello, world!") + 1


def test_chains_of_responses_and_conversations_have_size_limits(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    first = client.responses.create(model=MODEL, input="Hi")
    second = client.responses.create(model=MODEL, input="Hi", previous_response_id=first.id)
    for name in ("MAX_RESPONSE_CHAIN", "MAX_CHAIN_BYTES"):
        with monkeypatch.context() as smaller:
            smaller.setattr(limits, name, 1)
            with pytest.raises(openai.BadRequestError) as refused:
                client.responses.create(model=MODEL, input="Hi", previous_response_id=second.id)
            assert (refused.value.param, refused.value.code) == ("previous_response_id", "context_length_exceeded")
    items: Any = [{"role": "user", "content": "Hi"}] * limits.MAX_CONVERSATION_ITEMS
    conversation = client.conversations.create(items=items)
    with pytest.raises(openai.BadRequestError, match="at most 20 items"):
        client.conversations.items.create(conversation.id, items=[*items, items[0]])


def test_stream_begins_with_status_in_progress_when_the_output_has_one_token(client: OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Hi", max_output_tokens=1) as stream:
        created, begun, *_, last = list(stream)
    assert (created.type, begun.type) == ("response.created", "response.in_progress")
    assert created.response.status == begun.response.status == "in_progress"
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


def test_response_is_incomplete_when_the_output_reaches_max_output_tokens(client: OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Hi", max_output_tokens=3) as stream:
        received = list(stream)
    assert received[-1].type == "response.incomplete"
    cut = client.responses.create(model=MODEL, input="Hi", max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert (cut.incomplete_details.reason, cut.output_text) == ("max_output_tokens", "Hel")
    assert cut.output[0].status == "incomplete"  # type: ignore[union-attr]


def statuses(*events: Event) -> list[str]:
    """Returns the status of each item of a completed response with these events."""
    output = OutputItems("", has_encrypted=False)
    received = [each for event in events for each in output.add(event)]
    received += output.finish("completed")
    done = [each["item"]["status"] for each in received if each["type"] == "response.output_item.done"]
    assert done == [item["status"] for item in output.items]
    return done


def test_tool_call_without_an_end_is_incomplete() -> None:
    begun = (CallStart(0, "weather"), CallArguments(0, '{"city": "B'))
    assert statuses(*begun, CallArguments(0, '"}'), CallEnd(0), Text("So.")) == ["completed", "completed"]
    assert statuses(*begun, Text("So.")) == statuses(*begun, Reasoning("So.")) == ["incomplete", "completed"]
    assert statuses(*begun, CallStart(1, "weather"), CallEnd(1)) == ["incomplete", "completed"]
    assert statuses(Text("So."), *begun) == ["completed", "incomplete"]


def test_worker_receives_the_output_format_and_the_tool_choice(system: System, client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    client.responses.create(model=MODEL, input="Hi", text=wanted)
    assert system.worker.submits[-1].sampling.grammar.WhichOneof("kind") == "structural_tag", (
        "the constraint starts after the reasoning"
    )
    chosen: Any = {"tool_choice": {"type": "function", "name": "weather"}, "tools": [WEATHER], "parallel_tool_calls": False}
    client.responses.create(model=MODEL, input="Hi", **chosen)
    assert "weather" in system.worker.submits[-1].sampling.grammar.structural_tag


def test_truncation_drops_the_oldest_items(system: System, client: OpenAI) -> None:
    items: Any = [{"role": "system", "content": "S"}, *({"role": "user", "content": str(n) * 100} for n in range(9))]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input=items)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    client.responses.create(model=MODEL, input=items, truncation="auto")
    shown = [message["content"][0] for message in messages(system)]
    assert shown[0] == "S" and shown[-1] == "8" and 2 < len(shown) < 10
    call: Any = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "c", "output": "r" * 300}
    client.responses.create(model=MODEL, input=[call, {"role": "user", "content": "u" * 300}, result], truncation="auto")
    assert [message["role"] for message in messages(system)] == ["assistant", "tool"], "a call and its result stay together"
    client.responses.create(model=MODEL, input=[{"role": "user", "content": "u" * 300}, result], truncation="auto")
    assert [message["role"] for message in messages(system)] == ["tool"], "a result without a call stays"
    for kept in ([call], []):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=MODEL, input=[*kept, {**result, "output": "r" * 600}], truncation="auto")
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")


def test_input_tokens_are_counted_without_a_request_to_a_worker(system: System, client: OpenAI) -> None:
    before = len(system.worker.submits)
    counted = client.responses.input_tokens.count(model=MODEL, input="Hi")
    assert counted.input_tokens == client.responses.create(model=MODEL, input="Hi").usage.input_tokens  # type: ignore[union-attr]
    assert len(system.worker.submits) == before + 1


@pytest.mark.by_day(one_in=7, seed=2)
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"tools": [{"type": "Web search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0].type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": 1}, "input"),
        ({"input": [{"type": "custom_tool_call", "id": "a"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "rr1.é"}]}, "input[0].encrypted_content"),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 5}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(limits.MAX_METADATA + 1)}}, "metadata"),
        ({"conversation": "conv_a", "previous_response_id": "resp_a"}, "conversation"),
        ({"previous_response_id": "x" * (limits.MAX_STORED_ID_CHARS + 1)}, "previous_response_id"),
        ({"prompt": {"id": "a"}}, "prompt"),
    ],
)
def test_error_names_the_refused_field(system: System, body: dict[str, Any], param: str) -> None:
    answer = system.post("/v1/responses", {"model": MODEL, "input": "Hi", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_body_budget_includes_stored_items(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    grown: list[int] = []
    grow = RequestBody.grow_by

    async def grow_by(self: RequestBody, size: int) -> None:
        grown.append(size)
        await grow(self, size)

    monkeypatch.setattr(RequestBody, "grow_by", grow_by)
    client, text = system.openai(), "x" * 200
    first = client.responses.create(model=MODEL, input=text)
    second = client.responses.create(model=MODEL, input="On.", previous_response_id=first.id)
    client.responses.create(model=MODEL, input="And on.", previous_response_id=second.id)
    conversation = client.conversations.create(items=[{"type": "message", "role": "user", "content": text}])
    client.responses.create(model=MODEL, input="Well?", conversation=conversation.id)
    assert len(grown) == 3, "a response without a predecessor reads no stored items"
    assert len(text) < grown[0] < grown[1] and grown[2] > len(text)


def test_response_is_not_found_with_another_api_key(store: RedisServer) -> None:
    with System(keys=["alice", "bob"], state_redis_url=store.url) as system:
        alice, bob = (system.openai(api_key=key) for key in ("alice", "bob"))
        first = alice.responses.create(model=MODEL, input="Hi")
        assert alice.responses.create(model=MODEL, input="Hi", previous_response_id=first.id).status == "completed"
        with pytest.raises(openai.NotFoundError):
            bob.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            bob.responses.create(model=MODEL, input="Hi", previous_response_id=first.id)


def test_response_has_store_false_when_the_store_is_down_or_absent(tmp_path_factory: pytest.TempPathFactory) -> None:
    server = RedisServer(folder=tmp_path_factory.mktemp("away"))
    server.start()
    with System(state_redis_url=server.url, state_patience_s=0.3) as system:
        client = system.openai()
        first = client.responses.create(model=MODEL, input="Hi")
        server.wait_until_written()
        server.kill()
        lost = client.responses.with_raw_response.create(model=MODEL, input="Hi")
        assert lost.headers["x-rootstock-stored"] == "false" and lost.parse().store is False
        with pytest.raises(openai.APIStatusError) as refused:
            client.responses.create(model=MODEL, input="Hi", previous_response_id=first.id)
        assert (refused.value.status_code, refused.value.code) == (503, "store_unavailable")
        wait_until(lambda: system.metric("rootstock_gateway_store_up") == 0, "the detected outage of the store")
        server.start()
        stored = client.responses.with_raw_response.create(model=MODEL, input="Hi", previous_response_id=first.id)
        assert "x-rootstock-stored" not in stored.headers and stored.parse().store is True
        wait_until(lambda: system.metric("rootstock_gateway_store_up") == 1, "the return of the store")
        wait_until(
            lambda: system.metric("rootstock_gateway_store_memory_used_bytes") > 1 << 16, "the metric of the store's memory"
        )
        server.kill()
    with System() as system:
        for stream in (False, True):
            lost = system.post("/v1/responses", {"model": MODEL, "input": "Hi", "stream": stream})
            assert lost.headers["x-rootstock-stored"] == "false" and '"store":false' in lost.text
        unwanted = system.post("/v1/responses", {"model": MODEL, "input": "Hi", "store": False})
        assert "x-rootstock-stored" not in unwanted.headers
        with pytest.raises(openai.BadRequestError, match="has no store"):
            system.openai().responses.retrieve("resp_a")
