"""Runs a model of transformers' modeling code over a ragged batch, with paged attention in its layers.

The config of a transformers model names an attention implementation. The model's layers call the function that is registered
under this name. attend() is registered as PAGED_ATTENTION, and finds the current step in the StepHolder of the calling module.
transformers_check.py decides whether a model can be computed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM, PreTrainedModel

from rootstock_llm.kernels.contracts.ops import Kernels, RaggedRows, ScoreRule
from rootstock_llm.services.worker.exec.contracts.causal_model import NoVocabulary
from rootstock_llm.services.worker.exec.models.transformers_experts import pack_experts
from rootstock_llm.services.worker.exec.pools.kv_pool import KVPool, LayerKV
from rootstock_llm.services.worker.exec.weights.checkpoint import UnsupportedModel, architecture_of
from rootstock_llm.services.worker.exec.weights.transformers_checkpoint import is_causal_head, moved

PAGED_ATTENTION = "rootstock_paged"
HOLDER = "rootstock_step_holder"  # attribute of attention modules that has their StepHolder


class TransformersModel:
    """Implements CausalModel with a model of transformers."""

    def __init__(self, model: Any, decoder: Any, attention: PagedLayers, max_positions: int) -> None:
        """
        Args:
            model: a model whose attention implementation is PAGED_ATTENTION.
            decoder: the part of the model before its vocabulary projection, or the model itself if it has no projection.
            attention: the layers' attention.
            max_positions: number of positions. Higher positions, which only padding rows have, are clamped to the last one.
        """
        self._model = model
        self._decoder = decoder
        self._attention = attention
        self._last_position = max_positions - 1
        self._computed = _ComputedLayers()
        self._head = None if decoder is model else _replaced(model, _path_of(decoder, model), self._computed)
        self._output: Any = None

    def to(self, device: torch.device, kernels: Kernels) -> TransformersModel:
        """Moves the model to the device, see transformers_checkpoint.moved(), and returns it with the kernels of that device."""
        model = moved(self._model, device)
        return TransformersModel(model, self._decoder, self._attention.using(kernels), self._last_position + 1)

    def pack_experts(self) -> int:
        """Packs the experts for our kernels. Returns the bytes by which the weights have become larger."""
        return pack_experts(self._model, self._attention.kernels)

    def forward(self, input_ids: Tensor, rows: RaggedRows, pool: KVPool) -> None:
        assert len(input_ids) == len(rows.positions), "each token has a position"
        positions = rows.positions.long().clamp(max=self._last_position)
        self._attention.begin(rows, pool)
        self._output = self._decoder(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)

    def states(self, wanted: Tensor) -> Tensor:
        states: Tensor = self._output.last_hidden_state[0, wanted]
        assert states.shape[0] == len(wanted), "each wanted token has a state"
        return states

    def logits(self, wanted: Tensor) -> Tensor:
        """Projects the states with the model's own code, which may scale or cap the logits. Raises NoVocabulary."""
        if self._head is None:
            raise NoVocabulary("this model has no vocabulary projection: it computes embeddings and samples no tokens")
        self._computed.output = type(self._output)(last_hidden_state=self.states(wanted)[None])
        ids = torch.zeros(1, len(wanted), dtype=torch.int64, device=wanted.device)
        logits: Tensor = self._head(input_ids=ids, use_cache=False).logits[0]
        return logits.float()


class _ComputedLayers(nn.Module):
    """Takes the place of a model's layers, and returns an output that they have computed before.

    Calling the model then runs only its vocabulary projection, on chosen tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.output: Any = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


def _replaced(model: nn.Module, path: Sequence[str], leaf: nn.Module) -> nn.Module:
    """Returns a copy of the model with `leaf` as the module at the path. It shares all other modules with the unchanged model."""
    if not path:
        return leaf
    clone = copy.copy(model)
    clone._modules = {**model._modules, path[0]: _replaced(model.get_submodule(path[0]), path[1:], leaf)}
    return clone


def _path_of(module: nn.Module, model: nn.Module) -> list[str]:
    return next(name.split(".") for name, found in model.named_modules() if found is module)


@dataclass(frozen=True, slots=True)
class PagedLayers:
    """The attention of one model's layers."""

    holder: StepHolder  # attached to the model's attention modules
    layers: Mapping[int, AttentionLayer]  # by layer_idx of the attention module
    kernels: Kernels

    def begin(self, rows: RaggedRows, pool: KVPool) -> None:
        """Sets the step of the holder: the layers attend to these rows and use this pool until the next call."""
        assert len(pool.keys) == len(self.layers), "each layer has keys and values in the pool"
        self.holder.step = PagedStep(rows, rows.in_windows(), pool, self.layers, self.kernels)

    def using(self, kernels: Kernels) -> PagedLayers:
        """Returns the same layers with other kernels."""
        return replace(self, kernels=kernels)


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The inputs of attention in a forward pass over T tokens."""

    rows: RaggedRows
    window_rows: RaggedRows  # the rows with the page table of windowed layers
    pool: KVPool
    layers: Mapping[int, AttentionLayer]  # by layer_idx of the attention module
    kernels: Kernels


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    index: int  # index of the layer in the pool
    kv: LayerKV  # size of a token's KV, and the layer's window


@dataclass(slots=True)
class StepHolder:
    """Passes the current step to the attention modules of one model. The caller of the model sets `step` before each call.

    A keyword argument would not work, because some models do not pass keyword arguments to their layers.
    """

    step: Any = None  # PagedStep, or a Probe while transformers_check inspects the model

    def attach(self, model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, HOLDER, self)


def step_of(module: nn.Module) -> Any:
    """Returns the step of the module's holder. Raises UnsupportedModel if the module has no layer_idx, and so no holder."""
    holder = getattr(module, HOLDER, None)
    if not isinstance(holder, StepHolder):
        raise UnsupportedModel(f"{type(module).__name__} computes attention and has no layer_idx")
    return holder.step


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *_: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """Writes keys and values to the layer's pages, then attends to the pages. The rows and the window replace the mask.

    Args:
        query: [1, H, T, D].
        key: [1, G, T, D].
        value: [1, G, T, E].
        scaling: factor of the scores; None for 1 / sqrt(D).
        softcap: limit of the scores, see ScoreRule; None for no limit.
        s_aux: attention sinks [H], see ScoreRule; None for no sinks.

    Returns:
        [1, T, H, E], and None in place of attention weights.
    """
    number, step = module.layer_idx, step_of(module)
    assert isinstance(number, int) and isinstance(step, PagedStep)
    layer = step.layers[number]
    window = layer.kv.window
    rows = step.window_rows if window else step.rows
    assert query.shape[2] == key.shape[2] == value.shape[2] == len(rows.positions), (
        "the layer computes exactly the tokens of the step"
    )
    assert key.shape[3] == layer.kv.key_dim and value.shape[3] == layer.kv.value_dim, (
        "the layer has the sizes that the probe recorded"
    )
    keys, values = step.pool.layer(layer.index)
    step.kernels.write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), rows, keys, values)
    q = query[0].transpose(0, 1)
    out = q.new_empty(q.shape[0], q.shape[1] * layer.kv.value_dim)
    scale = q.shape[2] ** -0.5 if scaling is None else float(scaling)
    rule = ScoreRule(scale, window, softcap or 0.0, None if s_aux is None else s_aux.float())
    step.kernels.paged_attention(out, q.flatten(1), keys, values, rows, rule)
    return out.view(1, len(q), q.shape[1], -1), None


def auto_class_of(config: Any) -> Any:
    return AutoModelForCausalLM if is_causal_head(config) else AutoModel


def max_context(config: Any) -> int:
    """Returns the longest context up to which the RoPE angles of a row do not depend on the batch's other rows.

    With longrope, one row longer than original_max_position_embeddings changes the angles of all rows of the batch.

    Raises:
        UnsupportedModel: the config has no positive max_position_embeddings.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise UnsupportedModel(f"the config of {architecture_of(config)} has no max_position_embeddings")
    originals = [int(rope["original_max_position_embeddings"]) for rope in _ropes(config) if rope.get("rope_type") == "longrope"]
    return min([longest, *originals])


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Returns the rope parameters of the model, or those of each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]


def decoder_of(model: Any) -> Any:
    """Returns the part of the model before its vocabulary projection. Raises UnsupportedModel if it cannot be found."""
    named = model.get_decoder()
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module is not model]
    if named is model and not inner:
        raise UnsupportedModel(f"{type(model).__name__} has no separate module for the layers before its vocabulary projection")
    is_decoder = named is not model and isinstance(named, PreTrainedModel)  # some models call the projection "decoder"
    return named if is_decoder or not inner else inner[0]


AttentionInterface.register(PAGED_ATTENTION, attend)
