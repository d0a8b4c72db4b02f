"""Loads the model of a Hugging Face folder in the way that fits it: our decoder, transformers' code, or as an encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.cpu import load_kernels
from kernels.ops import Kernels
from services.worker.exec.causal_model import CausalModel
from services.worker.exec.checkpoint import Checkpoint, read_config
from services.worker.exec.decoder import Decoder
from services.worker.exec.embedding_pool import PoolingConfig, PoolingKind
from services.worker.exec.families import DecoderConfig, NotCovered, UnsupportedModel, architecture_of, decoder_config
from services.worker.exec.layer_kv import LayerKV
from services.worker.exec.pooling_files import read_pooling
from services.worker.exec.rope import rope_table
from services.worker.exec.weights import load_weights, resolve_dtype

LAST_TOKEN = PoolingConfig(PoolingKind.LAST, True)
MEAN = PoolingConfig(PoolingKind.MEAN, True)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """dtype: auto, bfloat16, float16 or float32. context_len: tokens, None for the model's own."""

    folder: Path
    dtype: str
    page_size: int
    context_len: int | None
    num_threads: int
    progress: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """layers: what each keeps of a token, none for an encoder. weight_bytes: resident. The rest as in ModelInfo."""

    model: CausalModel
    config: Any
    kernels: Kernels
    dtype: torch.dtype
    layers: tuple[LayerKV, ...]
    context_len: int
    weight_bytes: int
    pooling: PoolingConfig
    generates: bool
    is_encoder: bool = False


@dataclass(frozen=True, slots=True)
class _Opened:
    """What is known before the weights are read."""

    request: LoadRequest
    config: Any
    checkpoint: Checkpoint
    dtype: torch.dtype
    kernels: Kernels

    def context(self, longest: int) -> int:
        return min(self.request.context_len or longest, longest)


def load_model(request: LoadRequest) -> LoadedModel:
    """Raises CheckpointError, UnsupportedModel."""
    config = read_config(request.folder)
    native = _native_config(config)
    checkpoint = Checkpoint(request.folder)
    try:
        dtype = resolve_dtype(request.dtype, config, checkpoint)
        opened = _Opened(request, config, checkpoint, dtype, load_kernels(request.num_threads, dtype))
        with torch.inference_mode():
            if isinstance(native, DecoderConfig):
                return _native(opened, native)
            return _through_transformers(opened, native)
    finally:
        checkpoint.close()


def _native_config(config: Any) -> DecoderConfig | NotCovered:
    """The decoder's config, or why our decoder does not do it."""
    try:
        return decoder_config(config)
    except NotCovered as reason:
        return reason


def _native(opened: _Opened, config: DecoderConfig) -> LoadedModel:
    request = opened.request
    weights = load_weights(opened.checkpoint, config, opened.dtype, opened.kernels, request.progress)
    context = opened.context(config.max_position_embeddings)
    num_positions = (-(-context // request.page_size) + 1) * request.page_size  # a slot's pages hold no more
    cos_sin = rope_table(config.rope, config.head_dim, num_positions)
    return LoadedModel(
        model=Decoder(config, weights, cos_sin, opened.kernels),
        config=opened.config,
        kernels=opened.kernels,
        dtype=opened.dtype,
        layers=(LayerKV(config.num_kv_heads, config.head_dim, config.head_dim),) * config.num_layers,
        context_len=context,
        weight_bytes=weights.num_bytes(),
        pooling=read_pooling(request.folder, LAST_TOKEN),
        generates=config.has_head,
    )


def _through_transformers(opened: _Opened, reason: NotCovered) -> LoadedModel:
    from services.worker.exec.encoder import is_encoder
    from services.worker.exec.transformers_checkpoint import is_base, is_causal_head

    if is_causal_head(opened.config):
        return _causal(opened, generates=True)
    if is_encoder(opened.config):
        return _encoder(opened)
    if is_base(opened.config):
        return _causal(opened, generates=False)
    raise UnsupportedModel(
        f"architecture {architecture_of(opened.config)} is not supported: transformers has no causal model or encoder of that"
        f" name for {opened.config.model_type}, and {reason}"
    )


def _causal(opened: _Opened, generates: bool) -> LoadedModel:
    from services.worker.exec.causal_transformers import load_causal, max_context

    context = opened.context(max_context(opened.config))
    loaded = load_causal(opened.request.folder, opened.config, opened.dtype, context, opened.kernels)
    opened.request.progress(f"loaded {architecture_of(opened.config)} through transformers with paged attention")
    return LoadedModel(
        model=loaded.model,
        config=opened.config,
        kernels=opened.kernels,
        dtype=opened.dtype,
        layers=tuple(loaded.probe.ordered()),
        context_len=context,
        weight_bytes=loaded.weight_bytes,
        pooling=read_pooling(opened.request.folder, LAST_TOKEN),
        generates=generates,
    )


def _encoder(opened: _Opened) -> LoadedModel:
    from services.worker.exec.encoder import load_encoder

    loaded = load_encoder(opened.request.folder, opened.config, opened.dtype)
    opened.request.progress(f"loaded the encoder {architecture_of(opened.config)} through transformers")
    return LoadedModel(
        model=loaded.model,
        config=opened.config,
        kernels=opened.kernels,
        dtype=opened.dtype,
        layers=(),
        context_len=opened.context(loaded.max_tokens),
        weight_bytes=loaded.weight_bytes,
        pooling=read_pooling(opened.request.folder, MEAN),
        generates=False,
        is_encoder=True,
    )
