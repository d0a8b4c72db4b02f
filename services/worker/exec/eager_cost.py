"""Measures the extra time of an eager step: a decode step that is launched kernel by kernel instead of as a CUDA graph."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

from rootstock_llm.services.worker.core.contracts.graph_limits import GraphLimits
from rootstock_llm.services.worker.exec.attention.backend import AttentionBatch
from rootstock_llm.services.worker.exec.contracts.step_data import ForwardBatch, SampleBatch
from rootstock_llm.services.worker.exec.step.idle_steps import idle_decode
from rootstock_llm.services.worker.exec.step.model_runner import DeviceRunner
from rootstock_llm.services.worker.exec.streams.cuda_streams import Mark, Streams

STEPS = 20  # timed steps per measurement
IN_FLIGHT = 2  # steps that are launched before the host waits for the oldest of them, as with overlap


def graph_limits(rows: int, eager_cost: float, weight_bytes: int, kv_bytes_per_token: int) -> GraphLimits:
    """Returns the limits up to which replaying a graph is faster than an eager step.

    A graph computes each token of an extend row as a separate row, which reads the KV of the tokens before it again. A decode
    step mainly reads the weights, so reading a token of KV takes about kv_bytes_per_token / weight_bytes of its time. The limit
    is the number of tokens that a graph can read again in the extra time of an eager step.

    Args:
        rows: rows of the largest graph.
        weight_bytes: bytes of weights that a step of this graph reads.
        eager_cost: extra time of an eager step, in multiples of a replayed step's time.
    """
    assert rows > 0 and eager_cost >= 0, "a graph has rows, and an eager step is not faster than a replayed one"
    readable = int(eager_cost * weight_bytes / kv_bytes_per_token) if kv_bytes_per_token else 0
    return GraphLimits(rows, readable, eager_cost)


def measured_eager_cost(runner: DeviceRunner, rows: int) -> float:
    """Returns the extra time of an eager step of `rows` rows, in multiples of a replayed step's time.

    As in normal operation, the host launches a step while the device computes the step before, and at most IN_FLIGHT steps are
    in flight. With more steps in flight, the attention back end would allocate staging memory for each of them, and keep it.
    Called on the forward stream. Waits for the device.
    """
    assert runner.graphs is not None, "graphs are captured"
    graph, idle = runner.graphs.for_rows(rows), ForwardBatch.idle(runner.passes.capacity, rows)
    assert graph is not None and graph.size == rows, "a graph has exactly this number of rows"
    words = torch.from_numpy(idle.words()).to(runner.passes.device)  # here, because this copy waits for the device

    def replayed() -> None:
        runner.attention.plan(AttentionBatch(idle.starts, idle.num_tokens, 0, graph.rows, graph=rows))
        graph.forward.replay()
        graph.sample.replay()

    def launched() -> None:
        (slots, positions), count = idle_decode(runner, rows, words), len(graph.batch.inputs.slots)
        inputs = runner.sampler.step_inputs(slots[:count], positions[:count])
        runner.sampler.run_kernels(SampleBatch.idle(runner.passes.all_logits(count), inputs))

    in_graph = _seconds(runner.streams, replayed)
    return max(0.0, _seconds(runner.streams, launched) / in_graph - 1)


def _seconds(streams: Streams, step: Callable[[], None]) -> float:
    """Returns the seconds of STEPS steps, of which at most IN_FLIGHT are in flight."""
    step()
    streams.synchronize()
    ends = deque[Mark]()
    begun = time.perf_counter()
    for _ in range(STEPS):
        if len(ends) == IN_FLIGHT:
            ends.popleft().wait()
        step()
        streams.copy_after_forward()
        ends.append(streams.mark_copy())
    streams.synchronize()
    return max(time.perf_counter() - begun, 1e-9)
