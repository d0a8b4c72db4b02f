"""Defines time models of steps: named presets, JSON files, and fits to measured steps of a real executor.

A fit minimises the relative error by least squares, with no coefficient below 0.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.sim.core.run.worker import NoText
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import Submit
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, SamplingParams
from rootstock_llm.services.worker.core.scheduler import Scheduler
from rootstock_llm.services.worker.exec.contracts.protocol import Executor
from rootstock_llm.services.worker.exec.fake import TimeModel

TYPES = get_type_hints(TimeModel)  # float or int by field name

# h200-like is an assumption, not a measurement: an 8B model in bfloat16 on one H200. `base` is the time of reading 16 GB of
# weights at 4 TB/s and of the kernel launches. A prefill token takes 16 GFLOP at 500 TFLOP/s. Each row adds time for
# sampling and bookkeeping. A token of context takes a read of 128 KiB of KV at 4 TB/s.
#
# h200-8b assumes the best kernels: the data sheet's 4.8 TB/s, 800 of its 989 TFLOP/s, and 0.7 ms of launches. An eager step takes
# 181 us longer on the host (297 us instead of 116 us, measured by device_host_cost at 256 rows without launches). In 181 us, the
# device could read 6,700 tokens of context.
PRESETS = {
    "h200-like": TimeModel(base=5e-3, per_prefill_token=32e-6, per_row=10e-6, per_context_token=33e-9),
    "h200-8b": TimeModel(
        base=4e-3,
        per_prefill_token=20e-6,
        per_row=10e-6,
        per_context_token=27e-9,
        eager_step=181e-6,
        graph_rows=256,
        graph_rereads=6700,
    ),
    "zero": TimeModel(),
}


def load_time_model(name_or_path: str) -> TimeModel:
    """Returns the preset with this name, or the time model in the JSON file at this path.

    The file has some of TimeModel's fields. The others get their defaults. Raises ValueError or OSError.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    record = json.loads(Path(name_or_path).read_text(encoding="utf-8"))
    if not isinstance(record, dict) or not record or not record.keys() <= TYPES.keys():
        raise ValueError(f"{name_or_path}: a time model must be a JSON object of {', '.join(TYPES)}")
    for name, value in record.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            unit = "tokens" if TYPES[name] is int else "seconds"
            raise ValueError(f"{name_or_path}: {name} of a time model must be a number of {unit}, not {value!r}")
    values: dict[str, Any] = {name: TYPES[name](value) for name, value in record.items()}
    return replace(TimeModel(), **values)


def time_model_json(model: TimeModel) -> str:
    return json.dumps(asdict(model))


F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The work and the duration of one step, in the terms of the time model."""

    prefill_tokens: int
    rows: int
    context_tokens: int  # sum of the rows' lengths
    seconds: float

    @classmethod
    def of(cls, plan: BatchPlan, seconds: float) -> StepTiming:
        return cls(len(plan.input_ids), plan.num_rows, int((plan.starts + plan.num_tokens).sum()), seconds)


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted time model and its quality."""

    model: TimeModel
    steps: int  # number of measured steps
    r2: float  # share of the variance of the durations that the model explains
    # Quantiles of |predicted - measured| / measured.
    residual_p50: float
    residual_p90: float
    residual_p99: float


def fit_time_model(timings: Sequence[StepTiming]) -> Fit:
    """Fits a time model. Raises ValueError for fewer than four timings."""
    if len(timings) < 4:
        raise ValueError(f"{len(timings)} steps are too few for four coefficients; measure at least 4")
    seconds = np.array([timing.seconds for timing in timings])
    if not (seconds > 0).all():
        raise ValueError("every timing must be above 0 seconds")
    terms = np.array([[1, timing.prefill_tokens, timing.rows, timing.context_tokens] for timing in timings], dtype=np.float64)
    coefficients = nonnegative_least_squares(terms / seconds[:, None], np.ones(len(seconds)))
    predicted = terms @ coefficients
    residuals = np.abs(predicted - seconds) / seconds
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    r2 = 1 - float(((seconds - predicted) ** 2).sum()) / spread if spread else 1.0
    base, per_prefill_token, per_row, per_context_token = coefficients.tolist()
    return Fit(
        TimeModel(base, per_prefill_token, per_row, per_context_token),
        len(timings),
        r2,
        *(float(value) for value in np.percentile(residuals, [50, 90, 99])),
    )


def nonnegative_least_squares(a: F64, b: F64) -> F64:
    """Returns the vector `x` >= 0, float64[n], that minimises `|a x - b|` for `a`, float64[m, n].

    Solves the problem for every subset of the columns, so `n` must be small, and returns the best solution without negative
    numbers.
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    best, best_error = np.zeros(a.shape[1]), float(b @ b)
    for size in range(1, a.shape[1] + 1):
        for subset in itertools.combinations(range(a.shape[1]), size):
            columns = list(subset)
            solution = np.linalg.lstsq(a[:, columns] / scale[columns], b, rcond=None)[0]
            error = float(((a[:, columns] / scale[columns] @ solution - b) ** 2).sum())
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(a.shape[1]), error
                best[columns] = solution / scale[columns]
    return best


def write_timings(path: Path, timings: Iterable[StepTiming]) -> None:
    path.write_text("".join(json.dumps(asdict(timing)) + "\n" for timing in timings), encoding="utf-8")


def read_timings(path: Path) -> list[StepTiming]:
    """Reads JSON lines with StepTiming's fields. Raises ValueError or OSError."""
    timings = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            counts = (int(record["prefill_tokens"]), int(record["rows"]), int(record["context_tokens"]))
            timings.append(StepTiming(*counts, float(record["seconds"])))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number} is not the timing of a step: {error!r}") from error
    return timings


WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class MeasureShape:
    """The batch sizes and prompt lengths to measure, in all combinations. Lengths are in tokens."""

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    output: int = 16  # output tokens of each request

    @property
    def pool_tokens(self) -> int:
        """Tokens of KV for twice the largest round, so that the scheduler never delays requests for memory."""
        return 2 * max(self.batches) * (max(self.prompts) + self.output)

    def rounds(self, capacity: int, context_len: int) -> list[tuple[int, int]]:
        """Returns the (batch, prompt) pairs that fit the context, and whose KV takes at most half of `capacity` tokens."""
        pairs = itertools.product(self.batches, self.prompts)
        return [(b, p) for b, p in pairs if 2 * b * (p + self.output) <= capacity and p + self.output <= context_len]


def measure(executor: Executor, config: SchedulerConfig, shape: MeasureShape, clock: Callable[[], float]) -> list[StepTiming]:
    """Runs steps one at a time and measures the wall time of each from launch to result. Drops the first WARM_UP_STEPS steps.

    Raises:
        ValueError: no round fits the context and the KV pool.
        ExecutorError: the executor failed.
    """
    core = Scheduler(config, NoText())
    rng = np.random.default_rng(0)
    handles = itertools.count()
    timings: list[StepTiming] = []
    rounds = shape.rounds(config.num_pages * config.page_size, config.context_len)
    if not rounds:
        raise ValueError("no batch and prompt of the given sizes fit this model's context and KV pool")
    for batch, prompt in rounds:
        params = SamplingParams(max_new_tokens=shape.output, temperature=0.0, ignore_eos=True)
        for handle in itertools.islice(handles, batch):
            ids = rng.integers(0, config.vocab_size, prompt, dtype=np.int32)
            core.submit(Submit(0, handle, "", ids, params), clock())
        timings += _drain(core, executor, clock)
    return timings[WARM_UP_STEPS:]


def _drain(core: Scheduler, executor: Executor, clock: Callable[[], float]) -> Iterator[StepTiming]:
    while (plan := core.plan(clock())) is not None:
        begun = time.perf_counter()
        run = executor.forward(plan)
        executor.sample(run, {})
        result = executor.wait(run)
        seconds = time.perf_counter() - begun
        core.commit(result, clock())
        core.take_output()
        yield StepTiming.of(plan, seconds)
