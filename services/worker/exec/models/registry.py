"""Maps architectures of config.json to our model classes, and refuses configs that these classes cannot compute."""

from __future__ import annotations

from typing import Any

from rootstock_llm.services.shared.served_config import LAYER_TYPES
from rootstock_llm.services.worker.exec.models.dense import CAUSAL, DenseConfig, DenseModel, Llama, Mistral, Qwen2, Qwen3
from rootstock_llm.services.worker.exec.models.rope import ROPE_TYPES
from rootstock_llm.services.worker.exec.weights.checkpoint import UnsupportedModel, architecture_of

FAMILIES: dict[str, type[DenseModel]] = {"Llama": Llama, "Mistral": Mistral, "Qwen2": Qwen2, "Qwen3": Qwen3}
BASE = "Model"  # ending of an architecture without a vocabulary projection
ARCHITECTURES = {f"{family}{ending}": model for family, model in FAMILIES.items() for ending in (CAUSAL, BASE)}


class NotCovered(UnsupportedModel):
    """Raised if no class of this registry can compute the model. transformers' code may be able to compute it."""


def config_of(given: Any) -> DenseConfig:
    """Converts a config for the model class of its architecture.

    Args:
        given: a transformers PreTrainedConfig.

    Raises:
        NotCovered: no model class can compute the model.
        UnsupportedModel: the config has sizes that no decoder can have.
    """
    architecture = architecture_of(given)
    model = ARCHITECTURES.get(architecture)
    if model is None:
        raise NotCovered(
            f"architecture {architecture} is not of a family that this worker has code for: {', '.join(sorted(FAMILIES))}"
        )
    _check_covered(given, architecture)
    _check_sizes(given)
    return model.config_of(given)


def model_type_of(architecture: str) -> str:
    """Returns the model_type in configs of a registered architecture."""
    return architecture.removesuffix(CAUSAL).removesuffix(BASE).lower()


def _check_covered(given: Any, architecture: str) -> None:
    """Checks that the dense models implement the arithmetic of the config. Raises NotCovered if not."""
    if given.model_type != model_type_of(architecture):
        raise NotCovered(f"model_type {given.model_type} does not match architecture {architecture}")
    if given.hidden_act != "silu":
        raise NotCovered(f"hidden_act {given.hidden_act} is not supported; supported: silu")
    if not getattr(given, "is_causal", True) or getattr(given, "use_bidirectional_attention", False):
        raise NotCovered("attention in both directions is not supported")
    if unknown := set(getattr(given, "layer_types", None) or ()) - LAYER_TYPES:
        raise NotCovered(f"layers of type {', '.join(sorted(unknown))} are not supported")
    rope = given.rope_parameters or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        raise NotCovered(f"rope type {rope['rope_type']} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise NotCovered("partial_rotary_factor other than 1 is not supported")


def _check_sizes(given: Any) -> None:
    """Checks that the sizes are positive and fit each other. Raises UnsupportedModel if not."""
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if not isinstance(getattr(given, name), int) or getattr(given, name) < 1:
            raise UnsupportedModel(f"{name} is {getattr(given, name)}; it must be a positive integer")
    if given.num_attention_heads % (given.num_key_value_heads or given.num_attention_heads):
        raise UnsupportedModel(
            f"num_attention_heads {given.num_attention_heads} is not a multiple of"
            f" num_key_value_heads {given.num_key_value_heads}"
        )
