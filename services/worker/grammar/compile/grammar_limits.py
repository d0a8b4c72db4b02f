"""Limits of grammars for the pool, the compiling process and the matchers."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of compiling and matching."""

    compile_s: float = 10.0  # CPU time of one compilation, including its trial
    quick_s: float = 1.0  # time after which a compilation in the quick queue is ended and starts again in the slow queue
    memory_mib: int = 512  # memory that one compilation may allocate
    compiled_mib: int = 32  # size of one compiled grammar
    cache_mib: int = 256  # size of all compiled grammars that the worker caches
    unused_mib: int = 16  # if all compiled grammars together exceed this size, grammars that are unused for idle_s are dropped
    idle_s: float = 60.0  # time after which a grammar counts as unused
    workers: int = 2  # threads of the quick queue; one additional thread serves the slow queue
    queue: int = 64  # largest number of waiting grammars of one tenant in each queue
    failure_s: float = 60.0  # time for which a refusal is cached
    step_ms: float = 5.0  # average CPU time per token of a trial, see StepMeter
    burst_ms: float = 50.0  # CPU time by which a trial may exceed this average in total, see StepMeter
    fill_ms: float = 20.0  # CPU time of all masks of a step, see MaskFiller
    # Factor on step_ms and burst_ms for requests. The trial uses no factor, so that a grammar that passes it is unlikely to
    # exceed the limits in a request.
    loop_factor: float = 2.0
