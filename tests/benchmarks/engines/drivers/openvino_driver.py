"""Driver of OpenVINO GenAI: its pipeline with continuous batching, on a folder that optimum-intel has exported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai
from job_lines import closed_loop, serve

BLOCK_TOKENS = 32  # tokens of a KV block on CPUs


class OpenVino:
    def __init__(self, start: dict[str, Any]) -> None:
        limits = openvino_genai.SchedulerConfig()
        limits.num_kv_blocks = start["kv_tokens"] // BLOCK_TOKENS
        limits.max_num_seqs = start["max_in_flight"]
        limits.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": start["threads"]}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(start["model"], limits, "CPU", properties)
        self._running: dict[int, Any] = {}  # handle by request
        self._num_requests = 0  # requests of all jobs so far; each request id must be new

    def generate(self, prompts: Sequence[list[int]], output_len: int, in_flight: int) -> list[int]:
        return closed_loop(self, prompts, output_len, in_flight)

    def add(self, request: int, prompt: list[int], output_len: int) -> None:
        config = openvino_genai.GenerationConfig(max_new_tokens=output_len, ignore_eos=True, do_sample=False)
        ids = openvino.Tensor(np.array([prompt], np.int64))
        self._num_requests += 1
        self._running[request] = self._pipeline.add_request(self._num_requests, ids, config)

    def step(self) -> dict[int, int]:
        self._pipeline.step()
        # A request without KV memory ends too, with too few tokens.
        computed = openvino_genai.GenerationStatus.RUNNING
        ended = [request for request, handle in self._running.items() if handle.get_status() != computed]
        outputs = {request: self._running.pop(request).read_all() for request in ended}
        return {request: sum(len(output.generated_ids) for output in each) for request, each in outputs.items()}


if __name__ == "__main__":
    serve(OpenVino)
