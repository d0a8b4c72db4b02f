"""Driver of vLLM on a CPU: the engine runs in this process and steps without its own server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from job_lines import closed_loop, serve

BLOCK_TOKENS = 128  # vLLM's default on CPUs


class Vllm:
    def __init__(self, start: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))[: start["threads"]]
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB; num_gpu_blocks_override is the limit
        }
        from vllm import EngineArgs, LLMEngine  # reads the variables

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=start["model"],
                dtype="bfloat16",
                max_model_len=start["max_len"],
                max_num_seqs=start["max_in_flight"],
                block_size=BLOCK_TOKENS,
                num_gpu_blocks_override=start["kv_tokens"] // BLOCK_TOKENS,
                enable_prefix_caching=True,
                seed=0,
                disable_log_stats=True,
            )
        )
        self._num_jobs = 0

    def generate(self, prompts: Sequence[list[int]], output_len: int, in_flight: int) -> list[int]:
        self._num_jobs += 1
        return closed_loop(self, prompts, output_len, in_flight)

    def add(self, request: int, prompt: list[int], output_len: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request(f"{self._num_jobs}-{request}", {"prompt_token_ids": prompt}, params)

    def step(self) -> dict[int, int]:
        ended = [output for output in self._engine.step() if output.finished]
        return {int(output.request_id.split("-")[1]): len(output.outputs[0].token_ids) for output in ended}


if __name__ == "__main__":
    serve(Vllm)
