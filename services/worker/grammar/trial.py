"""A compiled grammar tried out before it may reach the loop: random walks with the time of each mask looked at."""

from __future__ import annotations

import random
import time

import numpy as np
import xgrammar
from numpy.typing import NDArray

from services.worker.grammar.grammar_limits import GrammarLimits, StepMeter
from services.worker.grammar.refusal import GrammarRefused

TOKENS = 64  # accepted in each walk
WALKS = 3
SEED = 20240607


def try_out(compiled: xgrammar.CompiledGrammar, num_words: int, vocab_size: int, limits: GrammarLimits) -> None:
    """Raises GrammarRefused if masks or accepts cost more than the limits allow, or a walk comes to a dead end."""
    chooser = random.Random(SEED)
    for _ in range(WALKS):
        _walk(compiled, num_words, vocab_size, StepMeter(limits.step_ms, limits.burst_ms), chooser)


def _walk(compiled: xgrammar.CompiledGrammar, num_words: int, vocab_size: int, meter: StepMeter, chooser: random.Random) -> None:
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=False)
    stops = set(matcher.stop_token_ids)
    mask = np.zeros((1, num_words), np.int32)
    for step in range(TOKENS):
        started = time.thread_time()
        matcher.fill_next_token_bitmask(mask, 0)
        allowed = [token for token in allowed_ids(mask[0].view(np.uint32), vocab_size) if token not in stops]
        if not allowed:
            if not matcher.is_completed():
                raise GrammarRefused(f"the grammar allows nothing after {step} tokens, and is not complete there")
            return
        accepted = matcher.accept_token(int(chooser.choice(allowed)))
        meter.token()
        meter.spend(time.thread_time() - started)
        if not accepted:
            raise GrammarRefused("the grammar's mask allows a token that it then does not accept")
        if meter.overrun:
            raise GrammarRefused("too expensive: working out which tokens may come next takes too long")


def allowed_ids(mask: NDArray[np.uint32], vocab_size: int) -> list[int]:
    """Ids of a mask's set bits. mask: uint32[words]."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
    found: list[int] = np.flatnonzero(bits).tolist()
    return found
