"""A batch whose requests have finished prefill, so that only decode steps are measured."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

from rootstock_llm.services.worker.core.contracts.plan import ForwardMode
from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.gpu.profile import NoEvents, Profile, profiled
from tests.benchmarks.gpu.serving import Serving
from tests.benchmarks.gpu.workloads import fixed

WARM_STEPS = 8


def output_of(rows: int, steps: int) -> int:
    """Returns the number of output tokens per row that lets all rows decode together for `steps` steps.

    The number is larger than `steps`, because the rows that are admitted first also decode while the last prompts are computed.
    """
    return steps + 2 * WARM_STEPS + rows


class Decoding:
    """Running requests whose prompts are computed. Each iteration of the loop is a decode step of all requests.

    Args:
        rows: number of requests.
        steps: number of steps that all later calls run in total.
    """

    def __init__(self, serving: Serving, rows: int, prompt_len: int, steps: int, vocab: int, seed: int = 1) -> None:
        self._serving = serving
        serving.begin()
        for prompt in fixed(rows, prompt_len, 1, vocab, seed).prompts:
            serving.submit(prompt, output_of(rows, steps))
        for _ in range(100 * rows):
            plan = serving.turn()
            if plan is not None and plan.mode is ForwardMode.DECODE and plan.num_rows == rows:
                break
        else:
            raise RuntimeError(f"no step decoded all {rows} rows")
        for _ in range(WARM_STEPS):
            serving.turn()

    def step_s(self, steps: int) -> tuple[float, float]:
        """Returns the median and mean seconds of a step: wall time on the host between the tokens of consecutive steps."""
        self._serving.begin()
        for _ in range(steps + 1):
            self._serving.turn()
        times = [at for at, _ in self._serving.end().marks][: steps + 1]
        taken = [after - before for before, after in pairwise(times)]
        return statistics.median(taken), (times[-1] - times[0]) / len(taken)

    def profile(self, steps: int, on_gpu: bool, keep: Path | None = None) -> Profile:
        """Profiles `steps` decode steps. `keep` is the file for the trace, see profiled()."""

        def turns() -> None:
            for _ in range(steps):
                self._serving.turn()
            self._serving.end()

        return profiled(turns, on_gpu, steps, keep)

    def journal_profile(self, journal: Journal, name: str, steps: int, on_gpu: bool) -> None:
        """Stores a profile of decode steps in the journal. If the trace has no device events, adds a note instead."""
        try:
            profile = self.profile(steps, on_gpu, journal.beside(f"{name}.trace.json.gz"))
        except NoEvents as error:
            journal.note(f"No profile of {name}: {error}.")
        else:
            journal_profile(journal, name, profile)

    def close(self) -> None:
        self._serving.forget()


def journal_profile(journal: Journal, name: str, profile: Profile) -> None:
    """Stores the profile and prints the device time by kernel."""
    journal.profile(name, profile.as_dict())
    columns = ("kernel", "share", "calls per step", "mean µs")
    for kernel, share, calls, mean_us in profile.kernels:
        journal.row(f"{name}: device time by kernel", columns, (kernel, f"{share:.1%}", calls, mean_us))
