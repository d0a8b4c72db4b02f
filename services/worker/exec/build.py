"""Makes an executor from a Hugging Face folder: the model, its pools, and what else a model runner needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from services.worker.exec import layer_kv
from services.worker.exec.causal_model import CausalModel
from services.worker.exec.checkpoint import CheckpointError, eos_token_ids
from services.worker.exec.cpu import CpuExecutor
from services.worker.exec.device_memory import DeviceMemory
from services.worker.exec.embedding_pool import PoolingKind
from services.worker.exec.families import architecture_of
from services.worker.exec.future_map import FutureMap
from services.worker.exec.loading import LoadedModel, LoadRequest, load_model
from services.worker.exec.model_info import ModelInfo
from services.worker.exec.pools import KVPool, PageTable, PoolTooSmall, free_memory, kv_pool_tokens
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
    progress(f"KV pool: {pages} pages of {page_size} tokens, {pages * page_size * _bytes_per_token(loaded) >> 20} MiB")
    vocab_size = int(loaded.config.vocab_size)
    runner = ModelRunner(
        loaded.model,
        _allocate(loaded, pages, page_size),
        PageTable(max_slots, pages_per_slot + 1, page_size),
        FutureMap(max_slots, check_relay),
        Sampler(max_slots, vocab_size, loaded.kernels),
        vocab_size,
        loaded.pooling,
    )
    info = _info(loaded, request, pages)
    return CpuExecutor(runner, num_threads, _memory(runner, loaded, request, pages)), info


def _bytes_per_token(loaded: LoadedModel) -> int:
    return layer_kv.bytes_per_token(loaded.layers, loaded.dtype)


def _num_pages(loaded: LoadedModel, page_size: int, most: int, fraction: float) -> int:
    """most: pages that all slots can fill, which is what a model without keys and values gets. Raises PoolTooSmall."""
    per_token = _bytes_per_token(loaded)
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
    layers, dtype, kernels, shape = loaded.layers, loaded.dtype, loaded.kernels, _shape(loaded)

    def load_again() -> CausalModel:
        again = load_model(request)
        if _shape(again) != shape:
            raise CheckpointError(f"{request.folder} holds a model of another shape than the one that this worker started with")
        return again.model

    return DeviceMemory(
        runner,
        load_model=load_again,
        allocate_pool=lambda: layer_kv.allocate(layers, pages, request.page_size, dtype, kernels),
    )


def _shape(loaded: LoadedModel) -> tuple[object, ...]:
    """What pools, tables and sampler were sized by."""
    config = loaded.config
    sizes = config.vocab_size, config.hidden_size, loaded.context_len
    return architecture_of(config), *sizes, loaded.layers, loaded.dtype, loaded.pooling


def _info(loaded: LoadedModel, request: LoadRequest, pages: int) -> ModelInfo:
    return ModelInfo(
        architecture=architecture_of(loaded.config),
        context_len=loaded.context_len,
        vocab_size=int(loaded.config.vocab_size),
        eos_token_ids=eos_token_ids(request.folder, loaded.config),
        num_pages=pages,
        page_size=request.page_size,
        dtype=str(loaded.dtype).removeprefix("torch."),
        weight_bytes=loaded.weight_bytes,
        kv_bytes_per_token=_bytes_per_token(loaded),
        generates=loaded.generates,
        embedding_size=int(loaded.config.hidden_size),
        needs_whole_prompt=loaded.is_encoder,
        pooling_reuses_prefix=loaded.pooling.kind == PoolingKind.LAST and not loaded.is_encoder,
    )
