"""Results of the comparison and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tests.benchmarks.engines.catalogue import ENGINES, ROOTSTOCK, Variant

NOT_RUN = "–"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Result of one workload on one engine in one round."""

    round: int
    variant: Variant
    workload: str  # name of the workload
    rate: float | None  # tokens per second (Workload.tokens), or None if the workload failed
    failure: str = ""  # reason of the failure
    memory: int = 0  # resident bytes of the engine after the workload
    busy_cores: float = 0.0  # cores that other processes used just before the engine started


def spread(values: Sequence[float], digits: int) -> str:
    """Returns the median and the range of the values."""
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


class Results:
    """All measurements. A workload that failed in one round has no figure."""

    def __init__(self, found: Sequence[Measurement], absent: dict[Variant, str]) -> None:
        self._found = found
        self._absent = absent  # reason by variant
        self._variants = list(dict.fromkeys(one.variant for one in found if one.variant not in absent))
        self._variants.sort(key=lambda variant: (-variant.bits, list(ENGINES).index(variant.engine)))
        self._workloads = list(dict.fromkeys(one.workload for one in found))

    @property
    def failed(self) -> bool:
        """Whether a workload failed."""
        return any(one.failure for one in self._found)

    def rates(self, variant: Variant, workload: str) -> dict[int, float]:
        """Returns the rates by round; empty if the workload failed in a round or was not run."""
        of = [one for one in self._found if one.variant == variant and one.workload == workload]
        return {one.round: one.rate for one in of if one.rate is not None} if not any(one.failure for one in of) else {}

    def best(self, bits: int, workload: str) -> Variant | None:
        """Returns the other engine with the highest median rate at a number of bits, or None without any rate."""
        others = [v for v in self._variants if v.bits == bits and v.engine != ROOTSTOCK and self.rates(v, workload)]
        return max(others, key=lambda variant: median(self.rates(variant, workload).values()), default=None)

    def tables(self) -> str:
        """Returns Markdown tables of rates and ratios, then lists of failed workloads and absent engines."""
        ratios = self._ratio_rows()
        parts = [self._table("tokens/s", self._rate_rows(), "memory, MB"), *[self._table("ratio", ratios)] * bool(ratios)]
        failures = [
            f"- {one.variant.label}, {one.workload}, round {one.round}: {one.failure}" for one in self._found if one.failure
        ]
        absent = [f"- {variant.label}: {reason}" for variant, reason in self._absent.items()]
        parts += ["\n".join(["Failed:", *failures])] * bool(failures) + ["\n".join(["Absent:", *absent])] * bool(absent)
        return "\n\n".join(parts)

    def _table(self, what: str, rows: list[list[str]], *more: str) -> str:
        head = [what, *(f"{name} in flight" if name.isdigit() else name for name in self._workloads), *more]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---", *["---:"] * (len(head) - 1)], *rows])

    def _rate_rows(self) -> list[list[str]]:
        rows = []
        for variant in self._variants:
            of = [one for one in self._found if one.variant == variant]
            memory = [max(one.memory for one in of if one.round == number) / 1e6 for number in {one.round for one in of}]
            rows.append([variant.label, *(self._rate_cell(variant, name) for name in self._workloads), spread(memory, 0)])
        return rows

    def _rate_cell(self, variant: Variant, workload: str) -> str:
        if rates := self.rates(variant, workload):
            return spread(list(rates.values()), 1)
        return (
            "failed" if any(one.failure for one in self._found if (one.variant, one.workload) == (variant, workload)) else NOT_RUN
        )

    def _ratio_rows(self) -> list[list[str]]:
        """Returns one row for each number of bits: Rootstock's rate divided by that of the best other engine, round by round."""
        ours = [variant for variant in self._variants if variant.engine == ROOTSTOCK]
        return [[f"Rootstock ÷ best, {v.bits} bits", *(self._ratio_cell(v, name) for name in self._workloads)] for v in ours]

    def _ratio_cell(self, ours: Variant, workload: str) -> str:
        best, rates = self.best(ours.bits, workload), self.rates(ours, workload)
        others = self.rates(best, workload) if best else {}
        ratios = [rates[number] / others[number] for number in rates if number in others]
        return f"{spread(ratios, 2)}, {ENGINES[best.engine].title}" if best and ratios else NOT_RUN
