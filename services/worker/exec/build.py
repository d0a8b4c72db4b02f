"""Makes an executor from a Hugging Face folder: config, weights, pools, and the decoder that fits the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from kernels.cpu import load_kernels
from services.worker.exec.checkpoint import Checkpoint, eos_token_ids, read_config
from services.worker.exec.cpu import CpuExecutor
from services.worker.exec.decoder import Decoder
from services.worker.exec.families import decoder_config
from services.worker.exec.future_map import FutureMap
from services.worker.exec.model_info import ModelInfo
from services.worker.exec.pools import KVPool, PageTable, PoolTooSmall, free_memory, kv_bytes_per_token, kv_pool_tokens
from services.worker.exec.rope import rope_table
from services.worker.exec.runner import ModelRunner
from services.worker.exec.sampler import Sampler
from services.worker.exec.weights import load_weights, resolve_dtype


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
    folder = Path(model_path)
    loaded = read_config(folder)
    config = decoder_config(loaded)
    checkpoint = Checkpoint(folder)
    resolved = resolve_dtype(dtype, loaded, checkpoint)
    kernels = load_kernels(num_threads, resolved)
    with torch.inference_mode():
        weights = load_weights(checkpoint, config, resolved, kernels, progress)
    checkpoint.close()
    context = min(context_len or config.max_position_embeddings, config.max_position_embeddings)
    per_token = kv_bytes_per_token(config, resolved)
    pages = num_pages or kv_pool_tokens(free_memory(), mem_fraction_static, per_token) // page_size
    if pages < 1:
        raise PoolTooSmall(f"no room for a page of {page_size} tokens ({page_size * per_token} bytes) beside the weights")
    progress(f"KV pool: {pages} pages of {page_size} tokens, {pages * page_size * per_token >> 20} MiB")
    table = PageTable(max_slots, -(-context // page_size) + 1, page_size)
    cos_sin = rope_table(config.rope, config.head_dim, table.capacity)
    decoder = Decoder(config, weights, cos_sin, kernels)
    pool = KVPool.allocate(config, pages, page_size, resolved, kernels)
    sampler = Sampler(max_slots, config.vocab_size, kernels)
    model = ModelRunner(decoder, pool, table, FutureMap(max_slots, check_relay), sampler, config.vocab_size)
    info = ModelInfo(
        architecture=config.architecture,
        context_len=context,
        vocab_size=config.vocab_size,
        eos_token_ids=eos_token_ids(folder, loaded),
        num_pages=pages,
        page_size=page_size,
        dtype=str(resolved).removeprefix("torch."),
        weight_bytes=weights.num_bytes(),
        kv_bytes_per_token=per_token,
    )
    return CpuExecutor(model, num_threads), info
