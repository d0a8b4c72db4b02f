"""The inputs and outputs of attention modules in a run of the model's own code, for a comparison module by module.

In half precision, rounding adds up from layer to layer, and may make a router choose other experts. Results of a whole model then
differ even if each layer is right. In this comparison, each attention module gets the inputs that it had in the model's own run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Span = tuple[int, int, int]  # (index of the prompt, first position, position after the last one)
HIDDEN_STATES = "hidden_states"  # name of the input in transformers' attention modules


class OwnInputs:
    """Records the inputs and outputs of attention modules for whole prompts, and gives parts of the inputs to later runs."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        """
        Args:
            modules: attention modules by layer_idx.
        """
        self._modules = modules
        self._inputs: dict[int, list[Tensor]] = {number: [] for number in modules}  # [tokens, N] for each prompt
        self._outputs: dict[int, list[Tensor]] = {number: [] for number in modules}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the inputs and outputs of each call of a module while the block runs. A call has one whole prompt."""
        with ExitStack() as hooks:
            for number, module in self._modules.items():

                def record(_: nn.Module, args: Any, kwargs: Any, output: Any, number: int = number) -> None:
                    self._inputs[number].append(_input_of(args, kwargs)[0])
                    self._outputs[number].append(_output_of(output)[0])

                hooks.callback(module.register_forward_hook(record, with_kwargs=True).remove)
            yield

    @contextmanager
    def replaying(self, spans: Sequence[Span]) -> Iterator[list[Tensor]]:
        """Replaces the inputs of each module by the recorded ones while the block runs.

        Args:
            spans: the parts of recorded prompts that the run computes, in the order of its tokens.

        Yields:
            A list that gets, for each call of a module, the relative error of each token's output, float32[tokens].
        """
        errors: list[Tensor] = []
        with ExitStack() as hooks:
            for number, module in self._modules.items():

                def give(_: nn.Module, args: Any, kwargs: Any, number: int = number) -> Any:
                    given = _parts(self._inputs[number], spans)[None]
                    return ((given, *args[1:]), kwargs) if args else (args, {**kwargs, HIDDEN_STATES: given})

                def compare(_: nn.Module, args: Any, kwargs: Any, output: Any, number: int = number) -> None:
                    own, ours = _parts(self._outputs[number], spans).float(), _output_of(output)[0].float()
                    errors.append((ours - own).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-6))

                hooks.callback(module.register_forward_pre_hook(give, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(compare, with_kwargs=True).remove)
            yield errors


def _parts(whole: Sequence[Tensor], spans: Sequence[Span]) -> Tensor:
    return torch.cat([whole[prompt][start:end] for prompt, start, end in spans])


def _input_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    found: Tensor = args[0] if args else kwargs[HIDDEN_STATES]
    return found


def _output_of(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found
