"""What one grammar may cost. One frozen table for the pool, the compiling process and the matchers."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """compile_s: wall time of one compilation with its trial. quick_s: after so long it gives way to others and is tried once
    more, behind all quick ones. memory_mib: what a compilation may allocate. compiled_mib: size of a compiled
    grammar. cache_mib: compiled grammars that are kept. unused_mib: of those without use for idle_s. workers: compilations at
    once, besides one slow one. queue: grammars that wait, in each of the two queues. failure_s: how long a refusal is
    remembered. step_ms, burst_ms: CPU time that masks, accepts and jumps of one output may take, see StepMeter. loop_factor: how
    much more than that is borne outside the trial. fill_ms: CPU time of the same for all outputs of a step together, see
    MaskFiller."""

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
