"""Tests jumps: text that a grammar determines is added without the model, by a search that always ends."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarSpec
from rootstock_llm.services.worker.grammar.compile.byte_cursor import MAX_FORCED_BYTES, ByteCursor
from rootstock_llm.services.worker.grammar.compile.grammar_compiler import Compiled
from rootstock_llm.services.worker.grammar.compile.trial import allowed_ids
from rootstock_llm.services.worker.grammar.match.matcher import XgrammarMatcher
from tests.grammar import model

HANG_GUARD_S = 60.0


def regex(pattern: str) -> Compiled:
    return model.compiled(GrammarSpec(GrammarKind.REGEX, pattern))


def ebnf(source: str) -> Compiled:
    return model.compiled(GrammarSpec(GrammarKind.EBNF, source))


def schema(value: Any) -> Compiled:
    return model.compiled(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(value)))


def feed(matcher: XgrammarMatcher, text: str) -> None:
    (ids,) = model.tokenizer().encode_batch([text], False)
    assert all(matcher.accept(token) for token in ids), text


PERSON = {
    "type": "object",
    "properties": {"first_name": {"const": "naïve 世界"}, "age": {"type": "integer"}},
    "required": ["first_name", "age"],
}


def written(tokens: tuple[int, ...]) -> bytes:
    return b"".join(model.vocabulary().tokens[token] for token in tokens)


def test_jump_omits_the_last_token_when_more_text_follows() -> None:
    matcher = model.matcher(regex("(yes|no) and so it shall be, 世界(!|[.])"), jump=True)
    assert matcher.forced() == ()
    feed(matcher, "y")
    tokens = tuple(matcher.forced())
    assert len(tokens) >= 2
    assert "es and so it shall be, 世界".encode().startswith(written(tokens))
    assert len(written(tokens)) < len("es and so it shall be, 世界".encode())
    while not matcher.terminated:
        assert matcher.accept(next(token for token in allowed_ids(matcher.mask(), 1280) if token not in model.EOS))


def test_jump_takes_all_tokens_when_the_output_ends_after_the_jump() -> None:
    matcher = model.matcher(regex("(yes|no) and so it shall be"), jump=True)
    feed(matcher, "n")
    assert written(tuple(matcher.forced())) == b"o and so it shall be"
    assert matcher.terminated
    assert matcher.forced() == ()


def test_jump_ends_before_a_partly_forced_character() -> None:
    matcher = model.matcher(regex("abc def ghi (世|丗)c"), jump=True)  # two of the three bytes are equal
    tokens = tuple(matcher.forced())
    assert tokens
    assert b"abc def ghi ".startswith(written(tokens))
    feed(matcher, "abc def ghi 世c"[len(written(tokens)) :])
    assert matcher.terminated


def test_single_forced_token_is_left_to_sampling() -> None:
    matcher = model.matcher(regex("(x|y)z(a|b)"), jump=True)
    feed(matcher, "x")
    before = allowed_ids(matcher.mask(), 1280)
    assert matcher.forced() == ()
    assert allowed_ids(matcher.mask(), 1280) == before


def test_text_with_jumps_satisfies_the_schema() -> None:
    matcher = model.matcher(schema(PERSON), jump=True)
    tokens: list[int] = []
    while not matcher.terminated:
        tokens += matcher.forced()
        if matcher.terminated:
            break
        allowed = [token for token in allowed_ids(matcher.mask(), 1280) if token not in model.EOS]
        token = max(allowed, key=lambda found: (model.vocabulary().tokens[found] in (b"}", b"}\n"), found))
        assert matcher.accept(token)
        tokens.append(token)
    assert json.loads(written(tuple(tokens)))["first_name"] == "naïve 世界"


def test_matcher_forces_no_tokens_when_jumps_are_disabled() -> None:
    assert model.matcher(regex("abcdefgh ijkl"), jump=False).forced() == ()


@pytest.mark.by_day(one_in=2, seed=1)
@pytest.mark.parametrize(
    "pattern, before, forced",
    [
        ("yes|no", "", ""),
        ("yes|no", "y", "es"),
        ("abc(d|e)", "", "abc"),
        ("ab(c)?d", "", "ab"),
        ("abc(def)?", "", "abc"),  # the output may end there
        ("abc", "abc", ""),
        ("(世|丗)c", "", b"\xe4\xb8"),
        ("a{1000}b", "", "a" * MAX_FORCED_BYTES),
        ("a{1000}b", "a" * 990, "a" * 10 + "b"),
    ],
)
def test_byte_is_forced_when_no_other_byte_may_follow(pattern: str, before: str, forced: str | bytes) -> None:
    by_bytes = regex(pattern).by_bytes
    assert by_bytes is not None
    cursor = ByteCursor(by_bytes)
    cursor.advance(before.encode())
    expected = forced if isinstance(forced, bytes) else forced.encode()
    assert cursor.forced() == expected
    assert cursor.forced() == expected, "forced() does not move the cursor"
    cursor.advance(expected)


ENDLESS = """
from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarSpec
from tests.grammar import model

matcher = model.matcher(model.compiled(GrammarSpec(GrammarKind.EBNF, {source!r})), jump=True)
tokens = [token for _ in range(4) for token in matcher.forced()]
print(len(b"".join(model.vocabulary().tokens[token] for token in tokens)), matcher.fault, sep="|")
"""


@pytest.mark.parametrize("source", ['root ::= "a" root', "root ::= x{100}\nx ::= y{100}\ny ::= z{100}\nz ::= [a]{100}"])
def test_endless_forced_text_is_split_into_pieces(source: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", ENDLESS.format(source=source)], capture_output=True, text=True, timeout=HANG_GUARD_S, check=False
    )
    assert run.returncode == 0, run.stderr
    count, fault = run.stdout.strip().split("|")
    assert 3 * MAX_FORCED_BYTES < int(count) < 4 * MAX_FORCED_BYTES, "each piece omits its last token"
    assert not fault


def test_jumps_alternate_with_sampling() -> None:
    matcher = model.matcher(regex("(a|b)one two three(a|b)four five six(a|b)"), jump=True)
    text = b""
    while not matcher.terminated:
        token = next(token for token in allowed_ids(matcher.mask(), 1280) if token not in model.EOS)
        assert matcher.accept(token)
        text += written((token,)) + written(tuple(matcher.forced()))
    assert text.replace(b"b", b"a") == b"aone two threeafour five sixa"


def test_request_continues_without_jumps_when_the_byte_grammar_refuses_accepted_text(caplog: pytest.LogCaptureFixture) -> None:
    mixed = Compiled(regex("(a|b)one two three").grammar, regex("xyz").by_bytes)
    matcher = model.matcher(mixed, jump=True)
    feed(matcher, "a")
    assert matcher.forced() == ()
    feed(matcher, "one two")
    assert matcher.forced() == ()
    feed(matcher, " three")
    assert matcher.terminated and not matcher.fault
    assert [record.levelname for record in caplog.records] == ["ERROR"]
