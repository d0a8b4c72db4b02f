"""Loads the model of a Hugging Face folder: by a class of our registry, by transformers' code, or as an encoder.

The pooling of an embedding model is read from the files that sentence-transformers writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rootstock_llm.kernels.contracts.step_ops import LayerKernels
from rootstock_llm.kernels.cpu import load_kernels
from rootstock_llm.services.shared import served_config
from rootstock_llm.services.shared.quantization_config import method_of
from rootstock_llm.services.worker.exec.models.decoder import Decoder, DecoderModel
from rootstock_llm.services.worker.exec.models.decoder_config import DecoderConfig
from rootstock_llm.services.worker.exec.models.loaded_model import ExpertReads, LoadedModel
from rootstock_llm.services.worker.exec.models.registry import ARCHITECTURES, NotCovered, config_of, text_config
from rootstock_llm.services.worker.exec.pools.embedding_pool import PoolingConfig, PoolingKind
from rootstock_llm.services.worker.exec.weights.checkpoint import (
    Checkpoint,
    CheckpointError,
    UnsupportedModel,
    architecture_of,
    read_config,
    read_json,
    read_json_list,
    resolve_dtype,
)
from rootstock_llm.services.worker.exec.weights.layouts.choose import quantization_for, read_quantization
from rootstock_llm.services.worker.exec.weights.load_request import LoadRequest, LoadTarget
from rootstock_llm.services.worker.exec.weights.quantization import Quantization

MODULES = "modules.json"
KINDS = {"cls": PoolingKind.CLS, "mean": PoolingKind.MEAN, "lasttoken": PoolingKind.LAST}
LEGACY = {  # older files have one of these switches instead of pooling_mode
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
LAST_TOKEN = PoolingConfig(PoolingKind.LAST, True)
MEAN = PoolingConfig(PoolingKind.MEAN, True)


@dataclass(frozen=True, slots=True)
class _Opened:
    """An opened folder: its config is read, its weights are not."""

    request: LoadRequest
    config: Any  # transformers PreTrainedConfig
    checkpoint: Checkpoint
    dtype: torch.dtype  # dtype to which weights are converted
    target: LoadTarget
    kernels: LayerKernels  # kernels of the target's device for the dtype
    quantization: Quantization

    def context(self, longest: int) -> int:
        """Returns the requested context length, but at most `longest`. Returns `longest` if no length is requested."""
        return min(self.request.context_len or longest, longest)


def load_model(request: LoadRequest) -> LoadedModel:
    """Loads the model onto the request's device. Raises CheckpointError, UnsupportedModel."""
    with request.phases.timed("config"):
        config = read_config(request.folder)
        native = _native_config(config)
        given = read_quantization(request.folder, request.quantization)
        if isinstance(native, NotCovered) and (method := str(Quantization(request.quantization)) or (given and method_of(given))):
            raise UnsupportedModel(served_config.quantized_elsewhere(str(request.folder), method, str(native)))
        if isinstance(native, DecoderConfig):
            if request.quantization.head and not native.has_head:
                raise UnsupportedModel(f"{request.folder} has no vocabulary projection to quantize. Unset --quantize-head.")
            config = text_config(config)
        if isinstance(native, NotCovered):
            _refuse_by_config(request, config)
        checkpoint = Checkpoint(request.folder, has_codes=given is not None)
    try:
        target, quantization = request.target, quantization_for(given, request.quantization, checkpoint)
        dtype = resolve_dtype(request.dtype, config, checkpoint)
        if given is not None and request.dtype == "auto" and dtype == torch.float16 and target.device.type == "cpu":
            dtype = torch.bfloat16  # the C++ kernels do not take float16, and the torch twins dequantize each weight in each step
        opened = _Opened(request, config, checkpoint, dtype, target, target.kernels(dtype), quantization)
        with torch.inference_mode():
            if isinstance(native, DecoderConfig):
                return _native(opened, native.resolved(checkpoint, dtype))
            return _through_transformers(opened, native)
    finally:
        checkpoint.close()


def _refuse_by_config(request: LoadRequest, config: Any) -> None:
    """Checks the config of a model that transformers' code would compute, before its weights are opened.

    Raises:
        UnsupportedModel: paged attention cannot compute the model.
    """
    from rootstock_llm.services.worker.exec.models.encoder import is_encoder
    from rootstock_llm.services.worker.exec.models.transformers_check import refuse_by_config
    from rootstock_llm.services.worker.exec.weights.transformers_checkpoint import is_base, is_causal_head

    if is_causal_head(config) or (is_base(config) and not is_encoder(config)):
        refuse_by_config(config, request.context_len)


def load_again(request: LoadRequest, shape: tuple[object, ...]) -> LoadedModel:
    """Loads the model that is in the folder now.

    Args:
        shape: LoadedModel.shape of the model with which this worker started.

    Raises:
        CheckpointError: the model's shape differs from `shape`, or as for load_model().
        UnsupportedModel: as for load_model().
    """
    loaded = load_model(request)
    if loaded.shape != shape:
        raise CheckpointError(
            f"{request.folder} now has a model with other sizes than the one with which this worker started. Restart the worker"
            " to serve it."
        )
    return loaded


def _native_config(config: Any) -> DecoderConfig | NotCovered:
    """Returns the config of a registered model class, or the reason why no class covers the model."""
    try:
        return config_of(config)
    except NotCovered as reason:
        return reason


def _native(opened: _Opened, config: DecoderConfig) -> LoadedModel:
    request, context = opened.request, opened.context(config.max_position_embeddings)
    config = config.within(context)
    read = partial(ARCHITECTURES[config.architecture].read, config=config)
    model = opened.target.weights(
        opened.checkpoint, read, opened.dtype, opened.kernels, request.progress, request.phases, opened.quantization
    )
    num_positions = (-(-context // request.page_size) + 1) * request.page_size  # positions in the pages of a slot
    assert 0 < context < num_positions, "the table has a row for each position of a slot's pages"
    cos_sin = [table.to(opened.target.device) for table in config.rope_tables(num_positions)]
    decoder = Decoder(model, cos_sin, opened.kernels.paged_attention)
    return LoadedModel(
        model=decoder,
        config=opened.config,
        kernels=opened.kernels,
        dtype=opened.dtype,
        layers=model.cache,
        context_len=context,
        weight_bytes=model.num_bytes(),
        pooling=read_pooling(request.folder, LAST_TOKEN),
        generates=config.has_head,
        quantization=str(opened.quantization),
        experts=_expert_reads(model),
        routed=decoder.experts,
    )


def _expert_reads(model: DecoderModel) -> ExpertReads | None:
    sizes = model.config.experts
    return None if sizes is None else ExpertReads(model.expert_bytes(), sizes.routing.top_k / sizes.count)


def _through_transformers(opened: _Opened, reason: NotCovered) -> LoadedModel:
    from rootstock_llm.services.worker.exec.models.encoder import is_encoder
    from rootstock_llm.services.worker.exec.weights.transformers_checkpoint import is_base, is_causal_head

    if opened.target.numerics is not None:
        raise UnsupportedModel(
            f"architecture {architecture_of(opened.config)} has no deterministic mode: transformers' code computes it ({reason}),"
            f" and its sums depend on the number of rows of a step"
        )
    if is_causal_head(opened.config):
        return _causal(opened, generates=True)
    if is_encoder(opened.config):
        return _encoder(opened)
    if is_base(opened.config):
        return _causal(opened, generates=False)
    raise UnsupportedModel(served_config.unsupported(architecture_of(opened.config), opened.config.model_type, str(reason)))


def _causal(opened: _Opened, generates: bool) -> LoadedModel:
    from rootstock_llm.services.worker.exec.models.transformers_check import load_causal
    from rootstock_llm.services.worker.exec.models.transformers_model import max_context

    context = opened.context(max_context(opened.config))
    with opened.request.phases.timed("weights"):
        checking = load_kernels(opened.request.num_threads, opened.dtype)  # the check runs on the CPU, also for a GPU
        loaded = load_causal(opened.request.folder, opened.config, opened.dtype, context, checking)
        model = loaded.model.to(opened.target.device, opened.kernels)
        more = model.pack_experts()
    opened.request.progress(f"loaded {architecture_of(opened.config)} through transformers with paged attention")
    return LoadedModel(
        model=model,
        config=opened.config,
        kernels=opened.kernels,
        dtype=opened.dtype,
        layers=tuple(loaded.probe.ordered()),
        context_len=context,
        weight_bytes=loaded.weight_bytes + more,
        pooling=read_pooling(opened.request.folder, LAST_TOKEN),
        generates=generates,
    )


def _encoder(opened: _Opened) -> LoadedModel:
    from rootstock_llm.services.worker.exec.models.encoder import load_encoder

    with opened.request.phases.timed("weights"):
        loaded = load_encoder(opened.request.folder, opened.config, opened.dtype)
        model = loaded.model.to(opened.target.device)
    opened.request.progress(f"loaded the encoder {architecture_of(opened.config)} through transformers")
    return LoadedModel(
        model=model,
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


def read_pooling(folder: Path, default: PoolingConfig) -> PoolingConfig:
    """Returns the pooling that modules.json names, or `default` if there is no modules.json.

    Raises:
        CheckpointError: a file is malformed.
        UnsupportedModel: the folder has modules or a pooling that this worker does not support.
    """
    if not (folder / MODULES).is_file():
        return default
    modules = [_module(folder, entry) for entry in read_json_list(folder / MODULES)]
    others = sorted({kind for kind, _ in modules} - {"Transformer", "Pooling", "Normalize"})
    if others:
        raise UnsupportedModel(f"{MODULES} has modules {', '.join(others)}; supported: Transformer, Pooling, Normalize")
    poolings = [path for kind, path in modules if kind == "Pooling"]
    if len(poolings) != 1:
        raise UnsupportedModel(f"{MODULES} has {len(poolings)} Pooling modules; it must have exactly one")
    kind = _kind(read_json(poolings[0] / "config.json"))
    return PoolingConfig(kind, any(kind == "Normalize" for kind, _ in modules))


def _module(folder: Path, entry: Any) -> tuple[str, Path]:
    """Returns the class name and the folder of a module that modules.json lists. Raises CheckpointError."""
    kind, path = (entry.get("type"), entry.get("path", "")) if isinstance(entry, dict) else (None, "")
    if not isinstance(kind, str) or not isinstance(path, str) or path == ".." or Path(path).name != path:
        raise CheckpointError(f"{folder / MODULES} has an entry without a type, or with a path outside of the model's folder")
    return kind.rsplit(".", 1)[-1], folder / path


def _kind(config: dict[str, Any]) -> PoolingKind:
    """Returns the pooling that the config of a Pooling module names. Raises UnsupportedModel for an unknown or second pooling."""
    named = config.get("pooling_mode", [mode for switch, mode in LEGACY.items() if config.get(switch)] or "mean")
    modes = [named] if isinstance(named, str) else list(named)
    if len(modes) != 1 or modes[0] not in KINDS:
        raise UnsupportedModel(f"pooling {' and '.join(map(str, modes))} is not supported; supported: {', '.join(KINDS)}")
    return KINDS[modes[0]]
