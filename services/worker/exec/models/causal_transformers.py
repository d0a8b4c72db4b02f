"""Loads causal models through transformers' modeling code. Refuses a model if paged attention would compute it wrongly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from kernels.contracts.ops import Kernels
from services.shared import served_config
from services.shared.served_config import LAYER_TYPES, TYPE_LISTS
from services.worker.exec.models import paging_check
from services.worker.exec.models.attention_layers import PROBE_ATTENTION, Probe, StepHolder
from services.worker.exec.models.paged_layers import PAGED_ATTENTION, PagedLayers
from services.worker.exec.models.paging_check import Subject, Trial
from services.worker.exec.models.transformers_model import TransformersModel
from services.worker.exec.weights import transformers_checkpoint
from services.worker.exec.weights.checkpoint import UnsupportedModel, architecture_of
from services.worker.exec.weights.transformers_checkpoint import is_causal_head


@dataclass(frozen=True, slots=True)
class LoadedCausal:
    model: TransformersModel
    # has the layers that were found
    probe: Probe
    # resident
    weight_bytes: int


def max_context(config: Any) -> int:
    """Returns the longest context in which other rows do not change a row's rotation. Raises UnsupportedModel."""
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise UnsupportedModel(f"{architecture_of(config)} names no max_position_embeddings")
    originals = [int(rope["original_max_position_embeddings"]) for rope in _ropes(config) if rope.get("rope_type") == "longrope"]
    return min([longest, *originals])  # beyond it, the longest row of a batch changes the angles of all


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Returns the rope parameters, one for each type of layer that has its own."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]


def auto_class_of(config: Any) -> Any:
    return AutoModelForCausalLM if is_causal_head(config) else AutoModel


def refuse_by_config(config: Any, asked_context: int | None) -> None:
    """Refuses a model by its config, before its weights are read. Raises UnsupportedModel.

    Args:
        asked_context: context length in tokens, or None for the model's longest.
    """
    name = architecture_of(config)
    refuse_layer_types(config, name)
    if not transformers_checkpoint.class_of(auto_class_of(config), config)._can_set_attn_implementation():
        raise UnsupportedModel(served_config.fixed_attention(name))
    if config.is_encoder_decoder:
        raise UnsupportedModel(served_config.encoder_with_decoder(name))
    if config.sub_configs:
        raise UnsupportedModel(served_config.several_models(name, config.sub_configs))
    longest = max_context(config)
    paging_check.refuse_sizes(config, min(asked_context or longest, longest), name)


def refuse_layer_types(config: Any, name: str) -> None:
    """Refuses layers whose type may cache something else than keys and values of single tokens. Raises UnsupportedModel."""
    unknown = served_config.unknown_layers((getattr(config, each, None) for each in TYPE_LISTS), LAYER_TYPES)
    if unknown:
        raise UnsupportedModel(served_config.unserved_layers(name, unknown))


def load_causal(folder: Path, config: Any, dtype: torch.dtype, context_len: int, kernels: Kernels) -> LoadedCausal:
    """Loads the model and checks it with paged attention.

    Args:
        config: one that refuse_by_config() accepts.
        context_len: at most max_context().
        kernels: of the CPU, for the check.

    Raises:
        CheckpointError: the folder cannot be loaded.
        UnsupportedModel: paged attention computes other numbers than the model's own attention.
    """
    has_head = is_causal_head(config)
    model = transformers_checkpoint.load(folder, config, auto_class_of(config), dtype, "eager")
    decoder = _decoder_of(model) if has_head else model
    trial = paging_check.short_trial(int(config.vocab_size), context_len)
    expected = paging_check.outputs(model, trial, has_head)
    if expected[0].shape[1] != config.vocab_size and has_head:
        raise UnsupportedModel(f"{expected[0].shape[1]} logits for a vocabulary of {config.vocab_size}")
    holder = StepHolder()
    holder.attach(model)
    probe = _probed(model, holder, trial.ids[0], context_len)
    model.set_attn_implementation(PAGED_ATTENTION)
    paged = TransformersModel(model, decoder, PagedLayers(holder, probe.layers, kernels), context_len)
    _checked(paged, Subject(probe.ordered(), dtype, kernels, has_head), expected, trial)
    _check_long(model, decoder, holder, probe, Subject((), dtype, kernels, False), paging_check.long_trial(config, context_len))
    return LoadedCausal(paged, probe, transformers_checkpoint.num_bytes(model))


def _check_long(model: Any, decoder: Any, holder: StepHolder, probe: Probe, subject: Subject, trial: Trial) -> None:
    """Checks the first layers of each kind over many tokens. Leaves the model unchanged, with paged attention."""
    count = _layers_of_each_kind(probe, getattr(model.config, "layer_types", None) or ())
    layers = {number: layer for number, layer in probe.layers.items() if number < count}
    with _first_layers(decoder, count, len(probe.layers)) as is_cut:
        layers = layers if is_cut else dict(probe.layers)
        model.set_attn_implementation("eager")
        expected = paging_check.outputs(decoder, trial, False)
        model.set_attn_implementation(PAGED_ATTENTION)
        paged = TransformersModel(decoder, decoder, PagedLayers(holder, layers, subject.kernels), len(trial.ids[0]))
        _checked(paged, replace(subject, layers=[layer.kv for layer in layers.values()]), expected, trial)


def _layers_of_each_kind(probe: Probe, types: Sequence[str]) -> int:
    """Returns the smallest number of first layers that contain each kind of attention."""
    kinds: dict[object, int] = {}
    for number, layer in sorted(probe.layers.items()):
        kinds.setdefault((types[number] if number < len(types) else "", layer.window, layer.kv), number)
    return max(*kinds.values(), 1) + 1


@contextmanager
def _first_layers(decoder: nn.Module, count: int, total: int) -> Iterator[bool]:
    """Cuts the decoder to its first layers inside the block. Yields False, and cuts nothing, if it finds no list of layers."""
    found = next(_lists_of_layers(decoder, total), None)
    if found is None or count >= total:
        yield False
        return
    parent, name, layers = found
    setattr(parent, name, nn.ModuleList(list(layers)[:count]))
    try:
        yield True
    finally:
        setattr(parent, name, layers)


def _lists_of_layers(decoder: nn.Module, total: int) -> Iterator[tuple[nn.Module, str, nn.ModuleList]]:
    """Yields (parent, name, list) for each list of modules whose element i contains the layer with number i."""
    for parent in decoder.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == total:
                numbers = [{getattr(module, "layer_idx", None) for module in layer.modules()} for layer in child]
                if all(number in found for number, found in enumerate(numbers)):
                    yield parent, name, child


def _decoder_of(model: Any) -> Any:
    """Returns the part below the vocabulary projection. Raises UnsupportedModel."""
    named = model.get_decoder()
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module is not model]
    if named is model and not inner:
        raise UnsupportedModel(f"{type(model).__name__} does not tell its layers from its vocabulary projection")
    is_below = named is not model and isinstance(named, PreTrainedModel)  # some models name their projection "decoder"
    return named if is_below or not inner else inner[0]


def _probed(model: Any, holder: StepHolder, ids: Tensor, context_len: int) -> Probe:
    holder.step = probe = Probe(context_len)
    model.set_attn_implementation(PROBE_ATTENTION)
    try:
        model(input_ids=ids[None], position_ids=torch.arange(len(ids))[None], use_cache=False)
    except UnsupportedModel:
        raise
    except Exception as error:  # modeling code raises errors of any type; the refusal has the reason
        raise UnsupportedModel(f"{type(model).__name__} cannot run with another attention: {error!r}") from error
    if not probe.layers:
        raise UnsupportedModel(f"{type(model).__name__} has no attention layers that can be replaced")
    return probe


def _checked(paged: TransformersModel, subject: Subject, expected: tuple[Tensor, Tensor], trial: Trial) -> None:
    try:
        paging_check.check(paged, subject, expected, trial)
    except UnsupportedModel:
        raise
    except Exception as error:  # modeling code raises errors of any type
        raise UnsupportedModel(f"paged attention does not run in this model: {error!r}") from error
