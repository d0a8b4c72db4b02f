"""Tests that a text encoded in pieces has the ids of the whole text, and that encoding stops at the token limit."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer
from rootstock_llm.services.tokenizer.encoding import EncodedText, EncodeJob, EncodingStopped, PieceEncoder, UncuttableText
from tests.services.tokenizer.piece_tokenizers import LONGEST_BLANKS, MAKERS

# The second has tokens that contain blanks, and its pre-tokenizer does not split texts.
CUT_NOWHERE = ("a pattern that looks behind", "byte_fallback")
WORDS = [*"helo wrd,.!?'\n\t 你好é😀（世）。10→", " the", "  ", "   and", "e\u0301", "\r\n", "▁", "a\u030a\u0327", "\u3000", "ſ"]
MARKS = ["<|im_end|>", "<s>", "</s>", "[MASK]", "<extra_1>", "<think>", "<r>  ", "  <l>", "→ "]
PARTS = st.one_of(st.sampled_from(WORDS), st.sampled_from(MARKS), st.integers(1, 600).map(lambda count: " " * count))
TEXTS = st.lists(PARTS, max_size=60).map("".join)


class Counting(HfTokenizer):
    """A tokenizer that records the number of characters of each call."""

    def __init__(self, of: HfTokenizer) -> None:
        super().__init__(of.inner, of.special_tokens, of.chat_templates)
        self.chars: list[int] = []

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        self.chars.append(sum(map(len, texts)))
        return super().encode_batch(texts, add_special_tokens)


def encoded(encoder: PieceEncoder, text: str, special: bool = True, max_tokens: int = 0, truncates: bool = False) -> EncodedText:
    (found,) = encoder.encode(EncodeJob([text], special, max_tokens, truncates), Event())
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HfTokenizer]:
    return {kind: make(tmp_path_factory.mktemp("pieces")) for kind, make in MAKERS.items()}


@pytest.fixture(scope="module")
def encoders(made: dict[str, HfTokenizer]) -> dict[str, PieceEncoder]:
    return {kind: PieceEncoder(tokenizer, piece_chars=12) for kind, tokenizer in made.items()}


@pytest.fixture(scope="module")
def long_pieces(made: dict[str, HfTokenizer]) -> dict[str, PieceEncoder]:
    """Encoders with pieces long enough for a cut in a run of blanks."""
    return {kind: PieceEncoder(tokenizer, piece_chars=600) for kind, tokenizer in made.items()}


@pytest.mark.by_day(one_in=2, seed=32)
@pytest.mark.parametrize("kind", MAKERS)
@settings(deadline=None)
@given(text=TEXTS, special=st.booleans(), most=st.integers(0, 60), begins=st.booleans())
def test_piece_encoder_gives_the_ids_of_the_whole_text(
    made: dict[str, HfTokenizer],
    encoders: dict[str, PieceEncoder],
    long_pieces: dict[str, PieceEncoder],
    kind: str,
    text: str,
    special: bool,
    most: int,
    begins: bool,
) -> None:
    (whole,) = made[kind].encode_batch([text], special)
    for encoder in (encoders[kind], long_pieces[kind]):
        found = encoded(encoder, text, special, most, begins)
        if most and len(whole) > most:
            assert list(found.ids) == (whole[:most] if begins else []) and most < found.at_least <= len(whole)
        else:
            assert (list(found.ids), found.at_least) == (whole, 0)


@pytest.mark.by_day(one_in=3, seed=48)
@pytest.mark.parametrize("kind", MAKERS)
def test_piece_encoder_cuts_a_long_text(made: dict[str, HfTokenizer], kind: str) -> None:
    counting = Counting(made[kind])
    encoder = PieceEncoder(counting, piece_chars=1000)
    text = "Hello there, how are you today? " * 500
    counting.chars.clear()
    found = encoded(encoder, text)
    assert list(found.ids) == made[kind].encode_batch([text], True)[0]
    if kind not in CUT_NOWHERE:
        assert max(counting.chars) <= 1000
        counting.chars.clear()
        first = encoded(encoder, text, max_tokens=10, truncates=True)
        assert list(first.ids) == list(found.ids)[:10] and sum(counting.chars) <= 1000


@pytest.mark.by_day(one_in=2, seed=19)
@pytest.mark.parametrize(
    ("kind", "around"),
    [
        ("blanks in bytes", ("", "")),
        ("blanks in one word", ("ab ", "c")),
        ("blanks in bytes", ("\n\n", " x\n")),
        ("blanks in one word", ("a ", " \n\nx")),
        ("blanks in bytes", ("\ta", "\u3000")),
    ],
)
def test_piece_encoder_cuts_a_run_of_blanks(made: dict[str, HfTokenizer], kind: str, around: tuple[str, str]) -> None:
    counting = Counting(made[kind])
    encoder = PieceEncoder(counting, piece_chars=4000, max_word_chars=5000)
    text = around[0] + " " * (300 * LONGEST_BLANKS) + around[1]
    counting.chars.clear()
    found = encoded(encoder, text, max_tokens=400)
    assert max(counting.chars) <= 4000
    assert (list(found.ids), found.at_least) == (made[kind].encode_batch([text], True)[0], 0)


def test_piece_encoder_does_not_encode_a_text_above_the_limit(made: dict[str, HfTokenizer]) -> None:
    counting = Counting(made["blanks in bytes"])
    encoder = PieceEncoder(counting)
    counting.chars.clear()
    found = encoded(encoder, "x" * 100_000, max_tokens=99_999)
    assert (list(found.ids), found.at_least, counting.chars) == ([], 100_000, [])
    blanks = encoded(encoder, " " * LONGEST_BLANKS * 1000, max_tokens=999)
    assert (blanks.at_least, counting.chars) == (1000, [])


def test_piece_encoder_refuses_uncuttable_text_above_the_limit(made: dict[str, HfTokenizer]) -> None:
    encoder = PieceEncoder(made["split by a pattern"], piece_chars=100, max_word_chars=1000)
    assert len(encoded(encoder, "x" * 1000).ids)
    with pytest.raises(UncuttableText):
        encoded(encoder, "x" * 1001)


def test_piece_encoder_stops_when_stopped_is_set(made: dict[str, HfTokenizer]) -> None:
    counting = Counting(made["byte_level"])
    encoder, stopped = PieceEncoder(counting, piece_chars=100), Event()
    counting.chars.clear()
    stopped.set()
    with pytest.raises(EncodingStopped):
        encoder.encode(EncodeJob(["hello " * 1000], True), stopped)
    assert counting.chars == []


def test_piece_encoder_keeps_the_order_of_texts(made: dict[str, HfTokenizer]) -> None:
    encoder = PieceEncoder(made["byte_fallback"], piece_chars=100)
    texts = ["hello", "", "there " * 100, "you", "x" * 99, "fine"]
    found = encoder.encode(EncodeJob(texts, True), Event())
    assert [list(one.ids) for one in found] == made["byte_fallback"].encode_batch(texts, True)
