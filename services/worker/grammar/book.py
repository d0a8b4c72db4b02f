"""Compiled grammars by content: compiled once however many ask, kept while there is room, refusals remembered for a while.

open() is called on the loop's thread; compilations end on the pool's. One lock guards the book, held for moments.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from services.shared.hf_tokenizer import HfTokenizer
from services.shared.limits import MAX_GRAMMAR_BYTES
from services.worker.core.contracts.sampling import GrammarSpec
from services.worker.grammar.compile.compiled import Compiled
from services.worker.grammar.compile.compiler_pool import QUEUE_FULL, CompilerPool
from services.worker.grammar.compile.grammar_limits import MIB, GrammarLimits
from services.worker.grammar.compile.vocabulary import Vocabulary
from services.worker.grammar.match.forced_text import ForcedText
from services.worker.grammar.match.matcher import TOO_SLOW, MatcherSetup, XgrammarMatcher
from services.worker.text.step_meter import StepMeter

MAX_FAILURES = 1024

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Kept:
    """size: in bytes, with its source. used_at: by the book's clock. borne: it has cost too much once."""

    compiled: Compiled
    size: int
    used_at: float
    borne: bool = False


class CompiledBook:
    """Implements core.grammar.GrammarBook.

    on_ready(spec) and on_failed(spec, reason, busy) follow every open() that gave None, from any thread, perhaps before it
    returns; they must only leave a message. busy: it could not be compiled just now, and may be good. After on_ready the grammar
    stays at least until another one is ready, or until it overruns its meters in use a second time: then it is refused like a
    bad one.

    on_compiled(seconds, chars) is told of every grammar that was compiled: the time since it was first asked for, and the length
    of its source. On the pool's threads, one at a time; it returns at once.
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
        self.on_compiled: Callable[[float, int], None] = lambda seconds, chars: None
        self._clock = clock
        self._setup = MatcherSetup.of(vocabulary, ForcedText(tokenizer) if enable_jump_forward else None)
        self._lock = threading.Lock()
        self._ready: OrderedDict[GrammarSpec, _Kept] = OrderedDict()  # least recently used first
        self.num_compiled = 0
        self._ready_bytes = 0
        self._pending: dict[GrammarSpec, float] = {}  # since when
        self._failed: OrderedDict[bytes, tuple[float, str]] = OrderedDict()  # by digest of the spec: until when, and why
        self._pool = CompilerPool(vocabulary, limits, self._compiled, enable_jump_forward)

    @property
    def pool(self) -> CompilerPool:
        return self._pool

    @property
    def cached_bytes(self) -> int:
        return self._ready_bytes

    def open(self, spec: GrammarSpec, tenant: bytes = b"") -> XgrammarMatcher | None:
        with self._lock:
            found = self._ready.get(spec)
            if found is not None:
                self._ready.move_to_end(spec)
                found.used_at = self._clock()
            elif spec in self._pending:
                return None
            else:
                reason, busy = self._begin(spec, tenant)
        if found is None:
            if reason:
                self._on_failed(spec, reason, busy)
            return None
        factor = self._limits.loop_factor
        meter = StepMeter(self._limits.step_ms * factor, self._limits.burst_ms * factor)
        try:
            return XgrammarMatcher(found.compiled, self._setup, meter, lambda: self._bears(spec, found))
        except Exception:  # of the library's: this grammar's end, and not the loop's
            logger.exception("a matcher could not be made")
            reason = f"{spec.label}: it cannot be started"
            self._condemn(spec, reason)
            self._on_failed(spec, reason, False)
            return None

    def drop_unused(self) -> bool:
        """Lets go of what has not been asked for within idle_s, but for unused_mib of it; whether there was anything."""
        with self._lock:
            before, oldest_of_use = len(self._ready), self._clock() - self._limits.idle_s
            while self._ready_bytes > self._limits.unused_mib * MIB and next(iter(self._ready.values())).used_at < oldest_of_use:
                self._drop_oldest()
            return len(self._ready) < before

    def close(self) -> None:
        """Ends the compiling processes. Nothing is called back after it; matchers stay usable."""
        self._pool.close()

    def _begin(self, spec: GrammarSpec, tenant: bytes) -> tuple[str, bool]:
        """Starts a compilation, or says why not and whether that is for want of room. Holds the lock."""
        if len(spec.source) > MAX_GRAMMAR_BYTES or len(spec.source.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            return f"{spec.label}: longer than {MAX_GRAMMAR_BYTES} bytes", False
        until, reason = self._failed.get(_digest(spec), (0.0, ""))
        if reason and self._clock() < until:
            return reason, False
        if not self._pool.submit(spec, tenant):
            return f"{spec.label}: {QUEUE_FULL}", True
        self._pending[spec] = self._clock()
        return "", False

    def _compiled(self, spec: GrammarSpec, compiled: Compiled | None, reason: str, busy: bool) -> None:
        """On one of the pool's threads."""
        with self._lock:
            since = self._pending.pop(spec)
            self.num_compiled += 1
            if compiled is not None:
                self._keep(spec, compiled)
                self.on_compiled(self._clock() - since, len(spec.source))
            elif not busy:
                self._remember(spec, reason)
        if compiled is not None:
            self._on_ready(spec)
        else:
            logger.info("grammar refused: %s", reason)
            self._on_failed(spec, reason, busy)

    def _bears(self, spec: GrammarSpec, kept: _Kept) -> bool:
        """That a matcher has cost too much: once. A machine that stands still for a moment looks the same."""
        if not kept.borne:
            kept.borne = True
            logger.info("a grammar has taken too long once, the next time it is refused: %s", spec.kind)
            return True
        self._condemn(spec, f"{spec.label}: {TOO_SLOW}")
        return False

    def _condemn(self, spec: GrammarSpec, reason: str) -> None:
        """A matcher has shown what the trial had not foretold: others of this grammar would do the same."""
        logger.info("grammar refused from here on: %s", reason)
        with self._lock:
            dropped = self._ready.pop(spec, None)
            if dropped is not None:
                self._ready_bytes -= dropped.size
            self._remember(spec, reason)

    def _keep(self, spec: GrammarSpec, compiled: Compiled) -> None:
        self._ready[spec] = kept = _Kept(compiled, compiled.size + len(spec.source), self._clock())
        self._ready_bytes += kept.size
        while self._ready_bytes > self._limits.cache_mib * MIB and len(self._ready) > 1:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._ready_bytes -= self._ready.popitem(last=False)[1].size

    def _remember(self, spec: GrammarSpec, reason: str) -> None:
        key = _digest(spec)
        self._failed[key] = (self._clock() + self._limits.failure_s, reason)
        self._failed.move_to_end(key)
        while len(self._failed) > MAX_FAILURES:
            self._failed.popitem(last=False)


def _digest(spec: GrammarSpec) -> bytes:
    """Stands for a refused spec, whose text would be kept for nothing but comparison."""
    return hashlib.sha256(f"{spec.kind}\0{spec.source}\0{spec.parts}".encode(errors="surrogatepass")).digest()
