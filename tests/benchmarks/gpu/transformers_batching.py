"""Runs a workload by transformers' continuous batching with its default settings, on random weights."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from tests.benchmarks.gpu.command import Setting
from tests.benchmarks.gpu.models import hf_config
from tests.benchmarks.gpu.workloads import Workload
from tests.benchmarks.make_model import Shape

NO_EOS = -1
RESULT_TIMEOUT_S = 1.0
STOP_TIMEOUT_S = 10.0


class Stopped(RuntimeError):
    """Raised if transformers' generation thread ends early, a request fails, or the number of tokens is wrong."""


def attention_of() -> tuple[str, dict[str, Any]]:
    """Returns the name of the attention implementation and the options of the batching configuration.

    The implementation is flash attention if it is installed, and sdpa otherwise. No kernels are fetched from the network.
    """
    if importlib.util.find_spec("flash_attn") is not None:
        return "flash_attention_2", {}
    fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    if "auto_switch_to_flash" in fields:
        return "sdpa", {"auto_switch_to_flash": False}
    return "paged|sdpa", {}


def random_model(shape: Shape, setting: Setting) -> Any:
    """Returns a model in eval mode on the device, in bf16 on a GPU."""
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(
            hf_config(shape), dtype=torch.bfloat16 if setting.on_gpu else torch.float32, attn_implementation="sdpa"
        )
    return model.eval()


class TooSlow(RuntimeError):
    """Raised if a run exceeds its time limit."""


class Batching:
    """Runs requests with equal sampling parameters on a continuous batching manager of transformers."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def run(self, workload: Workload, limit_s: float) -> float:
        """Returns the seconds from the submission of the first request to the result of the last one.

        Raises:
            Stopped: the manager or a request failed.
            TooSlow: the run exceeded `limit_s` seconds.
        """
        begun = time.perf_counter()
        waiting = set()
        for prompt, new_tokens in zip(workload.prompts, workload.new_tokens, strict=True):
            name = self._manager.add_request(prompt.tolist(), max_new_tokens=new_tokens, eos_token_id=NO_EOS)
            waiting.add(name)
        tokens = 0
        while waiting:
            if time.perf_counter() - begun > limit_s:
                raise TooSlow(f"{len(waiting)} of {len(workload.prompts)} requests have not ended after {limit_s:.0f} s")
            result = self._manager.get_result(timeout=RESULT_TIMEOUT_S)
            if result is None:
                if not self._manager.is_running():
                    raise Stopped(f"transformers' generation thread ended with {len(waiting)} requests unfinished")
                continue
            if result.error is not None:
                raise Stopped(f"request {result.request_id} failed: {result.error}")
            if result.is_finished():
                waiting.discard(result.request_id)
                tokens += len(result.generated_tokens)
        seconds = time.perf_counter() - begun
        if tokens != workload.output_tokens:
            raise Stopped(f"the run gave {tokens} tokens instead of {workload.output_tokens}")
        return seconds


@contextmanager
def batching_of(model: Any, temperature: float, setting: Setting) -> Iterator[Batching]:
    """Yields a running continuous batching manager. Its memory is freed on exit."""
    name, options = attention_of()
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    generation = GenerationConfig(max_new_tokens=1, eos_token_id=NO_EOS, pad_token_id=0, **sampling)
    # On a CPU the default sizes are too large for the toy run.
    sizes = {} if setting.on_gpu else {"num_blocks": 8, "max_batch_tokens": 64}
    config = ContinuousBatchingConfig(**options, **sizes)
    try:
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, timeout=STOP_TIMEOUT_S
        ) as manager:
            yield Batching(manager)
    finally:
        gc.collect()
        if setting.on_gpu:
            torch.cuda.empty_cache()
