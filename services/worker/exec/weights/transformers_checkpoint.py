"""Loads a model of transformers from a folder: only from safetensors files, only by the library's code, and only if complete."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto import modeling_auto
from transformers.utils import logging as transformers_logging

from rootstock_llm.services.worker.exec.weights.checkpoint import CheckpointError, UnsupportedModel, architecture_of, named


def class_in(names: Any, config: Any) -> str:
    """Returns the class name that a table of transformers has for the config's model type, or an empty string.

    Args:
        names: table of the library from model type to class name, such as MODEL_MAPPING_NAMES.
    """
    found = names.get(config.model_type, "")
    return str(found if isinstance(found, str) else found[0])


def is_causal_head(config: Any) -> bool:
    """Whether the config's architecture is transformers' causal language model for the model type."""
    return architecture_of(config) == class_in(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, config)


def is_base(config: Any) -> bool:
    """Whether the config's architecture is transformers' model without a head for the model type."""
    return architecture_of(config) == class_in(modeling_auto.MODEL_MAPPING_NAMES, config)


def class_of(auto_class: Any, config: Any) -> Any:
    """Returns the class that the auto class has for the config. Raises UnsupportedModel if it has several classes."""
    found = auto_class._model_mapping[type(config)]
    if isinstance(found, tuple):
        raise UnsupportedModel(f"transformers has several classes for model type {config.model_type}, which is not supported")
    return found


def load(folder: Path, config: Any, auto_class: Any, dtype: torch.dtype, attention: str) -> Any:
    """Returns the model in evaluation mode.

    Raises:
        CheckpointError: loading fails, or a tensor is missing or has another shape.
    """
    transformers_logging.disable_progress_bar()
    try:
        model, report = auto_class.from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **_without_pooler(auto_class, config),
        )
    except MemoryError:
        raise
    except Exception as error:  # transformers raises errors of many types
        raise CheckpointError(f"cannot load {folder}: {error}") from error
    if report["missing_keys"]:
        raise CheckpointError(f"{folder} lacks {named(sorted(report['missing_keys']))}")
    if report["mismatched_keys"]:
        raise CheckpointError(f"{folder} has tensors whose shapes do not match its config: {report['mismatched_keys']}")
    return model.eval().requires_grad_(False)


def _without_pooler(auto_class: Any, config: Any) -> dict[str, bool]:
    """Returns the arguments that omit the pooling layer of BERT models, which most checkpoints of embedding models lack."""
    takes = "add_pooling_layer" in inspect.signature(class_of(auto_class, config).__init__).parameters
    return {"add_pooling_layer": False} if takes else {}


def moved(model: Any, device: torch.device) -> Any:
    """Moves the model to the device, and returns it with weights in memory of its own.

    transformers maps the tensors of a file into memory if they need no conversion. A process that writes this file would then
    change the weights of the served model, and a process that truncates it would end the worker by SIGBUS.
    """
    if device.type == "cpu":
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return model.to(device)


def num_bytes(model: Any) -> int:
    """Returns the bytes of parameters and buffers, counting shared storage once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
