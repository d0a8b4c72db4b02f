"""Compares the reader of pre-tokenizer patterns with the splits of the tokenizers library."""

from __future__ import annotations

import itertools

import pytest
from tokenizers import Regex, pre_tokenizers

from rootstock_llm.services.tokenizer.boundaries import GPT2
from rootstock_llm.services.tokenizer.pattern import NotUnderstood, read_pattern
from tests.services.tokenizer.piece_tokenizers import CL100K

O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UNREAD = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s+"
CHARS = "aZ1 \n\t'./é世，"


@pytest.mark.parametrize("text", [GPT2, CL100K, O200K], ids=["gpt-2", "cl100k", "o200k"])
def test_pattern_cuts_a_text_only_where_the_library_also_splits(text: str) -> None:
    pattern, split = read_pattern(text), pre_tokenizers.Split(Regex(text), "isolated")
    parted = [pair for pair in itertools.product(CHARS, repeat=2) if pattern.parts(*pair) and pattern.begins_at(pair[1])]
    assert ("a", " ") in parted and (" ", " ") not in parted
    for (left, right), before, after in itertools.product(parted, ("", "a ", "1\n", " ."), ("", "a", " \n", "'s", "  1")):
        whole = [word for word, _ in split.pre_tokenize_str(before + left + right + after)]
        parts = [word for part in (before + left, right + after) for word, _ in split.pre_tokenize_str(part)]
        assert whole == parts


@pytest.mark.by_day(one_in=2, seed=78)
@pytest.mark.parametrize("text", [UNREAD, r"(?<=a)b", r"\bword", r"a*", r"(a)\1", r"x(?!yz)", "[a&&b]", r"\p{Han}+", "^a", "[a"])
def test_pattern_with_an_unknown_construct_is_refused(text: str) -> None:
    with pytest.raises(NotUnderstood):
        read_pattern(text)
