"""python -m tests.benchmarks.device_host_cost: host time of a decode step in the GPU executor, without kernels.

Kernels, graphs and the model do nothing, so the time of kernel launches is not included. The remaining time is the loop thread's
work to prepare a step and to read its result. Prints the median of each call in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from rootstock_llm.kernels.contracts.coded_weight import Matrix
from rootstock_llm.kernels.contracts.ops import PackedLinear
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.services.worker.core.contracts.graph_limits import GraphLimits
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, ForwardMode, SamplingParams, SlotParams
from rootstock_llm.services.worker.exec.build import EXTRA_GRAPH_ROWS, DeviceOptions, DeviceParts, assemble_executor
from rootstock_llm.services.worker.exec.executor import DeviceExecutor
from rootstock_llm.services.worker.exec.kernel_set import KernelSet
from rootstock_llm.services.worker.exec.models.decoder import Decoder
from rootstock_llm.services.worker.exec.models.decoder_config import DecoderConfig
from rootstock_llm.services.worker.exec.models.families import Qwen3
from rootstock_llm.services.worker.exec.models.loaded_model import LoadedModel
from rootstock_llm.services.worker.exec.pools.embedding_pool import PoolingConfig, PoolingKind
from rootstock_llm.services.worker.exec.weights.source import RandomSource, WeightReader
from tests.exec.device_doubles import InlineStreams

PAGE_SIZE, CONTEXT = 16, 4096
NOTHING = np.empty(0, dtype=np.int32)


class NoKernels:
    """A kernel set whose kernels do nothing."""

    def allocate_pool(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def pack_linear(self, weight: Matrix, bias: torch.Tensor | None) -> PackedLinear:
        return reference.pack_linear(weight, bias)

    def pack_gated(self, weight: Matrix, bias: torch.Tensor | None) -> PackedLinear:
        return reference.pack_gated(weight, bias)

    def resolve_tokens(self, input_ids: torch.Tensor, *_: Any) -> None:
        input_ids.zero_()  # the embedding lookup still reads the ids

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class NoAttention:
    name, captures = "none", True

    def plan(self, batch: Any) -> None: ...

    def attend(self, *_: Any) -> None: ...

    def release_graphs(self) -> None: ...


class NoGraph:
    def replay(self) -> None: ...


class NoGraphMemory:
    def capture(self, work: Any) -> NoGraph:
        work()
        return NoGraph()


SHAPE = DecoderConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=1024,
    hidden_size=16,
    intermediate_size=16,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
    rms_norm_eps=1e-6,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
    rope={"rope_type": "default", "rope_theta": 10000.0},
    windows=(0, 0),
    qk_norm=True,
)


def executor_of(rows: int, graphs: bool) -> DeviceExecutor:
    kernels = NoKernels()
    weights = WeightReader(RandomSource(torch.float32, "cpu", 0), kernels)  # type: ignore[arg-type]
    model = Qwen3.read(weights, SHAPE)
    cos_sin = SHAPE.rope_tables(CONTEXT + PAGE_SIZE)
    loaded = LoadedModel(
        model=Decoder(model, cos_sin, kernels.paged_attention),
        config=SHAPE,
        kernels=kernels,  # type: ignore[arg-type]
        dtype=torch.float32,
        layers=model.cache,
        context_len=CONTEXT,
        weight_bytes=0,
        pooling=PoolingConfig(PoolingKind.LAST, True),
        generates=True,
    )
    parts = DeviceParts(
        streams=InlineStreams(),
        kernels=KernelSet(kernels, kernels),  # type: ignore[arg-type]
        attention=lambda _: NoAttention(),  # type: ignore[arg-type, return-value]
        graph_memory=NoGraphMemory(),
    )
    options = DeviceOptions(
        device="cpu", max_graph_rows=rows + EXTRA_GRAPH_ROWS, max_tokens=rows + EXTRA_GRAPH_ROWS, cuda_graphs=graphs
    )
    made, _ = assemble_executor(loaded, rows, PAGE_SIZE, rows * CONTEXT // PAGE_SIZE, 0.5, options, lambda _: None, False, parts)
    return made


def plan_of(step: int, rows: int, known: int, admitted: tuple[SlotParams, ...] = ()) -> BatchPlan:
    """Returns the plan of a decode step.

    Args:
        known: number of the first row's tokens that a grammar has determined; 0 if this row decodes one token like the others.
    """
    slots, counts = np.arange(rows, dtype=np.int32), np.ones(rows, dtype=np.int32)
    counts[0] = max(known, 1)
    starts = (100 + step + np.arange(rows)).astype(np.int32)
    new = np.flatnonzero(starts % PAGE_SIZE == 0).astype(np.int32)
    return BatchPlan(
        step_id=step, mode=ForwardMode.MIXED if known else ForwardMode.DECODE, num_extend=int(known > 0), slots=slots,
        starts=starts, num_tokens=counts, input_ids=np.ones(known, dtype=np.int32),
        sample=np.ones(rows, dtype=np.bool_), mask_rows=NOTHING, prompt_logprob_rows=NOTHING, prompt_logprob_offsets=NOTHING,
        prompt_logprob_nexts=NOTHING, admitted=admitted, table_slots=slots[new], table_firsts=starts[new] // PAGE_SIZE,
        table_counts=np.ones(len(new), dtype=np.int32), table_pages=new,
    )  # fmt: skip


def measured(rows: int, steps: int, graphs: bool, known: int) -> dict[str, float]:
    executor = executor_of(rows, graphs)
    executor.runner.graph_limits = GraphLimits(rows + EXTRA_GRAPH_ROWS, 1 << 30)
    params = SamplingParams(1 << 20, temperature=0.7, seed=1)
    admitted = tuple(SlotParams(slot, 10, params, (), NOTHING) for slot in range(rows))
    times: dict[str, list[float]] = {"forward": [], "sample": [], "wait": []}
    for step in range(steps):
        plan = plan_of(step, rows, known if step else 0, admitted if step == 0 else ())
        begun = time.perf_counter()
        run = executor.forward(plan)
        launched = time.perf_counter()
        executor.sample(run, {})
        sampled = time.perf_counter()
        executor.wait(run)
        ended = time.perf_counter()
        for name, seconds in zip(times, (launched - begun, sampled - launched, ended - sampled), strict=True):
            times[name].append(seconds)
    assert not graphs or not executor.runner.stats.eager_steps, "every step must use a graph"
    return {name: statistics.median(values[10:]) * 1e6 for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--eager", action="store_true", help="no graphs")
    parser.add_argument(
        "--known", type=int, default=0, help="number of tokens of the first row that a grammar has determined (default 0)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'rows':>5} {'graphs':>6}", *(f"{name:>10}" for name in ("forward us", "sample us", "wait us", "together")))
    for rows in options.rows:
        found = measured(rows, options.steps, not options.eager, options.known)
        calls = (*found.values(), sum(found.values()))
        print(f"{rows:5} {'no' if options.eager else 'yes':>6}", *(f"{call:10.0f}" for call in calls), flush=True)


if __name__ == "__main__":
    main()
