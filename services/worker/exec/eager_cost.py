"""Measures the extra cost of a decode step without a graph, in decode steps and in tokens of KV that could be read instead."""

from __future__ import annotations

import time
from collections.abc import Callable

from rootstock_llm.services.worker.core.contracts.graph_limits import GraphLimits
from rootstock_llm.services.worker.exec.attention.backend import AttentionBatch
from rootstock_llm.services.worker.exec.contracts.step_data import ForwardBatch, SampleBatch
from rootstock_llm.services.worker.exec.step.idle_steps import idle_decode
from rootstock_llm.services.worker.exec.step.model_runner import DeviceRunner
from rootstock_llm.services.worker.exec.streams.cuda_streams import Streams

STEPS = 20  # steps per measurement


def graph_limits(rows: int, eager_cost: float, weight_bytes: int, kv_bytes_per_token: int) -> GraphLimits:
    """Returns the limits up to which a graph is cheaper than a step without one.

    A decode step mainly reads the weights, so reading a token of KV takes kv_bytes_per_token / weight_bytes of its time. A graph
    may read as many tokens again as take the time that a step without a graph costs in addition.

    Args:
        rows: rows of the largest graph.
        eager_cost: extra time of a step without a graph, in replayed steps.
    """
    assert rows > 0 and eager_cost >= 0, "a graph has rows, and a step without it is no quicker"
    readable = int(eager_cost * weight_bytes / kv_bytes_per_token) if kv_bytes_per_token else 0
    return GraphLimits(rows, readable, eager_cost)


def measured_eager_cost(runner: DeviceRunner, rows: int) -> float:
    """Returns the extra time of a step of `rows` rows that is launched kernel by kernel, in replayed steps.

    Steps are launched back to back, so that the host works while the device computes, as it does in service. Called on the
    forward stream; waits for the device.
    """
    assert runner.graphs is not None, "there is a graph to compare with"
    graph, idle = runner.graphs.for_rows(rows), ForwardBatch.idle(runner.passes.capacity, rows)
    assert graph is not None and graph.size == rows, "rows are a graph's"

    def replayed() -> None:
        runner.attention.plan(AttentionBatch(idle.starts, idle.num_tokens, 0, graph.rows, graph=rows))
        graph.forward.replay()
        graph.sample.replay()

    def launched() -> None:
        (slots, positions), count = idle_decode(runner, rows), len(graph.batch.inputs.slots)
        inputs = runner.sampler.passing_inputs(slots[:count], positions[:count])
        runner.sampler.run_kernels(SampleBatch.idle(runner.passes.all_logits(count), inputs))

    in_graph = _seconds(runner.streams, replayed)
    return max(0.0, _seconds(runner.streams, launched) / in_graph - 1)


def _seconds(streams: Streams, step: Callable[[], None]) -> float:
    step()
    streams.synchronize()
    begun = time.perf_counter()
    for _ in range(STEPS):
        step()
    streams.synchronize()
    return max(time.perf_counter() - begun, 1e-9)
