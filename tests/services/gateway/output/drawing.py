"""Draws random texts under a grammar. The tokens are single bytes, words and the marks of a format."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xgrammar

STOP_BIAS, MAX_TOKENS = 0.15, 1500  # probability of ending where the grammar allows the end; maximum tokens of an output
WORDS = [
    "city",
    "Paris",
    "the ",
    "é",
    "日本",
    "🙂",
    "true",
    "null",
    "12",
    "0.5",
    ", ",
    ": ",
    '", "',
    "\n",
    *("\\n", '\\"', "\\u00e9"),
]
CLOSERS = ["}", "]", '"', ")", '"}', "}}", "0"]


class Drawer:
    """Generates random texts that a grammar allows.

    `marks` are texts that models of one family write often, such as their tool-call tags.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        texts = [*marks, *WORDS, *CLOSERS]
        self.tokens = [bytes([value]) for value in range(256)] + [text.encode() for text in texts]
        self._stop = len(self.tokens)
        self._liked = {256 + index for index in range(len(texts))}
        self._closing = {256 + index for index, text in enumerate(texts) if text not in WORDS}
        info = xgrammar.TokenizerInfo(
            [*self.tokens, b""], xgrammar.VocabType.RAW, vocab_size=self._stop + 1, stop_token_ids=[self._stop]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=True)
        self._mask = np.zeros((1, -(-(self._stop + 1) // 32)), np.int32)

    def compiled(self, tag: str) -> xgrammar.CompiledGrammar:
        return self._compiler.compile_structural_tag(tag)

    def draw(self, grammar: xgrammar.CompiledGrammar, chooser: random.Random, free_tokens: int = 60) -> str | None:
        """Draws a complete output.

        Args:
            free_tokens: Number of tokens after which the drawer prefers tokens that close values.

        Returns:
            None if the output does not end within MAX_TOKENS tokens.
        """
        matcher, written = xgrammar.GrammarMatcher(grammar), b""
        for count in range(MAX_TOKENS):
            allowed = self._allowed(matcher)
            ends = self._stop in allowed
            if ends and (len(allowed) == 1 or count > free_tokens or chooser.random() < STOP_BIAS):
                return written.decode(errors="replace")
            token = self._choice([token for token in allowed if token != self._stop], chooser, count > free_tokens)
            assert matcher.accept_token(token)
            written += self.tokens[token]
        return None

    def _allowed(self, matcher: xgrammar.GrammarMatcher) -> list[int]:
        matcher.fill_next_token_bitmask(self._mask, 0)
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        found: list[int] = np.flatnonzero(bits[: self._stop + 1]).tolist()
        return found

    def _choice(self, allowed: Sequence[int], chooser: random.Random, closing: bool) -> int:
        liked = [token for token in allowed if token in (self._closing if closing else self._liked)]
        printable = [token for token in allowed if 32 <= token < 127] or allowed
        return chooser.choice(liked if liked and chooser.random() < (0.9 if closing else 0.5) else printable)


def texts(drawer: Drawer, tags: Sequence[str], count: int, seed: int) -> Iterator[str]:
    """Yields `count` texts, drawn under each tag in turn."""
    chooser, grammars, given = random.Random(seed), [drawer.compiled(tag) for tag in tags], 0
    for turn in range(20 * count):
        if given == count:
            return
        text = drawer.draw(grammars[turn % len(grammars)], chooser)
        if text is not None:
            given += 1
            yield text
    raise AssertionError("too few outputs come to an end")


def function(name: str, parameters: Any, strict: bool = True) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def as_text(tag: Any) -> str:
    return json.dumps(tag, ensure_ascii=False)
