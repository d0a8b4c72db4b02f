"""Limits of one grammar, for the pool, the compiling process and the matchers."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits of compiling and matching.

    Attributes:
        compile_s: CPU time of one compilation with its trial.
        quick_s: Time after which a grammar goes to the slow queue, where it starts over.
        memory_mib: Memory that a compilation may allocate.
        compiled_mib: Size of a compiled grammar.
        cache_mib: Size of all compiled grammars that are kept.
        unused_mib: Size of kept grammars that no request has used for idle_s.
        idle_s: See unused_mib.
        workers: Threads of the quick queue. The slow queue has one more.
        queue: Grammars that may wait in each queue.
        failure_s: Time for which a refusal is remembered.
        step_ms: CPU time of one step of a request, see StepMeter.
        burst_ms: CPU time that a request may use at once, see StepMeter.
        fill_ms: CPU time of the masks of all requests of a step, see MaskFiller.
        loop_factor: Multiple of step_ms and burst_ms that applies outside of the trial.
    """

    compile_s: float = 10.0
    quick_s: float = 1.0
    memory_mib: int = 512
    compiled_mib: int = 32
    cache_mib: int = 256
    unused_mib: int = 16
    idle_s: float = 60.0
    workers: int = 2
    queue: int = 64
    failure_s: float = 60.0
    step_ms: float = 5.0
    burst_ms: float = 50.0
    fill_ms: float = 20.0
    loop_factor: float = 2.0
