"""The demo model's vocabulary, grammars compiled for it in this process, and a random model that obeys masks."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer, load_tokenizer
from rootstock_llm.services.worker.core.contracts.grammar import GrammarSpec
from rootstock_llm.services.worker.grammar.compile.forking_compiler import prepare
from rootstock_llm.services.worker.grammar.compile.grammar_compiler import Compiled, GrammarCompiler
from rootstock_llm.services.worker.grammar.compile.trial import allowed_ids
from rootstock_llm.services.worker.grammar.compile.vocabulary import Vocabulary, vocabulary_of
from rootstock_llm.services.worker.grammar.match.matcher import ForcedText, MatcherSetup, XgrammarMatcher
from rootstock_llm.services.worker.text.step_meter import StepMeter

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
EOS = (0, 2)  # end-of-sequence ids of the demo model
# Tokens that end strings, objects, arrays and numbers of JSON
CLOSERS = frozenset({b'"', b"}", b"]", b"0", b'"}', b'"]', b"]}", b"}}"})
# Tokens that write() prefers during its first `free_tokens` tokens, because they begin escapes, numbers and nested values
TEMPTING = frozenset({b"\\", b"u", b'"', b"0", b"6", b"1", b":", b",", b"a", b"b", b"{", b"[", b"\n", b" "})


@cache
def tokenizer() -> HfTokenizer:
    return load_tokenizer(DEMO)


@cache
def vocabulary(vocab_size: int = 1280, stop_ids: tuple[int, ...] = EOS) -> Vocabulary:
    return vocabulary_of(tokenizer(), vocab_size, stop_ids)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary().info(), jumps=True)


def compiled(spec: GrammarSpec) -> Compiled:
    return compiler().compile(prepare(spec))


def does_not_tolerate_overrun() -> bool:
    """Returns False, so that exceeding the limit of CPU time is a fault of the matcher."""
    return False


def matcher(grammar: Compiled, jump: bool = False) -> XgrammarMatcher:
    """Returns a matcher without limits of CPU time."""
    forced = ForcedText(tokenizer()) if jump else None
    return XgrammarMatcher(grammar, MatcherSetup.of(vocabulary(), forced), StepMeter(1e6, 1e6), does_not_tolerate_overrun)


def accepts(grammar: Compiled, text: str) -> bool:
    """Returns whether the tokens of the text are a complete output under the grammar."""
    walker = matcher(grammar)
    (ids,) = tokenizer().encode_batch([text], False)
    return all(walker.accept(token) for token in ids) and may_end(walker)


def may_end(walker: XgrammarMatcher) -> bool:
    return walker.terminated or EOS[0] in allowed_ids(walker.mask(), 1280)


def write(
    grammar: Compiled, chooser: random.Random, free_tokens: int = 40, max_tokens: int = 3000, closers: frozenset[bytes] = CLOSERS
) -> str | None:
    """Writes random text that the grammar allows.

    Args:
        free_tokens: number of tokens after which write() prefers `closers`, and ends as soon as the output may end. Before, if
            the output may end, write() ends it with a probability of 0.1.
        max_tokens: largest number of tokens.
        closers: tokens that end values.

    Returns:
        The text; None if the output does not end within `max_tokens` tokens.
    """
    walker = matcher(grammar)
    tokens = vocabulary().tokens
    written = b""
    for count in range(max_tokens):
        if walker.terminated:
            return written.decode()
        allowed = allowed_ids(walker.mask(), 1280)
        if EOS[0] in allowed and (count >= free_tokens or chooser.random() < 0.1):
            return written.decode()
        token = _choose([token for token in allowed if token not in EOS], chooser, closers if count >= free_tokens else None)
        assert walker.accept(token), f"the mask allows a token that the matcher refuses: {tokens[token]!r} after {written!r}"
        written += tokens[token]
    return None


def _choose(allowed: list[int], chooser: random.Random, closers: frozenset[bytes] | None) -> int:
    assert allowed, "a matcher that allows no token has a complete output"
    tokens = vocabulary().tokens
    preferred = [token for token in allowed if tokens[token] in (closers or TEMPTING)]
    return chooser.choice(preferred if preferred and chooser.random() < (0.8 if closers else 0.4) else allowed)
