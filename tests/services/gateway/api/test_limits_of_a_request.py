"""Tests of the resources that a request may use: memory for logprobs and token sets, and time on the event loop."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import orjson
import pytest

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.api import constraints
from rootstock_llm.services.gateway.api.anthropic.translation import prompt_request
from rootstock_llm.services.gateway.api.anthropic.types import CountTokensRequest
from rootstock_llm.services.gateway.api.logprob_forms import SLICE_VALUES, LogprobSlices
from rootstock_llm.services.gateway.api.openai.preparation import completion_generation
from rootstock_llm.services.gateway.api.openai.types import CompletionRequest
from rootstock_llm.services.gateway.api.responses.items import REFERENCE, checked_items, messages_of
from rootstock_llm.services.gateway.api.responses.records import Context, Records, record_of
from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.gateway.generation.logprobs import LogprobRow, LogprobTable
from rootstock_llm.services.gateway.generation.request import (
    GenerationParams,
    GenerationRequest,
    ModelInfo,
    PromptInput,
    check_logprobs,
    logprob_values,
)
from rootstock_llm.services.gateway.store.state_store import StoredRecord
from rootstock_llm.services.shared import limits
from tests.services.gateway.fakes import CONTEXT_LEN, MODEL, VOCAB_SIZE, logprob_rows
from tests.services.gateway.system import System

GENERATE = "/generate"
CONTEXT = 1000


def error_of(answer: Any) -> Any:
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "system", "content": "x" * 400},
                    {"role": "user", "content": [{"type": "text", "text": "é" * 601}]},
                ]
            },
            "messages",
        ),
        ("/v1/completions", {"prompt": ["x" * 400, "é" * 601]}, "prompt"),
        (GENERATE, {"text": ["x" * 400, "é" * 601]}, "text"),
    ],
    ids=["chat", "completion", "generate"],
)
def test_texts_over_the_character_limit_are_not_sent_to_the_tokenizer(
    shared: System, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    """The limit counts the characters of all messages, parts and prompts."""
    monkeypatch.setattr(limits, "MAX_RENDERED_CHARS", 1001)
    calls = len(shared.tokenizer.calls)
    shared.post(path, {"model": MODEL, **body})
    assert len(shared.tokenizer.calls) == calls + 1
    monkeypatch.setattr(limits, "MAX_RENDERED_CHARS", 1000)
    answer = shared.post(path, {"model": MODEL, **body})
    assert answer.status_code == 413 and param in answer.text
    assert len(shared.tokenizer.calls) == calls + 1


MANY_LOGPROBS: dict[str, Any] = {"logprob_token_ids": list(range(256)), "n": 32, "max_tokens": CONTEXT_LEN}


class TestLogprobValues:
    @staticmethod
    def params(**body: Any) -> GenerationParams:
        return completion_generation(CompletionRequest(model=MODEL, prompt="", **body), VOCAB_SIZE)

    def request(self, num_prompts: int, prompt_tokens: int, **body: Any) -> GenerationRequest:
        model, prompt = ModelInfo(MODEL, CONTEXT, VOCAB_SIZE), PromptInput([1] * prompt_tokens, None)
        return GenerationRequest.of(model, [prompt] * num_prompts, self.params(**body))

    @pytest.mark.parametrize(
        ("body", "values"),
        [
            ({"logprobs": 3, "max_tokens": 7}, 28),
            ({"logprobs": 3, "max_tokens": 7, "logprob_token_ids": [1, 2]}, 42),
            ({"logprobs": 0, "max_tokens": 7, "echo": True}, 106),
            ({"logprobs": 1, "max_tokens": 5000}, 1800),
        ],
        ids=["top", "chosen", "echo, except for the first token", "max_tokens above the context"],
    )
    def test_logprob_values_of_a_choice_are_counted_from_the_request_parameters(self, body: dict[str, Any], values: int) -> None:
        assert logprob_values(self.params(**body), 100, CONTEXT) == values

    def test_request_at_the_limit_of_logprob_values_is_accepted(self) -> None:
        max_prompts = limits.MAX_LOGPROB_VALUES // 32  # each choice has 32 log probabilities
        check_logprobs(self.request(max_prompts, 100, logprobs=1, max_tokens=16))
        with pytest.raises(ApiError) as error:
            check_logprobs(self.request(max_prompts + 1, 100, logprobs=1, max_tokens=16))
        assert error.value.param == "logprobs"

    def test_request_without_logprobs_has_no_limit_of_logprob_values(self) -> None:
        check_logprobs(self.request(10_000, 100, max_tokens=900))

    @pytest.mark.parametrize("echo", [False, True])
    def test_completions_over_the_limit_of_logprob_values_are_refused(self, shared: System, echo: bool) -> None:
        before = len(shared.worker.submits)
        error = error_of(shared.complete(logprobs=20, echo=echo, **MANY_LOGPROBS))
        assert error["param"] == "logprobs" and str(limits.MAX_LOGPROB_VALUES) in error["message"]
        assert len(shared.worker.submits) == before

    def test_chats_over_the_limit_of_logprob_values_are_refused(self, shared: System) -> None:
        assert error_of(shared.chat(logprobs=True, top_logprobs=20, **MANY_LOGPROBS))["param"] == "logprobs"

    def test_generate_request_over_the_limit_of_logprob_values_is_refused(self, shared: System) -> None:
        body = {"text": ["Hi"] * 32, "return_logprob": True, "top_logprobs_num": 20, "token_ids_logprob": list(range(256))}
        answer = shared.post(GENERATE, {**body, "sampling_params": {"max_new_tokens": None}})
        assert error_of(answer)["param"] == "return_logprob"

    def test_cumulative_stream_has_a_lower_limit_of_logprob_values(self, shared: System) -> None:
        body = {"text": "Hi", "return_logprob": True, "token_ids_logprob": list(range(256)), "sampling_params": {"n": 4}}
        assert shared.post(GENERATE, body).status_code == 200
        wide = {**body, "sampling_params": {"n": 8}}
        assert shared.post(GENERATE, wide).status_code == 200
        assert error_of(shared.post(GENERATE, {**wide, "stream": True}))["param"] == "return_logprob"


class TestLogprobTable:
    WANTED = pb.Logprobs(top=2, token_ids=[66])

    def test_logprob_table_returns_rows_unchanged(self) -> None:
        table = LogprobTable()
        for tokens in ([10, 11], [12]):
            table.extend(logprob_rows(1, tokens, self.WANTED))
        assert len(table) == 3
        for token, row in zip([11, 12], table.span(1, 3), strict=True):
            expected = logprob_rows(1, [token], self.WANTED)
            assert row.value == expected.values[0] and list(row.chosen_values) == list(expected.chosen_values)
            assert (list(row.top_ids), list(row.top_values)) == (list(expected.top_ids), list(expected.top_values))

    def test_span_of_a_logprob_table_ends_at_the_last_row(self) -> None:
        table = LogprobTable()
        table.extend(logprob_rows(1, [10, 11], self.WANTED))
        assert (len(table.span(1, 9)), len(table.span(5, 9)), list(table.span(1, 0))) == (1, 0, [])

    @pytest.mark.parametrize(
        "rows",
        [
            worker_pb2.LogprobRows(values=[0.0], k=1),
            worker_pb2.LogprobRows(values=[0.0], k=1, top_ids=[1], top_values=[0.0, 0.0]),
            worker_pb2.LogprobRows(values=[0.0, 0.0], chosen_values=[0.0, 0.0, 0.0]),
        ],
        ids=["top tokens missing", "more values than ids", "chosen values not a multiple"],
    )
    def test_logprob_table_refuses_arrays_of_unequal_lengths(self, rows: worker_pb2.LogprobRows) -> None:
        with pytest.raises(ValueError, match="arrays of wrong lengths"):
            LogprobTable().extend(rows)

    def test_logprob_table_refuses_rows_of_another_shape(self) -> None:
        table = LogprobTable()
        table.extend(logprob_rows(1, [10], self.WANTED))
        with pytest.raises(ValueError, match="arrays of wrong lengths"):
            table.extend(logprob_rows(1, [10], pb.Logprobs(top=1, token_ids=[66])))

    def test_logprob_table_stores_four_bytes_per_value(self) -> None:
        tokens, top = 2000, 20
        rows = logprob_rows(1, list(range(tokens)), pb.Logprobs(top=top))
        tracemalloc.start()
        try:
            table = LogprobTable()
            table.extend(rows)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < 1.5 * 4 * tokens * (1 + 2 * top)
        assert len(table) == tokens


Json = dict[str, Any]
NUM_PIECES = 64
PIECE = "x" * 65_536  # text of one of NUM_PIECES items, messages or blocks that become one message


def of_items(items: Sequence[Json]) -> Sequence[Json]:
    return messages_of(checked_items(list(items), "input"))


def of_messages(messages: Sequence[Json]) -> Sequence[Json]:
    return prompt_request(CountTokensRequest(messages=list(messages)), omits_hosted=False).messages


def of_blocks(role: str, blocks: Sequence[Json]) -> Sequence[Json]:
    return of_messages([{"role": role, "content": list(blocks)}])


@pytest.mark.parametrize(
    ("translated", "given"),
    [
        (of_items, {"role": "assistant", "content": PIECE}),
        (of_items, {"type": "reasoning", "summary": [{"text": PIECE}]}),
        (of_messages, {"role": "user", "content": PIECE}),
        (of_messages, {"role": "assistant", "content": [{"type": "thinking", "thinking": PIECE}]}),
        (lambda blocks: of_blocks("user", blocks), {"type": "text", "text": PIECE}),
    ],
    ids=["items", "reasoning items", "messages", "thinking", "blocks"],
)
def test_translation_copies_each_text_once_when_many_become_one_message(
    translated: Callable[[Sequence[Json]], Sequence[Json]], given: Json
) -> None:
    """If a message grew text by text, its old and its new content would be in memory at the same time."""
    tracemalloc.start()
    try:
        (message,) = translated([given] * NUM_PIECES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(text.count("x") for text in message.values() if isinstance(text, str)) == NUM_PIECES * len(PIECE)
    assert peak < 1.5 * NUM_PIECES * len(PIECE)


def test_consecutive_items_become_the_messages_of_a_pairwise_translation() -> None:
    rng = random.Random(2)
    for _ in range(500):
        items = checked_items([_item(rng) for _ in range(rng.randrange(9))], "input")
        pairwise: list[Json] = []
        for item in items:
            (found,) = messages_of([item]) or [{"role": "assistant", "content": None}]
            last = pairwise[-1] if pairwise else {}
            if found["role"] == last.get("role") == "assistant" and ("tool_calls" in found or "tool_calls" not in last):
                pairwise[-1] = _both(last, found, "")
            else:
                pairwise.append(found)
        assert list(messages_of(items)) == [each for each in pairwise if len(each) > 2 or each["content"] is not None], items


def _item(rng: random.Random) -> Json:
    return rng.choice(
        (
            {"role": "user", "content": rng.choice(("", "a"))},
            {"role": "assistant", "content": rng.choice(("", "a", "b"))},
            {"type": "reasoning", "summary": [{"text": rng.choice(("", "c", "d"))}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "e"},
        )
    )


def test_consecutive_messages_become_the_messages_of_a_pairwise_translation() -> None:
    rng = random.Random(3)
    for _ in range(500):
        given = [_message(rng) for _ in range(rng.randrange(1, 9))]
        pairwise: list[Json] = []
        for found in (each for message in given for each in of_messages([message])):
            last = pairwise[-1] if pairwise else {}
            if found["role"] == last.get("role") and found["role"] in ("user", "assistant") and "tool_calls" not in last:
                both = _both(last, found, "\n\n")
                pairwise[-1] = {**both, "content": both["content"] or ""}
            else:
                pairwise.append(found)
        assert list(of_messages(given)) == pairwise, given


def _message(rng: random.Random) -> Json:
    text = {"type": "text", "text": rng.choice(("", "a", "b"))}
    blocks = {
        "user": (text, {"type": "tool_result", "tool_use_id": "1", "content": "c"}),
        "assistant": (
            *(text, {"type": "thinking", "thinking": rng.choice(("", "d", "e"))}),
            {"type": "tool_use", "id": "1", "name": "f", "input": {}},
        ),
        "system": (text,),
    }
    role = rng.choice(tuple(blocks))
    return {"role": role, "content": rng.choices(blocks[role], k=rng.randrange(4))}


def _both(first: Json, second: Json, separator: str) -> Json:
    """Returns one message with the texts and the calls of two assistant or user messages."""
    both = {"role": first["role"], "content": None}
    for name in ("content", "reasoning_content"):
        texts = [each[name] for each in (first, second) if each.get(name) is not None]
        if texts:
            both[name] = separator.join(text for text in texts if text)
    calls = [call for each in (first, second) for call in each.get("tool_calls", ())]
    return {**both, "tool_calls": calls} if calls else both


class FakeStore:
    """Has one stored response with `num_items` output items of about `size` bytes, and counts the reads."""

    def __init__(self, num_items: int, size: int) -> None:
        output = [{"id": f"msg_{'a' * 32}{index:04x}", "text": "x" * size} for index in range(num_items)]
        self.response_id = f"resp_{'a' * 32}"
        self.item_ids = [item["id"] for item in output]
        self.num_reads = 0
        self._content = orjson.dumps(record_of({"id": self.response_id, "output": output}, [], (), 0))

    async def get(self, owner: str, names: Sequence[str]) -> list[StoredRecord | None]:
        self.num_reads += len(names)
        return [StoredRecord(self._content, 1) if name == self.response_id else None for name in names]

    def resolved(self, item_ids: Sequence[str], before: Context | None = None) -> tuple[list[Json], int]:
        """Returns the items of a request with references to these items, and the number of reserved bytes."""
        reserved = []

        async def reserve(size: int) -> None:
            reserved.append(size)

        items = checked_items([{"type": REFERENCE, "id": item_id} for item_id in item_ids], "input")
        records = Records(self, retry_after_s=1)  # type: ignore[arg-type]
        return asyncio.run(records.resolved("owner", items, before or Context(), reserve)), sum(reserved)


class TestItemReferences:
    def test_request_reads_a_response_once_when_many_references_name_its_items(self) -> None:
        store = FakeStore(num_items=2, size=1000)
        found, reserved = store.resolved(store.item_ids * 1000)
        assert [item["id"] for item in found] == store.item_ids * 1000
        assert store.num_reads == 1
        assert len({id(item) for item in found}) == 2
        assert 2000 * 1000 < reserved < 2000 * 1100

    def test_reference_reserves_no_bytes_when_the_context_has_the_item(self) -> None:
        store = FakeStore(num_items=1, size=1000)
        assert store.resolved(store.item_ids, Context([{"id": store.item_ids[0]}])) == ([], 0)
        assert store.num_reads == 0

    def test_references_get_413_when_their_items_exceed_the_limit_together(self) -> None:
        size = limits.MAX_CHAIN_BYTES // 64
        store = FakeStore(num_items=1, size=size)
        assert len(store.resolved(store.item_ids * 63)[0]) == 63
        with pytest.raises(ApiError) as refused:
            store.resolved(store.item_ids * 64)
        assert (refused.value.status, refused.value.param, refused.value.code) == (413, "input", "request_too_large")

    def test_error_names_the_first_reference_without_an_item(self) -> None:
        store = FakeStore(num_items=1, size=1)
        for missing in (f"msg_{'a' * 32}0001", f"msg_{'b' * 36}", "msg_1"):
            with pytest.raises(ApiError) as refused:
                store.resolved([*store.item_ids, missing, "msg_2"])
            assert (refused.value.status, refused.value.param, refused.value.code) == (404, "input[1].id", "item_not_found")


class KnownTexts:
    """Returns the same text for every token immediately."""

    async def of(self, ids: Collection[int]) -> Mapping[int, bytes]:
        return dict.fromkeys(ids, b"x")


def test_event_loop_runs_other_tasks_between_slices_of_logprobs() -> None:
    slices = 5
    entries = [(token, LogprobRow(0.0, (), (), ())) for token in range(slices * SLICE_VALUES)]
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> list[int]:
        task = asyncio.create_task(other())
        sizes = [len(batch) async for batch, _ in LogprobSlices(0, (), KnownTexts()).of(entries)]  # type: ignore[arg-type]
        task.cancel()
        return sizes

    assert asyncio.run(run()) == [SLICE_VALUES] * slices
    assert turns >= slices


def test_slice_of_logprobs_has_fewer_tokens_when_each_token_has_more_values() -> None:
    async def run() -> list[int]:
        entries = [(token, None) for token in range(100)]
        return [len(batch) async for batch, _ in LogprobSlices(20, range(256), None).of(entries)]

    assert max(asyncio.run(run())) == SLICE_VALUES // 277


FULL_SET = list(range(limits.MAX_TOKEN_ID_SET))
# Number of choices that may each have a token set of the maximum size.
CHOICES = limits.MAX_REQUEST_SET_IDS // limits.MAX_TOKEN_ID_SET


class TestTokenSets:
    def test_worker_receives_token_sets_in_ascending_order_without_duplicates(self, shared: System) -> None:
        assert shared.chat(allowed_token_ids=[9, 7, 9, 0], banned_token_ids=[5, 5]).status_code == 200
        sampling = shared.worker.submits[-1].sampling
        assert (list(sampling.allowed_token_ids), list(sampling.banned_token_ids)) == ([0, 7, 9], [5])
        params = {"allowed_token_ids": [9, 7, 9, 0], "banned_token_ids": [5, 5]}
        assert shared.post(GENERATE, {"text": "Hi", "sampling_params": params}).status_code == 200
        sampling = shared.worker.submits[-1].sampling
        assert (list(sampling.allowed_token_ids), list(sampling.banned_token_ids)) == ([0, 7, 9], [5])

    def test_chats_over_the_limit_of_token_sets_are_refused(self, shared: System) -> None:
        assert error_of(shared.chat(banned_token_ids=FULL_SET, n=CHOICES + 1))["param"] == "banned_token_ids"

    def test_completions_over_the_limit_of_token_sets_are_refused(self, shared: System) -> None:
        body = {"allowed_token_ids": FULL_SET, "max_tokens": 1}
        assert error_of(shared.complete(prompt=["a"] * (CHOICES + 1), **body))["param"] == "allowed_token_ids"
        assert shared.complete(prompt=["a"] * CHOICES, **body).status_code == 200

    def test_generate_request_over_the_limit_of_token_sets_is_refused(self, shared: System) -> None:
        body = {"text": ["a"] * (CHOICES + 1), "sampling_params": {"allowed_token_ids": FULL_SET}}
        assert error_of(shared.post(GENERATE, body))["param"] == "sampling_params.allowed_token_ids"

    def test_generate_request_is_refused_when_separate_token_sets_of_the_prompts_exceed_the_limit(self, shared: System) -> None:
        count = CHOICES + 1
        body = {"text": ["a"] * count, "sampling_params": [{"banned_token_ids": FULL_SET}] * count}
        assert error_of(shared.post(GENERATE, body))["param"] == f"sampling_params[{count - 1}].banned_token_ids"


class TestCheapChecks:
    """Checks of lengths and numbers run before the elements of a long value are read, so the error names the length or number."""

    LONG: list[Any] = [1] + ["x"] * CONTEXT_LEN

    @pytest.mark.by_day(one_in=2)
    @pytest.mark.parametrize("prompt", [LONG, [[1], LONG, [VOCAB_SIZE]]], ids=["ids", "lists of ids"])
    def test_list_of_ids_longer_than_the_context_is_refused(self, shared: System, prompt: Any) -> None:
        assert error_of(shared.complete(prompt=prompt))["code"] == "context_length_exceeded"
        assert error_of(shared.post(GENERATE, {"input_ids": prompt}))["code"] == "context_length_exceeded"
        answer = shared.post("/v1/embeddings", {"model": MODEL, "input": prompt})
        assert error_of(answer)["code"] == "context_length_exceeded"

    def test_number_of_content_parts_of_a_message_is_limited(self, shared: System) -> None:
        message = {"role": "user", "content": [5] * (limits.MAX_CONTENT_PARTS + 1)}
        assert error_of(shared.chat(messages=[message]))["param"] == "messages[0].content"

    def test_number_of_content_parts_of_all_messages_is_limited(self, shared: System) -> None:
        part = {"type": "text", "text": ""}
        count = limits.MAX_REQUEST_CONTENT_PARTS // limits.MAX_CONTENT_PARTS
        full = [{"role": "user", "content": [part] * limits.MAX_CONTENT_PARTS}] * count
        error = error_of(shared.chat(messages=[*full, {"role": "user", "content": [5]}]))
        assert error["param"] == "messages" and "parts" in error["message"]

    def test_large_guided_choice_is_refused_before_the_grammar_is_written(self, monkeypatch: pytest.MonkeyPatch) -> None:
        written: list[str] = []
        monkeypatch.setattr(constraints, "_literal", lambda text: written.append(text) or '""')
        half = "a" * (limits.MAX_GRAMMAR_BYTES // 2 + 1)
        with pytest.raises(ApiError) as error:
            constraints.choice([half, half + "b"], "guided_choice")
        assert error.value.param == "guided_choice" and not written

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("text", ["x"] * limits.MAX_BATCH_PROMPTS + [5]),
            ("input_ids", [[1]] * limits.MAX_BATCH_PROMPTS + [5]),
        ],
    )
    def test_number_of_prompts_is_limited(self, shared: System, field: str, value: Any) -> None:
        error = error_of(shared.post(GENERATE, {field: value}))
        assert error["param"] == field and str(limits.MAX_BATCH_PROMPTS) in error["message"]

    def test_request_is_refused_when_the_numbers_of_request_ids_and_prompts_differ(self, shared: System) -> None:
        error = error_of(shared.post(GENERATE, {"text": "Hi", "rid": ["a", 5]}))
        assert "one entry for each prompt" in error["message"]
