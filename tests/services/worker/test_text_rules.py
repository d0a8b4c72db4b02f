from __future__ import annotations

import pytest

from services.shared.hf_tokenizer import HfTokenizer, load_tokenizer
from services.worker.patterns import InvalidPattern, compile_pattern
from services.worker.text_rules import MAX_PATTERNS, ModelText


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    return load_tokenizer("models/demo")


def test_a_tail_decodes_to_the_end_of_the_whole(tokenizer: HfTokenizer) -> None:
    text = "one two three, four: five"
    ids = tokenizer.encode_batch([text], False)[0]
    rules = ModelText(tokenizer)
    for cut in range(len(ids)):
        assert text.endswith(rules.decode(ids[cut:], True))


def test_patterns_are_found_and_forgotten_in_turn(tokenizer: HfTokenizer) -> None:
    rules = ModelText(tokenizer)
    assert rules.search(r"\d{3}-\d{4}", "call 555-0199 now")
    assert not rules.search(r"\d{3}-\d{4}", "call nobody")
    for number in range(MAX_PATTERNS + 10):
        assert rules.search(f"x{number}$", f"x{number}")
    assert len(rules._patterns) == MAX_PATTERNS
    assert rules.search(r"\d{3}-\d{4}", "555-0199")


def test_a_pattern_that_would_backtrack_takes_linear_time() -> None:
    assert compile_pattern("(a+)+$").search("a" * 20_000 + "b") is None


@pytest.mark.parametrize("pattern", ["(", "a{2,1}", r"(?=a)b", "[z-a]"])
def test_what_re2_does_not_take_is_refused_with_its_reason(pattern: str) -> None:
    with pytest.raises(InvalidPattern) as refused:
        compile_pattern(pattern)
    assert str(refused.value)
