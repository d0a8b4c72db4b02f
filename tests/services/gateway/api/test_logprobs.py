"""Tests of logprobs over HTTP, in OpenAI's two forms. Each streamed chunk has the logprobs of its own text."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.api.logprob_forms import TextOffsets
from rootstock_llm.services.gateway.api.openai.render import best_of
from rootstock_llm.services.gateway.generation.logprobs import LogprobTable
from rootstock_llm.services.gateway.generation.request import PromptInput, one_step
from tests.services.gateway.fakes import EOS, MODEL, chosen_of, ids_of, logprob_of, tops_of
from tests.services.gateway.system import System, chat_body, events, wait_until

ANSWER = "Hello, world!"
TOKENS = [*ids_of(ANSWER), EOS]
NAMES = [*ANSWER, "<eos>"]


def expected_entry(token: int, value: float) -> dict[str, Any]:
    text = "<eos>" if token == EOS else chr(token)
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


def chat_entries(chunks: list[Any]) -> list[Any]:
    return [entry for c in chunks if c["choices"][0]["logprobs"] for entry in c["choices"][0]["logprobs"]["content"]]


@pytest.fixture
def half_characters(shared: System) -> Iterator[dict[int, bytes]]:
    """Gives two tokens texts that are parts of one character."""
    halves = {ord("H"): "é".encode()[:1], ord("e"): "é".encode()[1:]}
    before = dict(shared.detokenizer.bytes_of)
    shared.do(lambda: shared.detokenizer.bytes_of.update(halves))
    shared.do(lambda: shared.gateway.service.token_texts._models.clear())
    yield halves
    shared.do(lambda: setattr(shared.detokenizer, "bytes_of", before))
    shared.do(lambda: shared.gateway.service.token_texts._models.clear())


class TestChat:
    def test_every_token_has_a_logprob_and_top_logprobs(self, shared: System) -> None:
        choice = shared.openai().chat.completions.create(model=MODEL, **chat_body(logprobs=True, top_logprobs=2)).choices[0]
        content = choice.logprobs.content
        assert [entry.model_dump(exclude={"top_logprobs"}) for entry in content] == [
            expected_entry(t, logprob_of(t)) for t in TOKENS
        ]
        for token, entry in zip(TOKENS, content, strict=True):
            assert [top.model_dump() for top in entry.top_logprobs] == [expected_entry(*top) for top in tops_of(token, 2)]

    def test_top_logprobs_are_empty_by_default(self, shared: System) -> None:
        content = shared.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
        assert [entry["top_logprobs"] for entry in content] == [[]] * len(TOKENS)

    def test_logprobs_are_null_by_default(self, shared: System) -> None:
        assert shared.chat().json()["choices"][0]["logprobs"] is None
        assert not shared.worker.submits[-1].sampling.HasField("logprobs")

    def test_chat_has_logprobs_of_the_requested_ids(self, shared: System) -> None:
        content = shared.chat(logprobs=True, logprob_token_ids=[70, 66]).json()["choices"][0]["logprobs"]["content"]
        expected = [{"token_id": i, **expected_entry(i, chosen_of(i))} for i in (70, 66)]
        assert all(entry["requested_logprobs"] == expected for entry in content)

    def test_stream_has_the_logprobs_of_the_whole_response(self, shared: System) -> None:
        whole = shared.chat(logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
        chunks = events(shared.chat(logprobs=True, top_logprobs=1, stream=True).text)
        assert chat_entries(chunks) == whole

    def test_stream_chunk_has_the_logprobs_of_the_text_in_that_chunk(self, shared: System) -> None:
        """Logprobs of text that is held back for a stop string are held back as well."""
        chunks = events(shared.chat(logprobs=True, stream=True, stop="o, earth").text)
        for chunk in chunks[1:]:
            choice = chunk["choices"][0]
            entries = choice["logprobs"]["content"]
            names = "".join(entry["token"] for entry in entries if entry["token"] != "<eos>")
            assert names == choice["delta"].get("content", "")
        assert len(chat_entries(chunks)) == len(TOKENS)

    @pytest.mark.by_day(one_in=2)
    @pytest.mark.parametrize("merge", [2, 5])
    def test_logprobs_keep_their_order_when_steps_are_merged(self, shared: System, merge: int) -> None:
        shared.worker.merge = merge
        try:
            content = chat_entries(events(shared.chat(logprobs=True, stream=True).text))
        finally:
            shared.worker.merge = 1
        assert [entry["token"] for entry in content] == NAMES

    def test_chat_token_has_bytes_when_the_token_is_part_of_a_character(
        self, shared: System, half_characters: dict[int, bytes]
    ) -> None:
        content = shared.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in content[:2]] == [list(text) for text in half_characters.values()]
        assert content[0]["token"] == "\ufffd"

    def test_every_choice_has_logprobs(self, shared: System) -> None:
        choices = shared.chat(logprobs=True, n=3).json()["choices"]
        assert [len(choice["logprobs"]["content"]) for choice in choices] == [len(TOKENS)] * 3


class TestCompletion:
    def test_logprobs_of_a_completion_have_four_columns(self, shared: System) -> None:
        choice = shared.openai().completions.create(model=MODEL, prompt="Hi", logprobs=1).choices[0]
        assert choice.logprobs.tokens == NAMES
        assert choice.logprobs.token_logprobs == [logprob_of(token) for token in TOKENS]
        assert choice.logprobs.text_offset == list(range(len(TOKENS)))
        assert choice.logprobs.top_logprobs == [{name: logprob_of(t)} for name, t in zip(NAMES, TOKENS, strict=True)]

    def test_completion_with_logprobs_0_has_the_logprob_of_the_sampled_token(self, shared: System) -> None:
        logprobs = shared.complete(logprobs=0).json()["choices"][0]["logprobs"]
        assert logprobs["top_logprobs"] == [{name: logprob_of(t)} for name, t in zip(NAMES, TOKENS, strict=True)]

    def test_echo_returns_the_prompt_logprobs(self, shared: System) -> None:
        choice = shared.complete(prompt="Once", echo=True, logprobs=2, max_tokens=2).json()["choices"][0]
        assert choice["text"] == "OnceHe"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == list("OnceHe")
        assert logprobs["token_logprobs"] == [None, *(logprob_of(ord(char)) for char in "nceHe")]
        assert logprobs["top_logprobs"][0] is None
        assert [set(tops) for tops in logprobs["top_logprobs"][1:]] == [{char, chr(ord(char) + 1)} for char in "nceHe"]
        assert logprobs["text_offset"] == list(range(6))
        assert shared.worker.submits[-1].sampling.logprobs.prompt_from == 0

    @pytest.mark.parametrize("prompt", ["a", ["a", "bcd"]], ids=["one token", "two prompts"])
    def test_echo_returns_the_logprobs_of_one_token_prompts_and_of_several_prompts(self, shared: System, prompt: Any) -> None:
        choices = shared.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=1).json()["choices"]
        prompts = [prompt] if isinstance(prompt, str) else prompt
        assert [choice["logprobs"]["tokens"] for choice in choices] == [[*text, "H"] for text in prompts]

    def test_text_offsets_skip_special_tokens(self, shared: System) -> None:
        """The text omits special tokens."""
        choice = shared.complete(prompt=[EOS, *ids_of("ab"), EOS, EOS, *ids_of("c")], echo=True, logprobs=0, max_tokens=2).json()
        (choice,) = choice["choices"]
        assert choice["text"] == "abcHe"
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 2, 2, 3, 4]
        names = [name for name in choice["logprobs"]["tokens"] if name != "<eos>"]
        assert "".join(names) == choice["text"]

    @pytest.mark.parametrize(
        "prefix, tokens, offsets",
        [
            ("Hi you", ["<s>", " Hi", " you"], [0, 0, 2]),
            ("<s>Hi", ["<s>", "<s>", "Hi"], [0, 3, 3]),
            ("ﬁt ok", ["fi", "t", " ok"], [0, 0, 2]),
            ("a世b", ["a", "世".encode()[:1], "世".encode()[1:], "b", "!"], [0, 1, 1, 2, 3]),
        ],
        ids=[
            "special token that the text omits",
            "special token in the text after one that it omits",
            "normalized",
            "bytes",
        ],
    )
    def test_echo_returns_the_text_offsets_of_prompt_tokens(
        self, prefix: str, tokens: list[str | bytes], offsets: list[int]
    ) -> None:
        steps = TextOffsets(prefix)
        assert [steps.step(text if isinstance(text, bytes) else text.encode()) for text in tokens] == offsets

    def test_completion_with_best_of_returns_the_n_best_choices(self, shared: System) -> None:
        answer = shared.complete(n=2, best_of=5, max_tokens=3).json()
        assert "choices" in answer, answer
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert all(choice["logprobs"] is None for choice in answer["choices"])
        assert answer["usage"]["completion_tokens"] == 5 * 3
        (one,) = shared.complete(best_of=2, max_tokens=3, logprobs=1).json()["choices"]
        assert len(one["logprobs"]["tokens"]) == 3

    def test_completion_with_best_of_sorts_the_choices_by_mean_logprob(self) -> None:
        params = replace(one_step(pb.SamplingParams(), None), best=2)

        def delta(prompt: PromptInput, *values: float) -> Any:
            table = LogprobTable()
            table.extend(worker_pb2.LogprobRows(values=values))
            choice = SimpleNamespace(prompt=prompt, params=params)
            return SimpleNamespace(choice=choice, logprobs=table.span(0, len(values)))

        first, second = (PromptInput([number], None) for number in (1, 2))
        deltas = [delta(first, -1.0, -3.0), delta(first, -1.5), delta(first, -9.0), delta(second), delta(second, -8.0)]
        assert best_of(deltas) == [deltas[1], deltas[0], deltas[4], deltas[3]]

    @pytest.mark.parametrize("body", [{"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}], ids=["fewer than n", "streamed"])
    def test_impossible_value_of_best_of_is_refused(self, shared: System, body: dict[str, Any]) -> None:
        answer = shared.complete(**body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "best_of"

    def test_stream_with_echo_has_the_logprobs_of_the_whole_response(self, shared: System) -> None:
        body = {"prompt": "Once", "echo": True, "logprobs": 1, "max_tokens": 3}
        whole = shared.complete(**body).json()["choices"][0]["logprobs"]
        chunks = events(shared.complete(**body, stream=True).text)
        assert len(chunks) > 1
        for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [value for c in chunks for value in c["choices"][0]["logprobs"][column]] == whole[column]

    def test_completion_has_logprobs_of_the_requested_ids(self, shared: System) -> None:
        logprobs = shared.complete(logprobs=0, logprob_token_ids=[70], max_tokens=2).json()["choices"][0]["logprobs"]
        assert logprobs["requested_logprobs"] == [{"70": chosen_of(70)}] * 2

    def test_completion_token_is_named_by_bytes_when_the_token_is_part_of_a_character(
        self, shared: System, half_characters: dict[int, bytes]
    ) -> None:
        logprobs = shared.complete(logprobs=0, max_tokens=3).json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "l"]
        assert logprobs["text_offset"] == [0, 0, 1]


def test_response_is_complete_when_the_request_ends_at_the_worker_before_token_texts_arrive(system: System) -> None:
    system.do(system.detokenizer.text_gate.clear)
    with ThreadPoolExecutor() as pool:
        pending = pool.submit(system.chat, logprobs=True, stream=True)
        wait_until(
            lambda: bool(system.detokenizer.text_calls) and not system.worker.running, "the end of the request at the worker"
        )
        system.do(system.detokenizer.text_gate.set)
        chunks = events(pending.result().text)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert [entry["token"] for entry in chat_entries(chunks)] == NAMES


def test_text_of_each_token_is_requested_once_from_the_detokenizer(system: System) -> None:
    system.chat(logprobs=True)
    first = [token for call in system.detokenizer.text_calls for token in call]
    assert sorted(first) == sorted(set(TOKENS))
    system.chat(logprobs=True, n=2, stream=True)
    assert sum(map(len, system.detokenizer.text_calls)) == len(first)


def test_token_texts_are_not_requested_without_logprobs(system: System) -> None:
    system.chat(stream=True, return_token_ids=True)
    assert system.detokenizer.text_calls == []


def test_tokens_of_probability_0_have_finite_logprobs(shared: System, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.services.gateway import fakes

    monkeypatch.setattr(fakes, "logprob_of", lambda token: float("-inf"))
    answer = shared.chat(logprobs=True)
    assert all(e["logprob"] == -9999.0 for e in orjson.loads(answer.content)["choices"][0]["logprobs"]["content"])


def test_only_the_request_with_logprobs_fails_when_the_worker_omits_logprobs(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.services.gateway import fakes

    monkeypatch.setattr(fakes, "logprob_rows", lambda handle, tokens, wanted: fakes.worker_pb2.LogprobRows(handle=handle))
    assert system.chat(logprobs=True).status_code == 500
    assert system.chat().status_code == 200
