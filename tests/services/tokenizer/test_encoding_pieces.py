"""Tests of PieceEncoder: the pieces of a text have the same ids as the whole text, and encoding stops at the token limit."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer
from rootstock_llm.services.tokenizer.encoding import EncodedText, EncodeJob, EncodingStopped, PieceEncoder, UncuttableText
from tests.services.tokenizer.piece_tokenizers import LONGEST_BLANKS, MAKERS

# PieceEncoder does not cut texts for these kinds of tokenizers. The pattern of the first kind may look beyond a cut.
# byte_fallback has tokens that contain blanks, and has no pre-tokenizer that splits texts.
UNCUT_KINDS = ("a pattern that looks behind", "byte_fallback")
WORDS = [*"helo wrd,.!?'\n\t 你好é😀（世）。10→", " the", "  ", "   and", "e\u0301", "\r\n", "▁", "a\u030a\u0327", "\u3000", "ſ"]
MARKS = ["<|im_end|>", "<s>", "</s>", "[MASK]", "<extra_1>", "<think>", "<r>  ", "  <l>", "→ "]
# Runs of up to 600 blanks are longer than the longest token of blanks, which has LONGEST_BLANKS.
PARTS = st.one_of(st.sampled_from(WORDS), st.sampled_from(MARKS), st.integers(1, 600).map(lambda count: " " * count))
TEXTS = st.lists(PARTS, max_size=60).map("".join)


class CountingTokenizer(HfTokenizer):
    """A copy of a tokenizer that records the number of characters of each call."""

    def __init__(self, original: HfTokenizer) -> None:
        super().__init__(original.inner, original.special_tokens, original.chat_templates)
        self.chars: list[int] = []  # by call

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        self.chars.append(sum(map(len, texts)))
        return super().encode_batch(texts, add_special_tokens)


def encode(
    encoder: PieceEncoder, text: str, add_special_tokens: bool = True, max_tokens: int = 0, truncates: bool = False
) -> EncodedText:
    (result,) = encoder.encode(EncodeJob([text], add_special_tokens, max_tokens, truncates), Event())
    return result


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HfTokenizer]:
    return {kind: make(tmp_path_factory.mktemp("pieces")) for kind, make in MAKERS.items()}


@pytest.fixture(scope="module")
def encoders(tokenizers: dict[str, HfTokenizer]) -> dict[str, PieceEncoder]:
    return {kind: PieceEncoder(tokenizer, piece_chars=12) for kind, tokenizer in tokenizers.items()}


@pytest.fixture(scope="module")
def encoders_with_long_pieces(tokenizers: dict[str, HfTokenizer]) -> dict[str, PieceEncoder]:
    """Encoders with pieces that are long enough for a cut within a run of blanks."""
    return {kind: PieceEncoder(tokenizer, piece_chars=600) for kind, tokenizer in tokenizers.items()}


@pytest.mark.by_day(one_in=2, seed=32)
@pytest.mark.parametrize("kind", MAKERS)
@settings(deadline=None)
@given(text=TEXTS, add_special_tokens=st.booleans(), max_tokens=st.integers(0, 60), truncates=st.booleans())
def test_piece_encoder_returns_the_ids_of_the_whole_text(
    tokenizers: dict[str, HfTokenizer],
    encoders: dict[str, PieceEncoder],
    encoders_with_long_pieces: dict[str, PieceEncoder],
    kind: str,
    text: str,
    add_special_tokens: bool,
    max_tokens: int,
    truncates: bool,
) -> None:
    (whole_ids,) = tokenizers[kind].encode_batch([text], add_special_tokens)
    for encoder in (encoders[kind], encoders_with_long_pieces[kind]):
        result = encode(encoder, text, add_special_tokens, max_tokens, truncates)
        if max_tokens and len(whole_ids) > max_tokens:
            assert list(result.ids) == (whole_ids[:max_tokens] if truncates else []) and max_tokens < result.at_least <= len(
                whole_ids
            )
        else:
            assert (list(result.ids), result.at_least) == (whole_ids, 0)


@pytest.mark.by_day(one_in=3, seed=48)
@pytest.mark.parametrize("kind", MAKERS)
def test_piece_encoder_passes_short_pieces_to_the_tokenizer(tokenizers: dict[str, HfTokenizer], kind: str) -> None:
    counting = CountingTokenizer(tokenizers[kind])
    encoder = PieceEncoder(counting, piece_chars=1000)
    text = "Hello there, how are you today? " * 500
    counting.chars.clear()
    result = encode(encoder, text)
    assert list(result.ids) == tokenizers[kind].encode_batch([text], True)[0]
    if kind not in UNCUT_KINDS:
        assert max(counting.chars) <= 1000
        counting.chars.clear()
        # The first 10 tokens are in the first piece, so that no other piece is encoded.
        first = encode(encoder, text, max_tokens=10, truncates=True)
        assert list(first.ids) == list(result.ids)[:10] and sum(counting.chars) <= 1000


@pytest.mark.by_day(one_in=2, seed=19)
@pytest.mark.parametrize(
    ("kind", "before_and_after"),
    [
        ("blanks in bytes", ("", "")),
        ("blanks in one word", ("ab ", "c")),
        ("blanks in bytes", ("\n\n", " x\n")),
        ("blanks in one word", ("a ", " \n\nx")),
        ("blanks in bytes", ("\ta", "\u3000")),
    ],
)
def test_piece_encoder_can_cut_inside_a_run_of_blanks(
    tokenizers: dict[str, HfTokenizer], kind: str, before_and_after: tuple[str, str]
) -> None:
    counting = CountingTokenizer(tokenizers[kind])
    encoder = PieceEncoder(counting, piece_chars=4000, max_word_chars=5000)
    text = (
        before_and_after[0] + " " * (300 * LONGEST_BLANKS) + before_and_after[1]
    )  # the run of blanks has at least 300 tokens, and the text at most 400
    counting.chars.clear()
    result = encode(encoder, text, max_tokens=400)
    assert max(counting.chars) <= 4000
    assert (list(result.ids), result.at_least) == (tokenizers[kind].encode_batch([text], True)[0], 0)


def test_piece_encoder_does_not_encode_a_text_that_certainly_exceeds_max_tokens(tokenizers: dict[str, HfTokenizer]) -> None:
    counting = CountingTokenizer(tokenizers["blanks in bytes"])
    encoder = PieceEncoder(counting)
    counting.chars.clear()
    # Lower bounds of the number of tokens: one token per x, and one token per LONGEST_BLANKS blanks.
    result = encode(encoder, "x" * 100_000, max_tokens=99_999)
    assert (list(result.ids), result.at_least, counting.chars) == ([], 100_000, [])
    blanks = encode(encoder, " " * LONGEST_BLANKS * 1000, max_tokens=999)
    assert (blanks.at_least, counting.chars) == (1000, [])


def test_piece_encoder_refuses_an_uncuttable_text_above_max_word_chars(tokenizers: dict[str, HfTokenizer]) -> None:
    encoder = PieceEncoder(tokenizers["split by a pattern"], piece_chars=100, max_word_chars=1000)
    assert len(encode(encoder, "x" * 1000).ids)
    with pytest.raises(UncuttableText):
        encode(encoder, "x" * 1001)


def test_piece_encoder_raises_when_the_stop_event_is_set(tokenizers: dict[str, HfTokenizer]) -> None:
    counting = CountingTokenizer(tokenizers["byte_level"])
    encoder, stopped = PieceEncoder(counting, piece_chars=100), Event()
    counting.chars.clear()
    stopped.set()
    with pytest.raises(EncodingStopped):
        encoder.encode(EncodeJob(["hello " * 1000], True), stopped)
    assert counting.chars == []


def test_piece_encoder_returns_results_in_the_order_of_texts(tokenizers: dict[str, HfTokenizer]) -> None:
    encoder = PieceEncoder(tokenizers["byte_fallback"], piece_chars=100)
    texts = ["hello", "", "there " * 100, "you", "x" * 99, "fine"]
    result = encoder.encode(EncodeJob(texts, True), Event())
    assert [list(text_ids.ids) for text_ids in result] == tokenizers["byte_fallback"].encode_batch(texts, True)
