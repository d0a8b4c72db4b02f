"""Makes an executor from a Hugging Face folder: the model, its pools, and what else a model runner needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from services.worker.exec.contracts.model_info import ModelInfo
from services.worker.exec.cpu import CpuExecutor
from services.worker.exec.device_memory import DeviceMemory
from services.worker.exec.future_map import FutureMap
from services.worker.exec.loading import LoadedModel, LoadRequest, load_again, load_model
from services.worker.exec.pools import layer_kv
from services.worker.exec.pools.pools import KVPool, PageTable, PoolTooSmall, free_memory, kv_pool_tokens
from services.worker.exec.runner import ModelRunner
from services.worker.exec.sampler import Sampler


def build_cpu_executor(
    model_path: str,
    dtype: str,
    page_size: int,
    max_slots: int,
    num_pages: int | None,
    mem_fraction_static: float,
    context_len: int | None,
    num_threads: int,
    progress: Callable[[str], None],
    check_relay: bool = False,
) -> tuple[CpuExecutor, ModelInfo]:
    """Loads a Hugging Face folder and starts the forward thread.

    dtype: auto, bfloat16, float16 or float32. num_pages: None to fill mem_fraction_static of the memory left after the
    weights. context_len: tokens; None for the model's own. check_relay: raise on decoding a slot that nothing was sampled for.
    Raises CheckpointError, UnsupportedModel, PoolTooSmall.
    """
    torch.set_num_threads(num_threads)
    request = LoadRequest(Path(model_path), dtype, page_size, context_len, num_threads, progress)
    loaded = load_model(request)
    pages_per_slot = -(-loaded.context_len // page_size)
    pages = num_pages or _num_pages(loaded, page_size, max_slots * pages_per_slot, mem_fraction_static)
    progress(f"KV pool: {pages} pages of {page_size} tokens, {pages * page_size * loaded.kv_bytes_per_token >> 20} MiB")
    vocab_size = int(loaded.config.vocab_size)
    with request.phases.timed("kv_pool"):
        pool = _allocate(loaded, pages, page_size)
    runner = ModelRunner(
        loaded.model,
        pool,
        PageTable(max_slots, pages_per_slot + 1, page_size),
        FutureMap(max_slots, check_relay),
        Sampler(max_slots, vocab_size, loaded.kernels),
        vocab_size,
        loaded.pooling,
    )
    executor = CpuExecutor(runner, num_threads, _memory(runner, loaded, request, pages))
    progress(f"loaded in: {request.phases.describe()}")
    return executor, loaded.info(request, pages)


def _num_pages(loaded: LoadedModel, page_size: int, most: int, fraction: float) -> int:
    """most: pages that all slots can fill, which is what a model without keys and values gets. Raises PoolTooSmall."""
    per_token = loaded.kv_bytes_per_token
    if per_token == 0:
        return most
    pages = kv_pool_tokens(free_memory(), fraction, per_token) // page_size
    if pages < 1:
        raise PoolTooSmall(f"no room for a page of {page_size} tokens ({page_size * per_token} bytes) beside the weights")
    return pages


def _allocate(loaded: LoadedModel, pages: int, page_size: int) -> KVPool:
    return layer_kv.allocate(loaded.layers, pages, page_size, loaded.dtype, loaded.kernels)


def _memory(runner: ModelRunner, loaded: LoadedModel, request: LoadRequest, pages: int) -> DeviceMemory:
    """Keeps of the loaded model what a pool's size depends on, and not the model."""
    layers, dtype, kernels, shape = loaded.layers, loaded.dtype, loaded.kernels, loaded.shape
    return DeviceMemory(
        runner,
        load_model=lambda: load_again(request, shape).model,
        allocate_pool=lambda: layer_kv.allocate(layers, pages, request.page_size, dtype, kernels),
    )
