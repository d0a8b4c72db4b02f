"""Limits of one grammar, for the pool, the compiling process and the matchers."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of compiling and matching."""

    compile_s: float = 10.0  # CPU time of one compilation with its trial
    quick_s: float = 1.0  # time after which a grammar goes to the slow queue, where its compilation starts over
    memory_mib: int = 512  # memory that a compilation may allocate
    compiled_mib: int = 32  # size of a compiled grammar
    cache_mib: int = 256  # size of all compiled grammars in the book
    unused_mib: int = 16  # size down to which grammars that were not opened within idle_s are dropped
    idle_s: float = 60.0
    workers: int = 2  # threads of the quick queue; the slow queue has one more
    queue: int = 64  # grammars of one tenant that may wait in each queue
    failure_s: float = 60.0  # time for which a refusal is remembered
    step_ms: float = 5.0  # CPU time of one step of a request, see StepMeter
    burst_ms: float = 50.0  # CPU time that a request may use at once, see StepMeter
    fill_ms: float = 20.0  # CPU time of the masks of all requests of a step, see MaskFiller
    loop_factor: float = 2.0  # multiple of step_ms and burst_ms that applies outside of the trial
