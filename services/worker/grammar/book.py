"""Compiled grammars by content: compiled once however many ask, kept while there is room, refusals remembered for a while.

open() is called on the loop's thread; compilations end on the pool's. One lock guards the book, held for moments.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from services.shared.hf_tokenizer import HfTokenizer
from services.shared.limits import MAX_GRAMMAR_BYTES
from services.worker.core.sampling import GrammarSpec
from services.worker.grammar.compiler_pool import Compiled, CompilerPool
from services.worker.grammar.forced_text import ForcedText
from services.worker.grammar.grammar_limits import MIB, GrammarLimits, StepMeter
from services.worker.grammar.matcher import MatcherSetup, XgrammarMatcher
from services.worker.grammar.vocabulary import Vocabulary

MAX_FAILURES = 1024

logger = logging.getLogger(__name__)


class CompiledBook:
    """Implements core.grammar.GrammarBook.

    on_ready(spec) and on_failed(spec, reason, busy) follow every open() that gave None, from any thread, perhaps before it
    returns; they must only leave a message. busy: the pool takes no more just now, and the grammar may be good. After on_ready
    the grammar stays at least until another one is ready.
    """

    def __init__(
        self,
        tokenizer: HfTokenizer,
        vocabulary: Vocabulary,
        limits: GrammarLimits,
        on_ready: Callable[[GrammarSpec], None],
        on_failed: Callable[[GrammarSpec, str, bool], None],
        enable_jump_forward: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._clock = clock
        self._setup = MatcherSetup.of(vocabulary, ForcedText(tokenizer) if enable_jump_forward else None)
        self._lock = threading.Lock()
        self._ready: OrderedDict[GrammarSpec, Compiled] = OrderedDict()  # least recently used first
        self._ready_bytes = 0
        self._pending: set[GrammarSpec] = set()
        self._failed: OrderedDict[GrammarSpec, tuple[float, str]] = OrderedDict()  # until when, and why
        self._pool = CompilerPool(vocabulary, limits, self._compiled)

    @property
    def pool(self) -> CompilerPool:
        return self._pool

    @property
    def cached_bytes(self) -> int:
        return self._ready_bytes

    def open(self, spec: GrammarSpec) -> XgrammarMatcher | None:
        with self._lock:
            found = self._ready.get(spec)
            if found is not None:
                self._ready.move_to_end(spec)
            elif spec in self._pending:
                return None
            else:
                reason, busy = self._begin(spec)
        if found is None:
            if reason:
                self._on_failed(spec, reason, busy)
            return None
        factor = self._limits.loop_factor
        meter = StepMeter(self._limits.step_ms * factor, self._limits.burst_ms * factor)
        return XgrammarMatcher(found.grammar, self._setup, meter)

    def close(self) -> None:
        """Ends the compiling processes. Nothing is called back after it; matchers stay usable."""
        self._pool.close()

    def _begin(self, spec: GrammarSpec) -> tuple[str, bool]:
        """Starts a compilation, or says why not and whether that is for want of room. Holds the lock."""
        if len(spec.source) > MAX_GRAMMAR_BYTES or len(spec.source.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            return f"{spec.kind}: longer than {MAX_GRAMMAR_BYTES} bytes", False
        until, reason = self._failed.get(spec, (0.0, ""))
        if reason and self._clock() < until:
            return reason, False
        if not self._pool.submit(spec):
            return f"{spec.kind}: too many grammars are waiting to be compiled, try again later", True
        self._pending.add(spec)
        return "", False

    def _compiled(self, spec: GrammarSpec, compiled: Compiled | None, reason: str) -> None:
        """On one of the pool's threads."""
        with self._lock:
            self._pending.discard(spec)
            if compiled is not None:
                self._keep(spec, compiled)
            else:
                self._remember(spec, reason)
        if compiled is not None:
            self._on_ready(spec)
        else:
            logger.info("grammar refused: %s", reason)
            self._on_failed(spec, reason, False)

    def _keep(self, spec: GrammarSpec, compiled: Compiled) -> None:
        self._ready[spec] = compiled
        self._ready_bytes += compiled.size
        while self._ready_bytes > self._limits.cache_mib * MIB and len(self._ready) > 1:
            _, dropped = self._ready.popitem(last=False)
            self._ready_bytes -= dropped.size

    def _remember(self, spec: GrammarSpec, reason: str) -> None:
        self._failed[spec] = (self._clock() + self._limits.failure_s, reason)
        self._failed.move_to_end(spec)
        while len(self._failed) > MAX_FAILURES:
            self._failed.popitem(last=False)
