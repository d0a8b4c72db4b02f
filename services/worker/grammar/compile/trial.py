"""Runs a trial of a compiled grammar before a request uses it: timed random walks through the grammar."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import xgrammar
from numpy.typing import NDArray

from rootstock_llm.services.worker.grammar.compile.byte_cursor import ByteCursor, BytesRefused
from rootstock_llm.services.worker.grammar.compile.grammar_compiler import Compiled
from rootstock_llm.services.worker.grammar.compile.grammar_limits import GrammarLimits
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused
from rootstock_llm.services.worker.text.step_meter import StepMeter

TOKENS = 64  # largest number of tokens of each walk
WALKS = 3
SEED = 20240607  # fixed, so that every trial of a grammar takes the same walks


def run_trial(compiled: Compiled, tokens: Sequence[bytes], limits: GrammarLimits) -> None:
    """Walks randomly through the grammar.

    Args:
        tokens: the bytes of each token.

    Raises:
        GrammarRefused: the walks cost more CPU time than the limits allow, or a walk reaches a dead end.
    """
    chooser = random.Random(SEED)
    for _ in range(WALKS):
        _walk(compiled, tokens, StepMeter(limits.step_ms, limits.burst_ms), chooser)


def _walk(compiled: Compiled, tokens: Sequence[bytes], meter: StepMeter, chooser: random.Random) -> None:
    started = time.thread_time()
    matcher = xgrammar.GrammarMatcher(compiled.grammar, terminate_without_stop_token=False)
    cursor = None if compiled.by_bytes is None else ByteCursor(compiled.by_bytes)
    meter.spend(time.thread_time() - started)
    stops = set(matcher.stop_token_ids)
    mask = np.zeros((1, -(-len(tokens) // 32)), np.int32)
    for step in range(TOKENS):
        started = time.thread_time()
        matcher.fill_next_token_bitmask(mask, 0)
        allowed = [token for token in allowed_ids(mask[0].view(np.uint32), len(tokens)) if token not in stops]
        if not allowed:
            if not matcher.is_completed():
                raise GrammarRefused(f"dead end: after {step} tokens, the grammar allows no token and is not complete")
            return
        token = int(chooser.choice(allowed))
        if not matcher.accept_token(token):
            raise GrammarRefused("the grammar's mask allows a token that the grammar refuses")
        if cursor is not None:
            cursor = _find_forced(cursor, tokens[token])
        meter.step()
        meter.spend(time.thread_time() - started)
        if meter.overrun:
            raise GrammarRefused("too expensive: computing the allowed next tokens takes too long")


def _find_forced(cursor: ByteCursor, data: bytes) -> ByteCursor | None:
    """Searches for forced text as a matcher does for jumps, so that the walk includes the search's CPU time.

    Returns:
        The advanced cursor, or None if the cursor has failed. The walk then continues without a cursor.
    """
    try:
        cursor.advance(data)
        cursor.forced()
    except BytesRefused:
        return None
    return cursor


def allowed_ids(mask: NDArray[np.uint32], vocab_size: int) -> list[int]:
    """Returns the ids of the set bits of a mask, uint32[words]."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
    found: list[int] = np.flatnonzero(bits).tolist()
    return found
