"""Caches the compiled grammars of a worker by their source, up to cache_mib. Refusals are cached for failure_s.

Requests with the same grammar share one compilation. open() is called on the scheduler loop's thread; compilations end on the
pool's threads. One lock guards the book and is never held during a compilation. UnusedGrammars returns the memory of unused
grammars to the operating system, because clients often use a set of schemas for a short time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer
from rootstock_llm.services.shared.limits import MAX_GRAMMAR_BYTES
from rootstock_llm.services.shared.memory import trim_heap
from rootstock_llm.services.worker.core.contracts.grammar import GrammarSpec
from rootstock_llm.services.worker.grammar.compile.compiler_pool import QUEUE_FULL, CompilerPool
from rootstock_llm.services.worker.grammar.compile.grammar_compiler import Compiled
from rootstock_llm.services.worker.grammar.compile.grammar_limits import MIB, GrammarLimits
from rootstock_llm.services.worker.grammar.compile.vocabulary import Vocabulary
from rootstock_llm.services.worker.grammar.match.matcher import TOO_SLOW, ForcedText, MatcherSetup, XgrammarMatcher
from rootstock_llm.services.worker.text.step_meter import StepMeter

MAX_FAILURES = 1024  # largest number of cached refusals
EVERY_S = 15.0  # seconds between two checks for unused grammars
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _CachedGrammar:
    """A compiled grammar that is ready for use."""

    compiled: Compiled
    size: int  # bytes, including the source
    used_at: float  # time of the last open(), on the book's clock
    has_overrun: bool = False  # whether a matcher has overrun its meter once; at the next overrun, the grammar is refused


class CompiledBook:
    """Implements core.contracts.grammar.GrammarBook.

    Callbacks:

    - After an open() that returns None, on_ready(spec) or on_failed(spec, reason, busy) is called, on any thread and possibly
      before open() returns. Both must only post a message. `busy` means that the compiler is overloaded or has ended; the grammar
      may be valid.
    - on_compiled(seconds, chars) is called after each successful compilation, with the time since the first open() and the length
      of the source. The pool's threads call it, one at a time; it must not block.

    After on_ready(), the grammar stays cached at least until another grammar is ready or the grammar is unused for idle_s. A
    grammar whose matchers overrun their meters twice is refused for failure_s.
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
        self._ready: OrderedDict[GrammarSpec, _CachedGrammar] = OrderedDict()  # least recently used first
        self.num_compiled = 0
        self._ready_bytes = 0
        self._pending: dict[GrammarSpec, float] = {}  # grammars that are being compiled, with the time of their first open()
        self._failed: OrderedDict[bytes, tuple[float, str]] = OrderedDict()  # (end of the refusal, reason) by digest of the spec
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
            return XgrammarMatcher(found.compiled, self._setup, meter, lambda: self._tolerates_overrun(spec, found))
        except Exception:  # an exception of xgrammar must not end the loop; it refuses only this grammar
            logger.exception("could not create a grammar matcher")
            reason = f"{spec.label}: an internal error, see the worker's log"
            self._refuse_compiled(spec, reason)
            self._on_failed(spec, reason, False)
            return None

    def drop_unused(self) -> bool:
        """Drops grammars that were not opened within idle_s, oldest first, until all grammars together fit into unused_mib.

        Returns:
            Whether a grammar was dropped.
        """
        with self._lock:
            before, idle_since = len(self._ready), self._clock() - self._limits.idle_s
            while self._ready_bytes > self._limits.unused_mib * MIB and next(iter(self._ready.values())).used_at < idle_since:
                self._drop_oldest()
            return len(self._ready) < before

    def close(self) -> None:
        """Ends the compiling process and its children. No callback is called afterwards; matchers stay usable."""
        self._pool.close()

    def _begin(self, spec: GrammarSpec, tenant: bytes) -> tuple[str, bool]:
        """Starts a compilation. The caller holds the lock.

        Returns:
            ("", False) if the compilation was started. Otherwise (reason of the refusal, whether the reason is a full queue).
        """
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
        """Stores the result of a compilation and calls back. Called on one of the pool's threads."""
        with self._lock:
            since = self._pending.pop(spec)
            self.num_compiled += 1
            if compiled is not None:
                self._cache(spec, compiled)
                self.on_compiled(self._clock() - since, len(spec.source))
            elif not busy:
                self._cache_refusal(spec, reason)
        if compiled is not None:
            self._on_ready(spec)
        else:
            logger.info("grammar refused: %s", reason)
            self._on_failed(spec, reason, busy)

    def _tolerates_overrun(self, spec: GrammarSpec, cached: _CachedGrammar) -> bool:
        """Returns whether a matcher of the grammar may continue after it has overrun its meter.

        The first overrun of a grammar is tolerated, because a short stall of the machine may have caused it.
        """
        if not cached.has_overrun:
            cached.has_overrun = True
            logger.info("a grammar exceeded its CPU time; the worker refuses it after a second overrun: %s", spec.kind)
            return True
        self._refuse_compiled(spec, f"{spec.label}: {TOO_SLOW}")
        return False

    def _refuse_compiled(self, spec: GrammarSpec, reason: str) -> None:
        """Drops a compiled grammar whose matcher failed although its trial succeeded, and refuses it for failure_s."""
        logger.info("a compiled grammar is refused for %g s: %s", self._limits.failure_s, reason)
        with self._lock:
            dropped = self._ready.pop(spec, None)
            if dropped is not None:
                self._ready_bytes -= dropped.size
            self._cache_refusal(spec, reason)

    def _cache(self, spec: GrammarSpec, compiled: Compiled) -> None:
        self._ready[spec] = cached = _CachedGrammar(compiled, compiled.size + len(spec.source), self._clock())
        self._ready_bytes += cached.size
        while self._ready_bytes > self._limits.cache_mib * MIB and len(self._ready) > 1:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._ready_bytes -= self._ready.popitem(last=False)[1].size

    def _cache_refusal(self, spec: GrammarSpec, reason: str) -> None:
        key = _digest(spec)
        self._failed[key] = (self._clock() + self._limits.failure_s, reason)
        self._failed.move_to_end(key)
        while len(self._failed) > MAX_FAILURES:
            self._failed.popitem(last=False)


def _digest(spec: GrammarSpec) -> bytes:
    """Returns a digest of a spec. The cache of refusals has digests instead of specs, because specs may be large."""
    return hashlib.sha256(f"{spec.kind}\0{spec.source}\0{spec.parts}".encode(errors="surrogatepass")).digest()


class Book(Protocol):
    @property
    def num_compiled(self) -> int:
        """Number of compilations since the book was created, including refused grammars."""

    def drop_unused(self) -> bool:
        """Drops unused grammars. Returns whether a grammar was dropped."""


class UnusedGrammars:
    """Drops unused grammars of a book regularly and trims the heap."""

    def __init__(self, book: Book, every_s: float = EVERY_S) -> None:
        self._book = book
        self._every_s = every_s

    async def run(self) -> None:
        """Runs until cancelled.

        After grammars were compiled or dropped, trims the heap after the first `every_s` seconds without compilations.
        """
        seen, trim_due = self._book.num_compiled, False
        while True:
            await asyncio.sleep(self._every_s)
            compiled = self._book.num_compiled
            trim_due = self._book.drop_unused() or trim_due or compiled != seen
            if trim_due and compiled == seen:
                trim_due = False
                await asyncio.to_thread(trim_heap)
            seen = compiled
