"""Tests of the incremental text of a request, of text held back for stop strings, and of the texts of single tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootstock_llm.services.detokenizer.text import IncrementalDetokenizer, StopStringBuffer, TokenTexts
from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer
from tests.services.tokenizer.model_folders import KINDS

BYTE_ID = 1000  # id of <0x00> in the byte_fallback tokenizer
TEXTS = st.text(st.sampled_from("hello wörld 你好，\n\t→😀👩‍🚀é �.,!?'<>"), max_size=30)


def decode_all(tokenizer: HfTokenizer, tail: Sequence[int], ids: Sequence[int], cuts: Sequence[int], skip: bool = True) -> str:
    decoder = IncrementalDetokenizer(tokenizer, tail, skip)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [decoder.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return "".join(pieces) + decoder.finish()


def reference(tokenizer: HfTokenizer, tail: Sequence[int], ids: Sequence[int], skip: bool) -> str:
    """Returns the text that HfTokenizer.decode() gives for `ids` after the tail. The tail must end with a whole character."""
    before = tokenizer.decode(tail, skip)
    return tokenizer.decode([*tail, *ids], skip)[len(before) :]


def id_lists(kind: str) -> st.SearchStrategy[list[int]]:
    """Draws lists of ids, some outside the vocabulary. The ids of a byte-level tokenizer are often single bytes."""
    top = {"byte_level": 620, "byte_fallback": 400, "wordpiece": 420, "unigram": 320}[kind]
    some = [st.integers(0, top)]
    if kind == "byte_level":
        some.append(st.integers(3, 260))
    return st.lists(st.one_of(some), max_size=40)


CUTS = st.lists(st.integers(0, 40), max_size=12)


@pytest.mark.by_day(one_in=4, seed=4)
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), cuts=CUTS, skip=st.booleans())
def test_incremental_text_equals_the_decoded_text_without_a_prompt(
    tokenizers: dict[str, HfTokenizer], kind: str, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    tokenizer, ids = tokenizers[kind], data.draw(id_lists(kind))
    assert decode_all(tokenizer, [], ids, cuts, skip) == tokenizer.decode(ids, skip)


@pytest.mark.by_day(one_in=4, seed=2)
@pytest.mark.parametrize("kind", KINDS)
@given(prompt=TEXTS, data=st.data(), cuts=CUTS, skip=st.booleans())
def test_incremental_text_equals_the_decoded_text_after_a_prompt(
    tokenizers: dict[str, HfTokenizer], kind: str, prompt: str, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    tokenizer, ids = tokenizers[kind], data.draw(id_lists(kind))
    tail = tokenizer.encode_batch([prompt], True)[0][-5:]
    if kind == "byte_fallback" and any(tokenizer.token_bytes(i) for i in tail):
        tail = []  # the tail may begin inside a character, which the reference does not define
    if kind == "byte_level" and tokenizer.decode(tail, skip).startswith("�"):
        tail = []
    assert decode_all(tokenizer, tail, ids, cuts, skip) == reference(tokenizer, tail, ids, skip)


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=TEXTS, cuts=CUTS)
def test_incremental_text_equals_the_text_that_was_encoded(
    tokenizers: dict[str, HfTokenizer], kind: str, text: str, cuts: list[int]
) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode_batch([text], False)[0]
    assert decode_all(tokenizer, [], ids, cuts) == tokenizer.decode(ids, True) == text


@given(runs=st.lists(st.one_of(st.binary(max_size=9), st.lists(st.integers(0, 300), max_size=4)), max_size=8), cuts=CUTS)
def test_only_invalid_bytes_are_replaced_in_a_run_of_byte_tokens(
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


def test_incremental_text_completes_a_character_begun_in_the_prompt(tokenizers: dict[str, HfTokenizer]) -> None:
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = tokenizers[kind]
        ids = byte_ids(tokenizer, "a好b".encode())
        assert decode_all(tokenizer, ids[:2], ids[2:], []) == "好b"


def test_word_after_byte_tokens_keeps_the_leading_space(tokenizers: dict[str, HfTokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    hello = tokenizer.encode_batch(["hello"], False)[0]
    ids = byte_ids(tokenizer, "你".encode()) + hello
    assert decode_all(tokenizer, [], ids, [1, 3]) == tokenizer.decode(ids, True) == "你 hello"


def byte_ids(tokenizer: HfTokenizer, data: bytes) -> list[int]:
    """Returns one id per byte."""
    if not tokenizer.is_byte_level:
        return [BYTE_ID + byte for byte in data]
    by_bytes = {tokenizer.token_bytes(i): i for i in range(260) if i not in tokenizer.special_ids}
    return [by_bytes[bytes([byte])] for byte in data]


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_only_bytes_that_may_begin_a_character_are_buffered(tokenizers: dict[str, HfTokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    steps = {
        "four-byte character": ("😀".encode(), ["", "", "", "😀"]),
        "incomplete character before ASCII": (b"\xf0\x9fa", ["", "", "��a" if kind == "byte_fallback" else "�a"]),
        "bytes that begin no character": (b"\xff\xff\xff", ["�", "�", "�"]),
        "second start of a character": (b"\xe4\xe4\xbd\xa0", ["", "�", "", "你"]),
    }
    for name, (data, want) in steps.items():
        decoder = IncrementalDetokenizer(tokenizer, byte_ids(tokenizer, b"x"), True)
        assert [decoder.push([i]) for i in byte_ids(tokenizer, data)] == want, name


@pytest.mark.by_day(one_in=3, seed=2)
@pytest.mark.parametrize("kind", ["byte_fallback", "unigram", "wordpiece"])
def test_decoded_context_stays_short_when_the_output_is_long(
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


NO_STOP = ""


@pytest.mark.by_day(one_in=2, seed=91)
@pytest.mark.parametrize(
    ("name", "stops", "pushes", "released", "matched", "include", "rest"),
    [
        ("no stop strings", [], ["ab", "c"], ["ab", "c"], NO_STOP, False, ""),
        ("no prefix in the text", ["END"], ["hello"], ["hello"], NO_STOP, False, ""),
        ("partial match, then other text", ["END"], ["aE", "N", "x"], ["a", "", "ENx"], NO_STOP, False, ""),
        ("partial match at the end", ["END"], ["aEN"], ["a"], NO_STOP, False, "EN"),
        ("cut before the match", ["END"], ["aE", "ND"], ["a", ""], "END", False, ""),
        ("cut after the match", ["END"], ["aE", "NDb"], ["a", ""], "END", True, "END"),
        ("match before the worker's", ["END"], ["aEND", "b", "c"], ["a", "", ""], "END", False, ""),
        ("match without the worker's", ["END"], ["aENDb", "c"], ["a", ""], NO_STOP, False, ""),
        ("first occurrence", ["ab"], ["xabyab"], ["x"], "ab", False, ""),
        ("stop string that overlaps itself", ["aab"], ["aaa", "b"], ["a", ""], "aab", False, ""),
        ("nested stop strings, shorter named", ["abcd", "bc"], ["xabc"], ["xa"], "bc", False, ""),
        ("nested stop strings, longer named", ["b", "abc"], ["xabc"], ["x"], "abc", False, ""),
        ("same start, longer included", ["ab", "abc"], ["abc"], [""], "abc", True, "abc"),
        ("match of a stop pattern", [], ["ab12"], ["ab12"], "12", False, ""),
        ("named stop string not in the text", ["END"], ["aE"], ["a"], "other", False, "E"),
        ("empty stop string", [""], ["ab"], ["ab"], NO_STOP, False, ""),
    ],
)
def test_stop_buffer_returns_text_and_cuts_at_a_stop_string(
    name: str, stops: list[str], pushes: list[str], released: list[str], matched: str, include: bool, rest: str
) -> None:
    buffer = StopStringBuffer(stops, include)
    assert [buffer.push(text) for text in pushes] == released, name
    assert buffer.finish(matched) == rest, name


LETTERS = st.text(st.sampled_from("abc"), max_size=24)
STOPS = st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5), max_size=3)


def first_match(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Returns start and end of the stop string that ends first. If several end there, the longest counts."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    return None if not ends else (min(ends)[0] + min(ends)[1], min(ends)[0])


@given(pushes=st.lists(LETTERS, max_size=6), stops=STOPS, include=st.booleans())
def test_stop_buffer_returns_all_text_before_the_first_match(pushes: list[str], stops: list[str], include: bool) -> None:
    buffer, text = StopStringBuffer(stops, include), "".join(pushes)
    match = first_match(text, stops)
    out = "".join(buffer.push(piece) for piece in pushes) + buffer.finish(NO_STOP)
    assert out == (text if match is None else text[: match[include]])


@given(text=LETTERS, stops=STOPS)
def test_stop_buffer_returns_no_character_of_the_first_match(text: str, stops: list[str]) -> None:
    buffer, out = StopStringBuffer(stops, False), ""
    for char in text:
        out += buffer.push(char)
        match = first_match(text, stops)
        assert match is None or len(out) <= match[0]


@given(text=LETTERS, stops=STOPS)
def test_stop_buffer_holds_only_the_longest_beginning_of_a_stop_string(text: str, stops: list[str]) -> None:
    buffer = StopStringBuffer(stops, False)
    buffer.push(text)
    prefixes = {stop[:n] for stop in stops for n in range(len(stop))}
    if first_match(text, stops) is None:
        assert buffer.num_buffered_chars == max((len(p) for p in prefixes if text.endswith(p)), default=0)


class CountingText(str):
    """A piece of text that counts the characters of all texts that it is added to, including its own."""

    num_copied = 0

    def __radd__(self, other: str) -> str:
        CountingText.num_copied += len(other) + len(self)
        return str.__add__(other, self)


def test_stop_buffer_does_not_copy_the_text_after_a_match_for_each_piece() -> None:
    buffer = StopStringBuffer(["stop"], True)
    assert buffer.push("a stop") == "a "
    CountingText.num_copied = 0
    for _ in range(1000):
        assert buffer.push(CountingText("b")) == ""
    assert buffer.num_buffered_chars == len("stop") + 1000
    assert CountingText.num_copied <= 2 * 1000
    assert buffer.finish("b") == "stop"


MARK = "<ab>"


@pytest.mark.parametrize(
    ("name", "stops", "parts", "released", "matched", "include", "rest"),
    [
        ("stop string only in a mark", ["ab"], ["x", MARK, "y"], ["x", MARK, "y"], NO_STOP, False, ""),
        ("stop string begins in a mark", [">c"], ["x", MARK, "c"], ["x", MARK, "c"], NO_STOP, False, ""),
        ("stop string ends in a mark", ["c<"], ["xc", MARK, "y"], ["x", "", f"c{MARK}y"], NO_STOP, False, ""),
        ("mark before the stop string", ["cd"], ["x", MARK, "cdy"], ["x", MARK, ""], "cd", False, ""),
        ("mark within a cut stop string", ["cd"], ["xc", MARK, "d"], ["x", "", ""], "cd", False, ""),
        ("mark within an included stop string", ["cd"], ["xc", MARK, "d"], ["x", "", ""], "cd", True, f"c{MARK}d"),
        ("mark within a longer stop string", ["bc", "bcd"], ["bc", MARK, "d"], ["", "", ""], "bcd", True, f"bc{MARK}d"),
        ("mark within a stop string that ends later", ["c", "bcde"], ["bc", "d", MARK, "e"], ["b", "", "", ""], "c", True, "c"),
        ("mark after the stop string", ["cd"], ["xcd", MARK, "y"], ["x", "", ""], "cd", True, "cd"),
        ("mark in an incomplete stop string", ["cd"], ["xc", MARK], ["x", ""], NO_STOP, False, f"c{MARK}"),
        ("marks before and within", ["ce", "def"], ["c", MARK, "d", MARK, "ef"], ["", "", f"c{MARK}", "", ""], "def", False, ""),
        ("mark directly before the named stop string", ["bcde", "cd"], ["b", MARK, "cd"], ["", "", f"b{MARK}"], "cd", False, ""),
        ("no stop strings", [], ["x", MARK, "y"], ["x", MARK, "y"], NO_STOP, False, ""),
    ],
)
def test_stop_buffer_does_not_search_marks(
    name: str, stops: list[str], parts: list[str], released: list[str], matched: str, include: bool, rest: str
) -> None:
    buffer = StopStringBuffer(stops, include)
    assert [buffer.push_mark(part) if part == MARK else buffer.push(part) for part in parts] == released, name
    assert buffer.finish(matched) == rest, name


TEXT = "hello there, wie spät? 你好 def add(a, b):"


@pytest.mark.by_day(one_in=4, seed=2)
@pytest.mark.parametrize("kind", KINDS)
def test_joined_token_texts_equal_the_decoded_text(tokenizers: dict[str, HfTokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode_batch(["a " + TEXT], False)[0]  # some tokenizers add or drop a space at the start of a text
    joined = b"".join(texts.of(token) for token in ids).decode()
    assert joined.strip() == tokenizer.decode(ids, False).strip()


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "wordpiece"])
def test_token_text_of_a_special_token_is_the_name_of_the_token(tokenizers: dict[str, HfTokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    special = min(tokenizer.special_ids)
    assert TokenTexts(tokenizer).of(special).decode().strip() == tokenizer.decode([special], False).strip() != ""


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("kind", ["byte_level", "wordpiece"])
def test_token_text_of_an_unknown_id_is_empty(tokenizers: dict[str, HfTokenizer], kind: str) -> None:
    assert TokenTexts(tokenizers[kind]).of(10**6) == b""


def test_token_text_may_be_part_of_a_character(tokenizers: dict[str, HfTokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode_batch(["🙂"], False)[0]
    texts = [TokenTexts(tokenizer).of(token) for token in ids]
    assert len(texts) > 1 and b"".join(texts) == "🙂".encode()
