"""Maps architectures of config.json to our model classes, and refuses configs that these classes cannot compute."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

from rootstock_llm.services.worker.exec.models.decoder import DecoderModel
from rootstock_llm.services.worker.exec.models.decoder_config import CAUSAL, DecoderConfig
from rootstock_llm.services.worker.exec.models.families import MODELS
from rootstock_llm.services.worker.exec.models.rope import ROPE_TYPES
from rootstock_llm.services.worker.exec.weights.checkpoint import UnsupportedModel, architecture_of

BASE = "Model"  # ending of an architecture without a vocabulary projection
WRAPPER = "ForConditionalGeneration"  # ending of an architecture of text and images, whose decoder is in text_config

FAMILIES: dict[str, type[DecoderModel]] = {model.__name__: model for model in MODELS}


def _endings(family: type[DecoderModel]) -> Iterator[str]:
    yield CAUSAL
    if family.has_base:
        yield BASE
    if family.wrapper_type:
        yield WRAPPER


ARCHITECTURES = {f"{name}{ending}": family for name, family in FAMILIES.items() for ending in _endings(family)}


class NotCovered(UnsupportedModel):
    """Raised if no class of this registry can compute the model. transformers' code may be able to compute it."""


def config_of(given: Any) -> DecoderConfig:
    """Converts a transformers config to the DecoderConfig of its architecture's model class.

    Args:
        given: a transformers PreTrainedConfig.

    Raises:
        NotCovered: no model class can compute the model.
        UnsupportedModel: the config has sizes that no decoder can have.
    """
    architecture = architecture_of(given)
    family = _family_of(architecture)
    expected = family.wrapper_type if architecture.endswith(WRAPPER) else family.model_type
    if given.model_type != expected:
        raise NotCovered(f"model_type {given.model_type} does not match architecture {architecture}")
    given = text_config(given)
    if given.model_type != family.model_type:
        raise NotCovered(f"model_type {given.model_type} of the text config does not match architecture {architecture}")
    _check_covered(given, family)
    _check_sizes(given)
    return family.config_of(given)


def text_config(given: Any) -> Any:
    """Returns the config of the decoder in a model of text and images, and any other config unchanged.

    For a model of text and images, the result is a copy with the architecture of a text model. tie_word_embeddings comes from
    the outer config, and so do dtype and eos_token_id if the inner config has none.
    """
    architecture = architecture_of(given)
    if architecture not in ARCHITECTURES or not architecture.endswith(WRAPPER):
        return given
    text = copy(given.get_text_config())
    text.architectures = [architecture.removesuffix(WRAPPER) + CAUSAL]
    text.tie_word_embeddings = given.tie_word_embeddings  # transformers reads it from the outer config
    for name in ("dtype", "eos_token_id"):
        if getattr(text, name, None) is None:
            setattr(text, name, getattr(given, name, None))
    return text


def model_type_of(architecture: str) -> str:
    """Returns the model_type of the decoder's config for a registered architecture. Raises NotCovered for others."""
    return _family_of(architecture).model_type


def _family_of(architecture: str) -> type[DecoderModel]:
    family = ARCHITECTURES.get(architecture)
    if family is None:
        raise NotCovered(
            f"architecture {architecture} is not of a family that this worker has code for: {', '.join(sorted(FAMILIES))}"
        )
    return family


def ropes_of(given: Any) -> list[dict[str, Any]]:
    """Returns the rope parameters of a config: one dictionary, or one for each type of layer."""
    rope = given.rope_parameters or {}
    by_type = [each for each in rope.values() if isinstance(each, dict)]
    return by_type or [rope]


def _check_covered(given: Any, family: type[DecoderModel]) -> None:
    """Checks that the model class implements the arithmetic of the config. Raises NotCovered if not."""
    activation = getattr(given, family.activation_key, None)
    if activation != family.activation:
        raise NotCovered(f"{family.activation_key} {activation} is not supported; supported: {family.activation}")
    if not getattr(given, "is_causal", True) or getattr(given, "use_bidirectional_attention", False):
        raise NotCovered("attention in both directions is not supported")
    if unknown := set(getattr(given, "layer_types", None) or ()) - family.layer_types:
        raise NotCovered(f"layers of type {', '.join(sorted(unknown))} are not supported")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(given, cap, None) is not None and not family.caps:
            raise NotCovered(f"{cap} is not supported")
    for rope in ropes_of(given):
        if rope.get("rope_type", "default") not in ROPE_TYPES:
            raise NotCovered(f"rope type {rope['rope_type']} is not supported; supported: {', '.join(ROPE_TYPES)}")
        if float(rope.get("partial_rotary_factor", 1.0)) != 1.0 and not family.partial_rotation:
            raise NotCovered("partial_rotary_factor other than 1 is not supported")


def _check_sizes(given: Any) -> None:
    """Checks that the sizes are positive and fit each other. Raises UnsupportedModel if not."""
    names = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"]
    if hasattr(given, "intermediate_size"):  # absent if all layers have experts
        names.append("intermediate_size")
    for name in names:
        if not isinstance(getattr(given, name), int) or getattr(given, name) < 1:
            raise UnsupportedModel(f"{name} is {getattr(given, name)}; it must be a positive integer")
    if given.num_attention_heads % (given.num_key_value_heads or given.num_attention_heads):
        raise UnsupportedModel(
            f"num_attention_heads {given.num_attention_heads} is not a multiple of"
            f" num_key_value_heads {given.num_key_value_heads}"
        )
