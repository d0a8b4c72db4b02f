"""Finds the attention layers of a transformers model by running it once over a few tokens.

The layers call attention by the name of an implementation. Under PROBE_ATTENTION they call probe(), which records the sizes
and the mask of each layer, and raises UnsupportedModel for a layer that paged attention cannot compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from services.worker.exec.pools.kv_pool import LayerKV
from services.worker.exec.weights.checkpoint import UnsupportedModel

PROBE_ATTENTION = "rootstock_probe"
HOLDER = "rootstock_step_holder"  # attribute of attention modules
MaskFunction = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class MaskDescription:
    """The description from which transformers would make a layer's mask."""

    # (batch, head, query position, key position) -> bool
    allows: MaskFunction
    # positions; 0 for none
    window: int

    def is_causal_window(self, context_len: int) -> bool:
        """Whether each position attends to itself and to the positions before it, or to the last `window` of them.

        Checks the first positions, those around the end of the window, and the last one.
        """
        assert context_len > 0 and self.window >= 0, "sizes are no negative numbers"
        keys = torch.arange(context_len)
        edge = self.window or 1
        queries = {0, 1, 31, edge - 1, edge, edge + 1, context_len // 2, context_len - 1}
        return all(self._fits(query, keys) for query in sorted(queries) if query < context_len)

    def _fits(self, query: int, keys: Tensor) -> bool:
        zero, position = torch.tensor(0), torch.tensor(query)
        allowed = torch.as_tensor(self.allows(zero, zero, position, keys)).expand(len(keys))
        expected = (keys <= query) & (keys > query - self.window) if self.window else keys <= query
        return torch.equal(allowed, expected)


def describe_mask(*_: Any, mask_function: MaskFunction, local_size: int | None = None, **__: Any) -> MaskDescription:
    """Replaces the mask creation of transformers: returns the description of a mask."""
    return MaskDescription(mask_function, local_size or 0)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    # index of the layer's pools
    index: int
    kv: LayerKV
    # positions that a token attends to, its own included; 0 for all
    window: int


@dataclass(slots=True)
class Probe:
    """Records the layers of one pass, in the order in which they run."""

    context_len: int
    # by the layer's number in the model
    layers: dict[int, AttentionLayer] = field(default_factory=dict)

    def record(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, window: int | None) -> None:
        name = type(module).__name__
        number = getattr(module, "layer_idx", None)
        if not isinstance(number, int) or number in self.layers:
            raise UnsupportedModel(f"{name} is not one attention over one sequence per layer")
        if not (query.shape[0] == 1 and query.shape[2] == key.shape[2] == value.shape[2]):
            raise UnsupportedModel(f"{name} attends to other tokens than the prompt's")
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            raise UnsupportedModel(f"{name} has {query.shape[1]} query, {key.shape[1]} key and {value.shape[1]} value heads")
        kv = LayerKV(key.shape[1], key.shape[3], value.shape[3])
        self.layers[number] = AttentionLayer(len(self.layers), kv, self._window(name, mask, window))

    def _window(self, name: str, mask: Any, window: int | None) -> int:
        """Returns the window, 0 for none. Raises UnsupportedModel for a mask that is not causal."""
        if mask is None:
            return window or 0
        if not isinstance(mask, MaskDescription):
            raise UnsupportedModel(f"{name} wants a mask of its own making")
        if not mask.is_causal_window(self.context_len):
            raise UnsupportedModel(f"{name} wants another mask than a causal one, with or without a sliding window")
        return mask.window

    def ordered(self) -> Sequence[LayerKV]:
        """Returns the cache size of each layer, by the index of its pools."""
        assert [layer.index for layer in self.layers.values()] == list(range(len(self.layers))), "a pool for each layer"
        return [layer.kv for layer in self.layers.values()]


@dataclass(slots=True)
class StepHolder:
    """The Probe or the step for which the attention modules of one model run. The caller of the model's forward sets it.

    Keyword arguments would not do, because some models do not pass them on to their layers.
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


def probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *_: Any,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """Records the layer, and returns zeros. query, key, value: [1, heads, tokens, dims] each."""
    if position_bias is not None:
        raise UnsupportedModel(f"{type(module).__name__} adds a bias by position to its scores")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedModel(f"{type(module).__name__} looks in both directions")
    found = step_of(module)
    assert isinstance(found, Probe)
    found.record(module, query, key, value, attention_mask, sliding_window)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(PROBE_ATTENTION, probe)
AttentionMaskInterface.register(PROBE_ATTENTION, describe_mask)
