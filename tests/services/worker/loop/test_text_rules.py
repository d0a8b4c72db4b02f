from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer, load_tokenizer
from rootstock_llm.services.worker.loop.text_rules import MAX_PATTERNS, ModelText, PatternTooExpensive
from rootstock_llm.services.worker.text.patterns import InvalidPattern, compile_pattern


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    return load_tokenizer("models/demo")


def test_text_of_the_last_tokens_is_the_end_of_the_whole_text(tokenizer: HfTokenizer) -> None:
    text = "one two three, four: five"
    ids = tokenizer.encode_batch([text], False)[0]
    rules = ModelText(tokenizer)
    for cut in range(len(ids)):
        assert text.endswith(rules.decode(ids[cut:], True))


def with_byte_fallback() -> HfTokenizer:
    """Returns a tokenizer with the decoder of Llama 2: characters outside of a to z are byte tokens, also newlines."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(ord("a"), ord("z") + 1))]
    model = models.BPE(
        vocab={name: number for number, name in enumerate(names)}, merges=[], unk_token="<unk>", byte_fallback=True
    )
    made = Tokenizer(model)
    made.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return HfTokenizer(made, {}, {})


@pytest.mark.parametrize("text", ["ab தமிழ்\nuser", "龘靐齉。\n龘靐", "a b🙂\n🎉c d"])
def test_text_of_the_last_tokens_is_complete_when_it_begins_within_a_character(text: str) -> None:
    tokenizer = with_byte_fallback()
    rules = ModelText(tokenizer)
    ids = tokenizer.encode_batch([text], False)[0]
    for cut in range(len(ids)):
        window = rules.decode(ids[cut:], True)
        assert text.endswith(window.lstrip("\N{REPLACEMENT CHARACTER}")), (cut, window)
        whole = [at for at in range(len(text)) if len(text[at:].encode()) <= len(ids) - cut]
        assert window.endswith(text[whole[0] :] if whole else ""), (cut, window)


def test_search_finds_matches_and_caches_the_latest_patterns(tokenizer: HfTokenizer) -> None:
    rules = ModelText(tokenizer)
    assert rules.search(r"\d{3}-\d{4}", "call 555-0199 now")
    assert not rules.search(r"\d{3}-\d{4}", "call nobody")
    for number in range(MAX_PATTERNS + 10):
        assert rules.search(f"x{number}$", f"x{number}")
    assert len(rules._patterns) == MAX_PATTERNS
    assert rules.search(r"\d{3}-\d{4}", "555-0199")


def test_backtracking_pattern_takes_linear_time() -> None:
    assert compile_pattern("(a+)+$").search("a" * 20_000 + "b") is None


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("pattern", ["(", r"(?=a)b"])
def test_pattern_outside_re2_is_refused_with_a_reason(pattern: str) -> None:
    with pytest.raises(InvalidPattern) as refused:
        compile_pattern(pattern)
    assert str(refused.value)


@pytest.mark.by_day(one_in=2, seed=5)
@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:.{0,99}x?){9}Q",
        r"[\s\S]{1,1000}Q",
        r"(?:.{0,30}a?){30}Q",
        r"(?:\w{0,20}a?){8}Q",
        r"[\p{L}\p{N}]{1,30}Q",
        r"(?:[ab]{0,10}a?){15}Q",
    ],
)
def test_pattern_with_a_large_program_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidPattern, match="too complex: its program has"):
        compile_pattern(pattern)


@pytest.mark.by_day(one_in=2, seed=67)
@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{3}-\d{4}",
        r"\n\n(User|Human|System):",
        r"(?i)end of (the )?(text|answer)",
        r"<[^<>]{1,20}>$",
        r"\bdone\b",
        r"[.!?]\s*$",
    ],
)
def test_common_patterns_are_accepted(pattern: str) -> None:
    assert compile_pattern(pattern).search("") is None


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.step = 0.0

    def thread_time(self) -> float:
        self.seconds += self.step
        return self.seconds


def test_pattern_is_refused_when_searches_take_too_long(tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("rootstock_llm.services.worker.loop.text_rules.time", clock)
    rules = ModelText(tokenizer)
    clock.step = 25e-3
    assert not rules.search("slow at first", "text")
    clock.step = 0.2e-3
    for _ in range(1000):
        assert not rules.search("slow at first", "text")
    clock.step = 1e-3
    with pytest.raises(PatternTooExpensive):
        for _ in range(100):
            rules.search("slow", "text")
    clock.step = 0.0
    with pytest.raises(PatternTooExpensive):
        rules.search("slow", "text")
    assert not rules.search("slow at first", "text")
