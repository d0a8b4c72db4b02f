"""Runs a model of transformers' own modeling code over a ragged batch, with our paged attention in its layers."""

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
    """What the attention of a model's layers runs for."""

    def begin(self, rows: RaggedRows, pool: KVPool) -> None:
        """The layers attend to these rows, and write to this pool, until the next call."""

    def using(self, kernels: Kernels) -> StepAttention:
        """The same layers, through other kernels."""


class _Computed(nn.Module):
    """Stands in a model where its layers were, and gives what they have computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.output: Any = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


def _replaced(model: nn.Module, path: Sequence[str], leaf: nn.Module) -> nn.Module:
    """The model with another module at the path; all others are shared, and the given model stays as it is."""
    if not path:
        return leaf
    clone = copy.copy(model)
    clone._modules = {**model._modules, path[0]: _replaced(model.get_submodule(path[0]), path[1:], leaf)}
    return clone


class TransformersModel:
    """Implements CausalModel.

    model: its layers call the attention. decoder: its layers, the model itself where it has no vocabulary projection.
    max_positions: positions at and above it are only those of rows that are dropped later; they are cut to it.
    """

    def __init__(self, model: Any, decoder: Any, attention: StepAttention, max_positions: int) -> None:
        self._model = model
        self._decoder = decoder
        self._attention = attention
        self._last_position = max_positions - 1
        self._computed = _Computed()
        self._head = None if decoder is model else _replaced(model, _path_of(decoder, model), self._computed)
        self._output: Any = None

    def to(self, device: torch.device, kernels: Kernels) -> TransformersModel:
        """The same model, moved, with the kernels of that device."""
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
        """The model's own code after its layers, so that whatever scales or caps the logits does. Raises NoVocabulary."""
        if self._head is None:
            raise NoVocabulary("this model gives vectors and no tokens")
        self._computed.output = type(self._output)(last_hidden_state=self.states(wanted)[None])
        ids = torch.zeros(1, len(wanted), dtype=torch.int64, device=wanted.device)
        logits: Tensor = self._head(input_ids=ids, use_cache=False).logits[0]
        return logits.float()


def _path_of(module: nn.Module, model: nn.Module) -> list[str]:
    return next(name.split(".") for name, found in model.named_modules() if found is module)
