"""What each attention layer of a transformers model asks for, found by running the model once over a few tokens.

The layers call attention by the name of an implementation; under PROBE_ATTENTION they call probe(), which notes what they
bring. What does not fit paged attention raises UnsupportedModel there and then.
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
from services.worker.exec.weights.families import UnsupportedModel

PROBE_ATTENTION = "rootstock_probe"
HELD = "rootstock_held"  # the attribute of attention modules under which they find what they run for
MaskFunction = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class MaskWanted:
    """The mask of a layer as transformers describes it, in place of the mask. allows: (batch, head, query position, key
    position) -> bool; window: positions that the description names, 0 for none."""

    allows: MaskFunction
    window: int

    def is_causal_window(self, context_len: int) -> bool:
        """Whether each position sees itself and those before it, the last `window` of them if there is a window, and no
        other: looked at for the first positions, those about the window's end, and the last."""
        assert context_len > 0 and self.window >= 0, "positions to look at"
        keys = torch.arange(context_len)
        edge = self.window or 1
        queries = {0, 1, 31, edge - 1, edge, edge + 1, context_len // 2, context_len - 1}
        return all(self._fits(query, keys) for query in sorted(queries) if query < context_len)

    def _fits(self, query: int, keys: Tensor) -> bool:
        zero, position = torch.tensor(0), torch.tensor(query)
        allowed = torch.as_tensor(self.allows(zero, zero, position, keys)).expand(len(keys))
        expected = (keys <= query) & (keys > query - self.window) if self.window else keys <= query
        return torch.equal(allowed, expected)


def describe_mask(*_: Any, mask_function: MaskFunction, local_size: int | None = None, **__: Any) -> MaskWanted:
    """A mask "creation" of transformers' that creates none."""
    return MaskWanted(mask_function, local_size or 0)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """index: of the layer's pools. window: last positions a token sees, its own included; 0 for all."""

    index: int
    kv: LayerKV
    window: int


@dataclass(slots=True)
class Probe:
    """Notes the layers of one pass, in the order in which they run, by their number in the model."""

    context_len: int
    layers: dict[int, AttentionLayer] = field(default_factory=dict)

    def note(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, window: int | None) -> None:
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
        """Raises UnsupportedModel for a mask that is not causal, with or without a window."""
        if mask is None:
            return window or 0
        if not isinstance(mask, MaskWanted):
            raise UnsupportedModel(f"{name} wants a mask of its own making")
        if not mask.is_causal_window(self.context_len):
            raise UnsupportedModel(f"{name} wants another mask than a causal one, with or without a sliding window")
        return mask.window

    def ordered(self) -> Sequence[LayerKV]:
        """By index of the layers' pools."""
        assert [layer.index for layer in self.layers.values()] == list(range(len(self.layers))), "a pool for each layer"
        return [layer.kv for layer in self.layers.values()]


@dataclass(slots=True)
class Held:
    """What the attention modules of one model run for: a Probe, or the step. Set by who calls the model's forward; not all
    models pass keyword arguments on to their layers."""

    now: Any = None

    def attach(self, model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, HELD, self)


def held_by(module: nn.Module) -> Any:
    """Raises UnsupportedModel for a module that is no numbered layer."""
    held = getattr(module, HELD, None)
    if not isinstance(held, Held):
        raise UnsupportedModel(f"{type(module).__name__} has no layer number")
    return held.now


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
    """An attention of transformers' that computes nothing: its output is zero. [1, heads, tokens, dims] each."""
    if position_bias is not None:
        raise UnsupportedModel(f"{type(module).__name__} adds a bias by position to its scores")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedModel(f"{type(module).__name__} looks in both directions")
    noted = held_by(module)
    assert isinstance(noted, Probe)
    noted.note(module, query, key, value, attention_mask, sliding_window)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(PROBE_ATTENTION, probe)
AttentionMaskInterface.register(PROBE_ATTENTION, describe_mask)
