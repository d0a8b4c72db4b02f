"""Runs a model of transformers' modeling code over a ragged batch, with paged attention in its layers.

The layers call attention by the name of an implementation. Under PAGED_ATTENTION they call attend(), which finds the step in the
StepHolder of its module. transformers_check accepts or refuses a model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM, PreTrainedModel

from rootstock_llm.kernels.contracts.ops import Kernels, RaggedRows
from rootstock_llm.services.worker.exec.contracts.causal_model import NoVocabulary
from rootstock_llm.services.worker.exec.pools.kv_pool import KVPool, LayerKV
from rootstock_llm.services.worker.exec.weights.checkpoint import UnsupportedModel, architecture_of
from rootstock_llm.services.worker.exec.weights.transformers_checkpoint import is_causal_head

PAGED_ATTENTION = "rootstock_paged"
HOLDER = "rootstock_step_holder"  # attribute of attention modules


class TransformersModel:
    """Implements CausalModel."""

    def __init__(self, model: Any, decoder: Any, attention: PagedLayers, max_positions: int) -> None:
        """
        Args:
            model: its layers call the attention.
            decoder: the part of the model below its vocabulary projection; the model itself if it has none.
            max_positions: higher positions are clamped. Only padding rows have them, and their results are dropped.
        """
        self._model = model
        self._decoder = decoder
        self._attention = attention
        self._last_position = max_positions - 1
        self._computed = _ComputedLayers()
        self._head = None if decoder is model else _replaced(model, _path_of(decoder, model), self._computed)
        self._output: Any = None

    def to(self, device: torch.device, kernels: Kernels) -> TransformersModel:
        """Returns the model on another device, with that device's kernels."""
        moved = self._model.to(device)
        return TransformersModel(moved, self._decoder, self._attention.using(kernels), self._last_position + 1)

    def forward(self, input_ids: Tensor, rows: RaggedRows, pool: KVPool) -> None:
        assert len(input_ids) == len(rows.positions), "each token has a position"
        positions = rows.positions.long().clamp(max=self._last_position)
        self._attention.begin(rows, pool)
        self._output = self._decoder(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)

    def states(self, wanted: Tensor) -> Tensor:
        states: Tensor = self._output.last_hidden_state[0, wanted]
        assert states.shape[0] == len(wanted), "a vector for each wanted token"
        return states

    def logits(self, wanted: Tensor) -> Tensor:
        """Projects the states with the model's own code, which may scale or cap the logits. Raises NoVocabulary."""
        if self._head is None:
            raise NoVocabulary("this model computes vectors and samples no tokens")
        self._computed.output = type(self._output)(last_hidden_state=self.states(wanted)[None])
        ids = torch.zeros(1, len(wanted), dtype=torch.int64, device=wanted.device)
        logits: Tensor = self._head(input_ids=ids, use_cache=False).logits[0]
        return logits.float()


class _ComputedLayers(nn.Module):
    """Replaces the layers of a model, and returns the output that they computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.output: Any = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


def _replaced(model: nn.Module, path: Sequence[str], leaf: nn.Module) -> nn.Module:
    """Returns a copy of the model with another module at the path. All other modules are shared, and the model is unchanged."""
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

    # attached to the model
    holder: StepHolder
    # by the layer's number in the model
    layers: Mapping[int, AttentionLayer]
    kernels: Kernels

    def begin(self, rows: RaggedRows, pool: KVPool) -> None:
        """Makes the layers attend to these rows, and write to this pool, until the next call."""
        assert len(pool.keys) == len(self.layers), "a pool for each layer"
        self.holder.step = PagedStep(rows, pool, self.layers, self.kernels)

    def using(self, kernels: Kernels) -> PagedLayers:
        """Returns the same layers with other kernels."""
        return replace(self, kernels=kernels)


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The state of a forward pass over T tokens."""

    rows: RaggedRows
    pool: KVPool
    # by the layer's number in the model
    layers: Mapping[int, AttentionLayer]
    kernels: Kernels


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    # index of the layer's pools
    index: int
    kv: LayerKV
    # number of last positions, including the token's own position, to which a token attends; 0 for all
    window: int


@dataclass(slots=True)
class StepHolder:
    """The Probe or the step for which the attention modules of one model run. The caller of the model's forward sets it.

    Keyword arguments are not used, because some models do not pass them to their layers.
    """

    step: Any = None

    def attach(self, model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, HOLDER, self)


def step_of(module: nn.Module) -> Any:
    """Returns the step of the module's holder. Raises UnsupportedModel for a module that is no numbered layer."""
    holder = getattr(module, HOLDER, None)
    if not isinstance(holder, StepHolder):
        raise UnsupportedModel(f"{type(module).__name__} has no layer number")
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
    """Writes keys and values to the layer's pages, then attends to them. Ignores the mask: rows and window define it.

    Args:
        query: [1, H, T, D].
        key: [1, G, T, D].
        value: [1, G, T, E].

    Returns:
        [1, T, H, E], and None in place of attention weights.
    """
    number, step = module.layer_idx, step_of(module)
    assert isinstance(number, int) and isinstance(step, PagedStep)
    layer, rows = step.layers[number], step.rows
    assert query.shape[2] == key.shape[2] == value.shape[2] == len(rows.positions), "the layer gets the step's tokens"
    assert key.shape[3] == layer.kv.key_dim and value.shape[3] == layer.kv.value_dim, "the layer has the probed sizes"
    keys, values = step.pool.layer(layer.index)
    step.kernels.write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), rows, keys, values)
    q = query[0].transpose(0, 1)
    out = q.new_empty(q.shape[0], q.shape[1], layer.kv.value_dim)
    scale = q.shape[2] ** -0.5 if scaling is None else float(scaling)
    if softcap or s_aux is not None or layer.kv.key_dim != layer.kv.value_dim:
        step.kernels.general_attention(out, q, keys, values, rows, scale, layer.window, softcap or 0.0, s_aux)
    else:
        _through_kernel(step.kernels, out, q, keys, values, rows, scale, layer.window)
    return out[None], None


def _through_kernel(
    kernels: Kernels, out: Tensor, q: Tensor, keys: Tensor, values: Tensor, rows: RaggedRows, scale: float, window: int
) -> None:
    """Calls the kernel with q in the first columns of a qkv matrix. It reads no other columns."""
    tokens, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    qkv = q.new_empty(tokens, (heads + 2 * kv_heads) * head_dim)
    qkv[:, : heads * head_dim] = q.reshape(tokens, -1)
    kernels.paged_attention(out.view(tokens, -1), qkv, keys, values, rows, scale, window)


def auto_class_of(config: Any) -> Any:
    return AutoModelForCausalLM if is_causal_head(config) else AutoModel


def max_context(config: Any) -> int:
    """Returns the longest context in which other rows do not change a row's rotation. Raises UnsupportedModel."""
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise UnsupportedModel(f"{architecture_of(config)} names no max_position_embeddings")
    originals = [int(rope["original_max_position_embeddings"]) for rope in _ropes(config) if rope.get("rope_type") == "longrope"]
    return min([longest, *originals])  # in longer contexts, the longest row of a batch changes the angles of all rows


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Returns the rope parameters, one for each type of layer that has its own."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]


def decoder_of(model: Any) -> Any:
    """Returns the part below the vocabulary projection. Raises UnsupportedModel."""
    named = model.get_decoder()
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module is not model]
    if named is model and not inner:
        raise UnsupportedModel(f"{type(model).__name__} does not tell its layers from its vocabulary projection")
    is_below = named is not model and isinstance(named, PreTrainedModel)  # some models name their projection "decoder"
    return named if is_below or not inner else inner[0]


AttentionInterface.register(PAGED_ATTENTION, attend)
