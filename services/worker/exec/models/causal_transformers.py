"""Loads any causal model through transformers' own modeling code, and refuses what paged attention would get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from kernels.contracts.ops import Kernels
from services.worker.exec.models import paging_check
from services.worker.exec.models.attention_layers import PROBE_ATTENTION, Held, Probe
from services.worker.exec.models.paged_layers import PAGED_ATTENTION, PagedLayers
from services.worker.exec.models.paging_check import Subject
from services.worker.exec.models.transformers_model import TransformersModel
from services.worker.exec.weights import transformers_checkpoint
from services.worker.exec.weights.families import UnsupportedModel, architecture_of
from services.worker.exec.weights.transformers_checkpoint import is_causal_head

STATEFUL = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "short_conv"}  # layer_types of transformers


@dataclass(frozen=True, slots=True)
class LoadedCausal:
    """probe: the layers that were found. weight_bytes: resident."""

    model: TransformersModel
    probe: Probe
    weight_bytes: int


def max_context(config: Any) -> int:
    """Tokens whose positions the model tells apart the same way in whatever batch. Raises UnsupportedModel if it names none."""
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise UnsupportedModel(f"{architecture_of(config)} names no max_position_embeddings")
    originals = [int(rope["original_max_position_embeddings"]) for rope in _ropes(config) if rope.get("rope_type") == "longrope"]
    return min([longest, *originals])  # beyond its original length, longrope turns every row of a batch


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The rope parameters, of each kind of layers where kinds have their own."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]


def refuse_by_config(config: Any, auto_class: Any) -> None:
    """What is known before the weights are read. Raises UnsupportedModel."""
    name = architecture_of(config)
    if not transformers_checkpoint.class_of(auto_class, config)._can_set_attn_implementation():
        raise UnsupportedModel(f"{name} does not let its attention be replaced in transformers")
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder with a decoder; only decoders and encoders alone are supported")
    if config.sub_configs:
        raise UnsupportedModel(
            f"{name} is made of several models ({', '.join(sorted(config.sub_configs))}), not of a decoder alone"
        )
    stateful = sorted(STATEFUL & set(getattr(config, "layer_types", None) or ()))
    if stateful:
        raise UnsupportedModel(f"{name} keeps a state beside keys and values (layers: {', '.join(stateful)})")


def load_causal(folder: Path, config: Any, dtype: torch.dtype, context_len: int, kernels: Kernels) -> LoadedCausal:
    """Raises CheckpointError, UnsupportedModel. context_len: at most max_context()."""
    has_head = is_causal_head(config)
    auto_class = AutoModelForCausalLM if has_head else AutoModel
    refuse_by_config(config, auto_class)
    model = transformers_checkpoint.load(folder, config, auto_class, dtype, "eager")
    decoder = _decoder_of(model) if has_head else model
    ids = paging_check.prompts(int(config.vocab_size), context_len)
    expected = paging_check.outputs(model, ids[0], has_head), paging_check.outputs(model, ids[1], has_head)
    if expected[0].shape[1] != config.vocab_size and has_head:
        raise UnsupportedModel(f"{expected[0].shape[1]} logits for a vocabulary of {config.vocab_size}")
    held = Held()
    held.attach(model)
    probe = _probed(model, held, ids[0], context_len)
    model.set_attn_implementation(PAGED_ATTENTION)
    paged = TransformersModel(model, decoder, PagedLayers(held, probe.layers, kernels), context_len)
    _checked(paged, Subject(probe.ordered(), dtype, kernels, has_head), expected, ids)
    return LoadedCausal(paged, probe, transformers_checkpoint.num_bytes(model))


def _decoder_of(model: Any) -> Any:
    """The part below the vocabulary projection."""
    named = model.get_decoder()
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module is not model]
    if named is model and not inner:
        raise UnsupportedModel(f"{type(model).__name__} does not tell its layers from its vocabulary projection")
    is_below = named is not model and isinstance(named, PreTrainedModel)  # some call their projection a decoder
    return named if is_below or not inner else inner[0]


def _probed(model: Any, held: Held, ids: Tensor, context_len: int) -> Probe:
    held.now = probe = Probe(context_len)
    model.set_attn_implementation(PROBE_ATTENTION)
    try:
        model(input_ids=ids[None], position_ids=torch.arange(len(ids))[None], use_cache=False)
    except UnsupportedModel:
        raise
    except Exception as error:  # code of the library that was not made for this; whatever it raises is the reason
        raise UnsupportedModel(f"{type(model).__name__} cannot run with another attention: {error!r}") from error
    if not probe.layers:
        raise UnsupportedModel(f"{type(model).__name__} has no attention layers that can be replaced")
    return probe


def _checked(paged: TransformersModel, subject: Subject, expected: tuple[Tensor, Tensor], ids: tuple[Tensor, Tensor]) -> None:
    try:
        paging_check.check(paged, subject, expected, ids)
    except UnsupportedModel:
        raise
    except Exception as error:  # as above
        raise UnsupportedModel(f"paged attention does not run in this model: {error!r}") from error
