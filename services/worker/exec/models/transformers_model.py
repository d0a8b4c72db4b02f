"""Runs a model of transformers' modeling code over a ragged batch, with paged attention in its layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kernels.contracts.ops import Kernels, RaggedRows
from services.worker.exec.contracts.causal_model import NoVocabulary
from services.worker.exec.pools.kv_pool import KVPool


class StepAttention(Protocol):
    """The attention of a model's layers."""

    def begin(self, rows: RaggedRows, pool: KVPool) -> None:
        """Makes the layers attend to these rows, and write to this pool, until the next call."""

    def using(self, kernels: Kernels) -> StepAttention:
        """Returns the same layers with other kernels."""


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


class TransformersModel:
    """Implements CausalModel."""

    def __init__(self, model: Any, decoder: Any, attention: StepAttention, max_positions: int) -> None:
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
        assert len(input_ids) == len(rows.positions), "a position for each token"
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
            raise NoVocabulary("this model gives vectors and no tokens")
        self._computed.output = type(self._output)(last_hidden_state=self.states(wanted)[None])
        ids = torch.zeros(1, len(wanted), dtype=torch.int64, device=wanted.device)
        logits: Tensor = self._head(input_ids=ids, use_cache=False).logits[0]
        return logits.float()


def _path_of(module: nn.Module, model: nn.Module) -> list[str]:
    return next(name.split(".") for name, found in model.named_modules() if found is module)
