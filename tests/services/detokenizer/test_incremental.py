"""The text of a request is the reference's, whatever the ids are and however they are split."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.incremental import IncrementalDetokenizer
from services.shared.hf_tokenizer import HfTokenizer
from tests.services.tokenizer.model_folders import KINDS

BYTE_ID = 1000  # byte_fallback: id of <0x00>
TEXTS = st.text(st.sampled_from("hello wörld 你好，\n\t→😀👩‍🚀é �.,!?'<>"), max_size=30)


def decode_all(tokenizer: HfTokenizer, tail: Sequence[int], ids: Sequence[int], cuts: Sequence[int], skip: bool = True) -> str:
    decoder = IncrementalDetokenizer(tokenizer, tail, skip)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [decoder.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return "".join(pieces) + decoder.finish()


def reference(tokenizer: HfTokenizer, tail: Sequence[int], ids: Sequence[int], skip: bool) -> str:
    """What the ids add to the text of the tail, where the tail ends no character in its middle."""
    before = tokenizer.decode(tail, skip)
    return tokenizer.decode([*tail, *ids], skip)[len(before) :]


def with_ids(kind: str) -> st.SearchStrategy[list[int]]:
    """Any ids of the vocabulary and a few outside it, lone bytes often."""
    top = {"byte_level": 620, "byte_fallback": 400, "wordpiece": 420, "unigram": 320}[kind]
    some = [st.integers(0, top)]
    if kind == "byte_level":
        some.append(st.integers(3, 260))
    return st.lists(st.one_of(some), max_size=40)


CUTS = st.lists(st.integers(0, 40), max_size=12)


@pytest.mark.by_day(one_in=4, seed=4)
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), cuts=CUTS, skip=st.booleans())
def test_any_ids_without_prompt_give_decode_of_all_ids(
    tokenizers: dict[str, HfTokenizer], kind: str, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    tokenizer, ids = tokenizers[kind], data.draw(with_ids(kind))
    assert decode_all(tokenizer, [], ids, cuts, skip) == tokenizer.decode(ids, skip)


@pytest.mark.by_day(one_in=4, seed=2)
@pytest.mark.parametrize("kind", KINDS)
@given(prompt=TEXTS, data=st.data(), cuts=CUTS, skip=st.booleans())
def test_after_a_prompt_the_first_piece_keeps_its_space(
    tokenizers: dict[str, HfTokenizer], kind: str, prompt: str, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    tokenizer, ids = tokenizers[kind], data.draw(with_ids(kind))
    tail = tokenizer.encode_batch([prompt], True)[0][-5:]
    if kind == "byte_fallback" and any(tokenizer.token_bytes(i) for i in tail):
        tail = []  # a tail that begins inside a character: its own test below
    if kind == "byte_level" and tokenizer.decode(tail, skip).startswith("�"):
        tail = []
    assert decode_all(tokenizer, tail, ids, cuts, skip) == reference(tokenizer, tail, ids, skip)


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=TEXTS, cuts=CUTS)
def test_valid_text_comes_out_as_it_went_in(tokenizers: dict[str, HfTokenizer], kind: str, text: str, cuts: list[int]) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode_batch([text], False)[0]
    assert decode_all(tokenizer, [], ids, cuts) == tokenizer.decode(ids, True) == text


@given(runs=st.lists(st.one_of(st.binary(max_size=9), st.lists(st.integers(0, 300), max_size=4)), max_size=8), cuts=CUTS)
def test_byte_runs_keep_valid_characters_and_replace_each_other_byte(
    tokenizers: dict[str, HfTokenizer], runs: list[bytes | list[int]], cuts: list[int]
) -> None:
    tokenizer = tokenizers["byte_fallback"]
    tail = tokenizer.encode_batch(["x"], False)[0]
    ids, want, run = [], "", b""
    for part in runs:
        ids += [BYTE_ID + byte for byte in part] if isinstance(part, bytes) else part
    for token_id in ids:
        if token_id >= BYTE_ID:
            run += bytes([token_id - BYTE_ID])
        elif token_id not in tokenizer.special_ids and tokenizer.token_bytes(token_id) != b"":
            want += run.decode("utf-8", "rootstock-replace-each-byte") + tokenizer.decode([*tail, token_id], True)[1:]
            run = b""
    want += run.decode("utf-8", "rootstock-replace-each-byte")
    assert decode_all(tokenizer, tail, ids, cuts) == want


def test_a_character_begun_in_the_prompt_is_completed(tokenizers: dict[str, HfTokenizer]) -> None:
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = tokenizers[kind]
        ids = byte_ids(tokenizer, "a好b".encode())
        assert decode_all(tokenizer, ids[:2], ids[2:], []) == "好b"


def test_a_word_after_leading_bytes_keeps_its_space(tokenizers: dict[str, HfTokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    hello = tokenizer.encode_batch(["hello"], False)[0]
    ids = byte_ids(tokenizer, "你".encode()) + hello
    assert decode_all(tokenizer, [], ids, [1, 3]) == tokenizer.decode(ids, True) == "你 hello"


def byte_ids(tokenizer: HfTokenizer, data: bytes) -> list[int]:
    """One id per byte."""
    if not tokenizer.is_byte_level:
        return [BYTE_ID + byte for byte in data]
    by_bytes = {tokenizer.token_bytes(i): i for i in range(260) if i not in tokenizer.special_ids}
    return [by_bytes[bytes([byte])] for byte in data]


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_held_back_only_while_a_character_can_still_be_completed(tokenizers: dict[str, HfTokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    steps = {
        "nothing until the last byte": ("😀".encode(), ["", "", "", "😀"]),
        "an ASCII character ends the wait": (b"\xf0\x9fa", ["", "", "��a" if kind == "byte_fallback" else "�a"]),
        "a byte that begins nothing is decided at once": (b"\xff\xff\xff", ["�", "�", "�"]),
        "a fresh start of a character": (b"\xe4\xe4\xbd\xa0", ["", "�", "", "你"]),
    }
    for name, (data, want) in steps.items():
        decoder = IncrementalDetokenizer(tokenizer, byte_ids(tokenizer, b"x"), True)
        assert [decoder.push([i]) for i in byte_ids(tokenizer, data)] == want, name


@pytest.mark.by_day(one_in=3, seed=2)
@pytest.mark.parametrize("kind", ["byte_fallback", "unigram", "wordpiece"])
def test_the_cost_of_a_token_does_not_grow(
    tokenizers: dict[str, HfTokenizer], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizers[kind]
    longest = 0

    def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return HfTokenizer.decode(tokenizer, ids, skip_special_tokens)

    decoder = IncrementalDetokenizer(tokenizer, [], True)
    decoder.push(list(range(5, 250)) * 40)
    monkeypatch.setattr(tokenizer, "decode", decode)
    for token_id in list(range(5, 250)) * 4:
        decoder.push([token_id])
    assert longest <= 16
