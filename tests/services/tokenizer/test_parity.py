"""Tests that token ids equal those of transformers' AutoTokenizer for the same folder."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock_llm.protos import tokenizer_pb2 as pb
from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer, load_tokenizer
from tests.services.tokenizer.model_folders import KINDS, byte_level, unigram
from tests.services.tokenizer.serving import serving

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\n\n\tand a tab ",
    "你好，世界 😀 é",
    "<|im_start|>system\nobey<|im_end|> <s> </s> [CLS] <extra_0>",
    "<think>aloud</think> → arrow <tool>",
    "a" * 5000,
]


@pytest.fixture(scope="session")
def pairs(folders: dict[str, Path]) -> dict[str, tuple[HfTokenizer, Any]]:
    """Returns our tokenizer and that of transformers, by kind."""
    return {kind: (load_tokenizer(f), transformers.AutoTokenizer.from_pretrained(f)) for kind, f in folders.items()}


@pytest.mark.by_day(one_in=2, seed=23)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_token_ids_of_texts_equal_the_ids_of_transformers(
    folders: dict[str, Path], pairs: dict[str, tuple[HfTokenizer, Any]], kind: str, add_special_tokens: bool
) -> None:
    async def run() -> None:
        async with serving(folders[kind]) as service:
            request = pb.EncodeRequest(request_id="r", texts=TEXTS)
            if not add_special_tokens:
                request.add_special_tokens = False
            answer = await service.stub.Encode(request)
            reference = pairs[kind][1](TEXTS, add_special_tokens=add_special_tokens).input_ids
            assert [list(prompt.ids) for prompt in answer.prompts] == reference

    asyncio.run(run())


ALPHABET = st.sampled_from([*"helo wrd,.!?'\n\t 你好é😀", "<|im_end|>", "<s>", "</s>", "[MASK]", "<extra_1>", "<think>", "▁"])


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(text=st.lists(ALPHABET, max_size=30).map("".join))
def test_tokenizer_gives_the_ids_of_transformers_for_any_text(
    pairs: dict[str, tuple[HfTokenizer, Any]], kind: str, text: str
) -> None:
    ours, reference = pairs[kind]
    ids = ours.encode_batch([text], True)[0]
    assert ids == reference(text).input_ids
    assert ours.decode(ids, True) == reference.decode(ids, skip_special_tokens=True)
    assert ours.decode([i for i in ids if i not in ours.special_ids], False) == ours.decode(ids, True)


@pytest.mark.by_day(one_in=4)
@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_equal_the_special_tokens_of_transformers(pairs: dict[str, tuple[HfTokenizer, Any]], kind: str) -> None:
    ours, reference = pairs[kind]
    assert ours.special_tokens == reference.special_tokens_map
    assert sorted(ours.special_ids) == sorted(i for i, token in reference.added_tokens_decoder.items() if token.special)
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (
        reference.bos_token_id,
        reference.eos_token_id,
        reference.pad_token_id,
    )
    assert ours.vocab_size == len(reference)


TOOL = {"type": "function", "function": {"name": "<add>", "parameters": {"type": "object", "b": 1, "a": "é"}}}
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one turn": ([{"role": "user", "content": "hello there"}], {}),
    "null values": ([{"role": "user", "content": "hi", "name": None, "tool_calls": None}], {}),
    "special token text": ([{"role": "user", "content": "<|im_end|></s>[SEP]"}], {}),
    "three turns": (
        [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "你好"}],
        {},
    ),
    "no generation prompt": ([{"role": "user", "content": "hi"}], {"add_generation_prompt": False}),
    "tools": ([{"role": "user", "content": "hi"}], {"tools": [TOOL]}),
    "continued": (
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, "}],
        {"continue_final_message": True},
    ),
}


# Each chat is tested with one kind of tokenizer, because rendering does not depend on the kind. The chat with special tokens is
# tested with every kind, because each kind has different special tokens.
CHATS_BY_KIND = [
    *((name, kind) for name, kind in zip(CHATS, itertools.cycle(KINDS))),
    *(("special token text", kind) for kind in KINDS),
]


@pytest.mark.by_day(one_in=2, seed=49)
@pytest.mark.parametrize(("name", "kind"), sorted(set(CHATS_BY_KIND)))
def test_token_ids_of_chats_equal_the_ids_of_transformers(
    folders: dict[str, Path], pairs: dict[str, tuple[HfTokenizer, Any]], kind: str, name: str
) -> None:
    messages, options = CHATS[name]
    theirs_options = {"add_generation_prompt": not options.get("continue_final_message", False), **options}
    reference = pairs[kind][1].apply_chat_template(messages, tokenize=True, **theirs_options).input_ids
    tools = options.get("tools")
    flags = {key: value for key, value in options.items() if key != "tools"}
    request = pb.EncodeChatRequest(
        messages_json=json.dumps(messages, indent=1).encode(), tools_json=json.dumps(tools).encode() if tools else b"", **flags
    )

    async def run() -> None:
        async with serving(folders[kind]) as service:
            assert list((await service.stub.EncodeChat(request)).prompts[0].ids) == reference

    asyncio.run(run())


def test_tokens_declared_outside_tokenizer_json_equal_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Compares tokens that only tokenizer_config.json or special_tokens_map.json declares."""
    text = "a <new> b <also> c <map> d <think> e"
    token = {"lstrip": True, "rstrip": True, "normalized": False, "single_word": False, "special": True}
    decoder = {"700": {"content": "<new>", **token}, "701": {"content": "<also>", **token, "special": False}}
    configs: dict[str, dict[str, Any]] = {
        "added_tokens_decoder": {"added_tokens_decoder": decoder, "bos_token": "<new>"},
        "special_tokens_map": {},
        "a special token that was not special": {"eos_token": "<think>", "additional_special_tokens": ["<also>"]},
        "serialized tokens": {"bos_token": {"__type": "AddedToken", "content": "<new>", **token}},
    }
    for name, config in configs.items():
        folder = byte_level(tmp_path / name)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        if not config:
            (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<map>", **token}}))
        ours, reference = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
        ids = ours.encode_batch([text], True)[0]
        assert ids == reference(text).input_ids, name
        assert ours.decode(ids, True) == reference.decode(ids, skip_special_tokens=True), name
        assert ours.decode([i for i in ids if i not in ours.special_ids], False) == ours.decode(ids, True), name
        assert ours.special_tokens == reference.special_tokens_map, name


def test_tool_template_is_used_for_chats_with_tools(tmp_path: Path) -> None:
    folder = unigram(tmp_path / "model", template=None)
    path = folder / "tokenizer_config.json"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "x"}]

    async def run() -> None:
        async with serving(folder) as service:
            for tools in (None, [TOOL]):
                request = pb.EncodeChatRequest(
                    messages_json=json.dumps(messages).encode(), tools_json=json.dumps(tools).encode() if tools else b""
                )
                want = reference.apply_chat_template(messages, tools=tools, tokenize=True).input_ids
                assert list((await service.stub.EncodeChat(request)).prompts[0].ids) == want

    asyncio.run(run())
