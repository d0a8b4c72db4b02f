"""Refuses a model by its config.json, without transformers, before the model is downloaded.

The worker refuses the same models with the same messages when it reads the folder (services/worker/exec). Results of checks that
need transformers are in served_architectures.json, which `make docs` writes with the worker's checks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from rootstock_llm.services.shared.quantization_config import fault_of, method_of, quantization_of

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})  # supported values of transformers' layer_types
RECURRENT = "linear_attention"  # layer type of a recurrence, which some of our model classes have
TYPE_LISTS = ("layer_types", "layers_block_type", "block_types")  # keys of config.json with a type per layer
ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "Model")  # endings of the architectures that our model classes compute
TABLE = Path(__file__).with_name("served_architectures.json")


def quantized(subject: str, fault: str) -> str:
    return f"{subject} is quantized in a layout that is not supported: {fault}"


def quantized_elsewhere(subject: str, method: str, reason: str) -> str:
    return f"{subject} cannot be served with weights of {method}: transformers' code would compute it, because {reason}"


def unknown_model_type(subject: str, model_type: str, version: str) -> str:
    fault = f"{subject} has model_type {model_type!r}, which transformers {version} does not know"
    return f"{fault}; docs/reference/models.md lists models"


def unserved_layers(architecture: str, types: Iterable[str]) -> str:
    served = " and ".join(sorted(LAYER_TYPES))
    return f"{architecture} has layers of type {', '.join(sorted(types))}; only {served} are supported"


def fixed_attention(architecture: str) -> str:
    return f"{architecture} has attention that transformers cannot replace by the server's attention"


def encoder_with_decoder(architecture: str) -> str:
    return f"{architecture} is an encoder with a decoder; only pure decoders and pure encoders are supported"


def several_models(architecture: str, parts: Iterable[str]) -> str:
    return f"{architecture} is made of several models ({', '.join(sorted(parts))}), not of a single decoder"


def unsupported(architecture: str, model_type: str, reason: str) -> str:
    return (
        f"architecture {architecture} is not supported: transformers has no causal model or encoder of that name for"
        f" {model_type}, and {reason}"
    )


def unknown_layers(lists: Iterable[Any], served: Collection[str] = LAYER_TYPES) -> set[str]:
    """Returns the unsupported types in a config's lists of layer types."""
    return {str(kind) for kinds in lists if isinstance(kinds, list | tuple) for kind in kinds}.difference(served)


@functools.cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text())
    return found


def refusal(config: Any, files: Collection[str], subject: str) -> str:
    """Returns the message with which the worker refuses the model, or "" if the worker may serve it.

    Args:
        config: content of config.json. A value that is missing or has a wrong type is not checked.
        files: names of the files in the model's folder.
        subject: name of the model in the message: its folder or download source.
    """
    if not isinstance(config, Mapping):
        return ""
    table = _table()
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type not in table["model_types"]:
        return unknown_model_type(subject, model_type, table["transformers"])
    if fault := fault_of(config, files):
        return quantized(subject, fault)
    architectures = config.get("architectures")
    if not (isinstance(architectures, list) and architectures and isinstance(model_type, str)):
        return ""
    architecture = str(architectures[0])
    if (quantization := quantization_of(config)) and not _has_code(table, architecture):
        return quantized_elsewhere(subject, method_of(quantization), _without_code(table, architecture))
    text = config.get("text_config") if architecture in table["wrappers"] else config
    served = LAYER_TYPES | set(table["own_layer_types"].get(architecture, ()))
    if isinstance(text, Mapping) and (types := unknown_layers((text.get(key) for key in TYPE_LISTS), served)):
        return unserved_layers(architecture, types)
    return _by_architecture(table, architecture, model_type, {key for key in TYPE_LISTS if config.get(key)})


def _has_code(table: Mapping[str, Any], architecture: str) -> bool:
    """Whether one of our model classes computes the architecture, whose name is then a family followed by one of ENDINGS."""
    ending = next((ending for ending in ENDINGS if architecture.endswith(ending)), "")
    return bool(ending) and architecture.removesuffix(ending) in table["families"]


def _without_code(table: Mapping[str, Any], architecture: str) -> str:
    return f"architecture {architecture} is not of a family that this worker has code for: {', '.join(table['families'])}"


def _by_architecture(table: Mapping[str, Any], architecture: str, model_type: str, given: Collection[str]) -> str:
    """Returns the message for an unsupported architecture, or "".

    Args:
        given: keys of TYPE_LISTS that are in config.json. If empty, the layers have the types of transformers' default config.
    """
    if not given and (types := table["layers"].get(architecture)):
        return unserved_layers(architecture, types)
    if architecture in table["fixed_attention"]:
        return fixed_attention(architecture)
    if architecture in table["encoder_with_decoder"]:
        return encoder_with_decoder(architecture)
    if parts := table["several_models"].get(architecture):
        return several_models(architecture, parts)
    if architecture not in table["served"]:
        return unsupported(
            architecture,
            model_type,
            _without_code(table, architecture),
        )
    return ""
