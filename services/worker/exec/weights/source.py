"""Sources of a model's tensors, and the reader through which layers request them.

A layer requests its tensors from a WeightReader by their names in the checkpoint. The reader's source decides what a request
does:

| source | effect of a request |
|---|---|
| CheckpointSource | reads the tensor from the files |
| Allocated | allocates an undefined tensor and records its names; on the device "meta", the tensor takes no memory |
| Filled | returns the tensor that Allocated made for the same request, filled by the weight stream |
| RandomSource | draws random values |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.coded_weight import Matrix
from rootstock_llm.kernels.contracts.ops import Kernels, Matrices
from rootstock_llm.kernels.reference import layers as reference
from rootstock_llm.services.worker.exec.weights.checkpoint import Checkpoint, CheckpointError
from rootstock_llm.services.worker.exec.weights.quantization import AUTO, UNQUANTIZED, Part, Quantization, StoredTensor

HOST = torch.device("cpu")
STD = 0.02  # standard deviation of random weights; most published models are initialized with it


class WeightSource(Protocol):
    """Provides tensors by their names in the checkpoint, in the model's dtype and on its device."""

    @property
    def dtype(self) -> torch.dtype:
        """Model dtype."""

    def view(self, part: Part) -> Tensor:
        """Returns a contiguous tensor that may share memory with the source. Raises CheckpointError."""

    def stacked(self, parts: Sequence[Part]) -> Tensor:
        """Returns the parts concatenated along the first dimension, in new memory. Raises CheckpointError."""

    def matrix(self, parts: Sequence[Part], is_head: bool) -> Matrix:
        """Returns the weight of a linear layer: the output channels of all parts, as elements or as codes.

        Args:
            is_head: whether the weight is the vocabulary projection.

        Raises:
            CheckpointError: the checkpoint lacks a tensor, or the source's Quantization raises it.
        """

    def matrices(self, groups: Sequence[Sequence[Part]]) -> Matrices:
        """Returns for each group its concatenated parts, as one matrix. All groups have the same shapes.

        A source of files reads a group when the result is indexed. Raises CheckpointError, also when the result is indexed.
        """

    def has_codes(self, part: Part) -> bool:
        """Whether the checkpoint has codes of a tensor instead of its elements. Raises CheckpointError."""

    def fused(self, part: Part) -> Matrices:
        """Returns the matrices [N, K] of a tensor [E, N, K], as elements or as codes.

        Raises CheckpointError, also when the result is indexed.
        """

    def in_form(self, name: str, matrices: Matrices) -> Matrices:
        """Returns matrices of elements in the form that kernels pack, see Quantization.applied().

        Args:
            name: name of the matrices in messages.
        """


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads the tensors whose names in the checkpoint begin with a prefix, such as those of one layer."""

    source: WeightSource
    kernels: Kernels  # kernels that pack the weights, and will compute with them
    prefix: str = ""  # empty, or ends with a dot

    def at(self, name: str) -> WeightReader:
        """Returns the reader of a submodule, such as "self_attn"."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.source.stacked([(self.prefix + name, shape)])

    def view(self, name: str, *shape: int) -> Tensor:
        """Returns a tensor that may share memory with the source, for kernels that pack a copy."""
        return self.source.view((self.prefix + name, shape))

    def matrix(self, parts: Sequence[tuple[str, int]], in_features: int, bias: bool) -> tuple[Matrix, Tensor | None]:
        """Returns projections of one input as one matrix [N, in_features], and their biases [N].

        Weights that may have codes are requested by this method, the vocabulary projection by vocabulary(), and experts by
        matrices() or fused(). Routers and all other tensors are requested by tensor().

        Args:
            parts: names of the projections and their numbers of output features.
            in_features: size of the input.
            bias: whether the projections have biases. If not, None is returned instead of biases.
        """
        names = [(self.prefix + name, size) for name, size in parts]
        weight = self.source.matrix([(f"{name}.weight", (size, in_features)) for name, size in names], is_head=False)
        stacked = self.source.stacked([(f"{name}.bias", (size,)) for name, size in names]) if bias else None
        assert len(weight) == sum(size for _, size in parts), "the parts lie one after the other, without gaps"
        assert stacked is None or len(stacked) == len(weight), "each output feature has a bias"
        return weight, stacked

    def vocabulary(self, vocab_size: int, hidden_size: int) -> Matrix:
        """Returns the vocabulary projection [vocab_size, hidden_size]."""
        return self.source.matrix([(f"{self.prefix}weight", (vocab_size, hidden_size))], is_head=True)

    def matrices(self, groups: Sequence[Sequence[tuple[str, int]]], in_features: int) -> Matrices:
        """Returns for each group its projections of one input as one matrix, see WeightSource.matrices().

        Args:
            groups: names of the projections and their numbers of output features.
            in_features: size of the input.
        """
        prefix = self.prefix
        parts = [[(f"{prefix}{name}.weight", (size, in_features)) for name, size in group] for group in groups]
        return self.source.matrices(parts)

    def fused(self, name: str, *shape: int) -> Matrices:
        return self.source.fused((self.prefix + name, shape))

    def has_codes(self, name: str, *shape: int) -> bool:
        """Whether the checkpoint has codes of a tensor instead of its elements. Raises CheckpointError."""
        return self.source.has_codes((self.prefix + name, shape))

    def in_form(self, name: str, matrices: Matrices) -> Matrices:
        return self.source.in_form(self.prefix + name, matrices)


def in_one(stacked: Callable[[Sequence[Part]], Tensor], groups: Sequence[Sequence[Part]]) -> Tensor:
    """Returns the parts of all groups as one tensor, [groups, ...], a view of the result of `stacked`."""
    both = stacked([part for group in groups for part in group])
    return both.view(len(groups), -1, *both.shape[1:])


class LazyMatrices:
    """Matrices that a function creates when they are indexed."""

    def __init__(self, count: int, made: Callable[[int], Matrix]) -> None:
        self._count, self._made = count, made

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int, /) -> Matrix:
        return self._made(index)


def in_form(name: str, matrices: Matrices, quantization: Quantization) -> Matrices:
    """Implements WeightSource.in_form()."""
    if quantization.options.weights == AUTO:
        return matrices
    return LazyMatrices(len(matrices), lambda index: quantization.applied(name, matrices[index], is_head=False))


def decoded(part: Part, tensors: Sequence[Tensor], quantization: Quantization, dtype: torch.dtype) -> Matrices:
    """Returns the matrices of a tensor [E, N, K] with codes.

    Args:
        tensors: the tensors of its codes, with the first dimension E.
        dtype: dtype of a matrix whose codes are converted to elements.
    """
    name, (count, *shape) = part
    of_one = [(name, tuple(shape))]
    return LazyMatrices(count, lambda index: quantization.decoded(of_one, [[tensor[index] for tensor in tensors]], dtype))


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """Reads a checkpoint's files."""

    checkpoint: Checkpoint
    dtype: torch.dtype  # dtype to which tensors are converted
    device: torch.device = HOST  # device of the returned tensors
    on_read: Callable[[int], None] = lambda _: None  # called with the size in bytes of each tensor after its conversion
    quantization: Quantization = UNQUANTIZED
    copies: bool = False  # whether no tensor may share memory with a file, because the kernels keep the tensors

    def _tensor(self, tensor: StoredTensor) -> Tensor:
        """Returns a contiguous tensor. It may share memory with the file if `copies` is False."""
        found = self.checkpoint.tensor(tensor.name, tensor.shape, tensor.dtype or self.dtype, exact=not tensor.is_float)
        self.on_read(found.nbytes)
        return (found.clone() if self.copies else found).to(self.device)

    def view(self, part: Part) -> Tensor:
        return self._tensor(StoredTensor(*part))

    def stacked(self, parts: Sequence[Part]) -> Tensor:
        return torch.cat([self._tensor(StoredTensor(*part)) for part in parts])

    def matrix(self, parts: Sequence[Part], is_head: bool) -> Matrix:
        stored = [self.quantization.tensors(part) or (StoredTensor(*part),) for part in parts]
        tensors = [[self._tensor(each) for each in of_part] for of_part in stored]
        matrix = self.quantization.decoded(parts, tensors, self.dtype)
        applied = self.quantization.applied(parts[0][0], matrix, is_head)
        # A matrix of one tensor may share memory with the file. The memory's address changes the bits of torch's products.
        return applied.clone() if applied is tensors[0][0] else applied

    def matrices(self, groups: Sequence[Sequence[Part]]) -> Matrices:
        return LazyMatrices(len(groups), lambda index: self.matrix(groups[index], is_head=False))

    def has_codes(self, part: Part) -> bool:
        return bool(self.quantization.tensors(part))

    def fused(self, part: Part) -> Matrices:
        if stored := self.quantization.tensors(part):
            return decoded(part, [self._tensor(each) for each in stored], self.quantization, self.dtype)
        return self.in_form(part[0], self.view(part))

    def in_form(self, name: str, matrices: Matrices) -> Matrices:
        return in_form(name, matrices, self.quantization)


@dataclass(frozen=True, slots=True)
class Placement:
    """The memory that Allocated has assigned to one tensor of the checkpoint."""

    name: str  # name in the checkpoint
    shape: tuple[int, ...]
    into: Tensor  # flat and contiguous part of an allocated tensor
    dtype: torch.dtype | None = None  # see StoredTensor


class Allocated:
    """Allocates tensors with undefined content, and records the part of them that each tensor of the checkpoint must fill."""

    def __init__(self, dtype: torch.dtype, device: torch.device, quantization: Quantization = UNQUANTIZED) -> None:
        self.dtype, self._device, self._quantization = dtype, device, quantization
        self.placements: list[Placement] = []
        self.tensors: dict[str, Tensor] = {}  # allocated tensors by the name of their first part

    def view(self, part: Part) -> Tensor:
        return self.stacked([part])

    def stacked(self, parts: Sequence[Part]) -> Tensor:
        """Allocates the parts as one tensor. Raises CheckpointError if the device has too little memory."""
        return self._allocated(parts, None)

    def matrix(self, parts: Sequence[Part], is_head: bool) -> Matrix:
        """Allocates the parts as one tensor, or all tensors of codes.

        Returns:
            The allocated tensor. If there are codes, a tensor of the matrix's shape without memory.
        """
        stored = [self._quantization.tensors(part) for part in parts]
        if not any(stored):
            return self.stacked(parts)
        for part, of_part in zip(parts, stored, strict=True):
            for each in of_part or (StoredTensor(*part),):
                self._allocated([(each.name, each.shape)], each.dtype)
        shape = (sum(shape[0] for _, shape in parts), *parts[0][1][1:])
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def _allocated(self, parts: Sequence[Part], dtype: torch.dtype | None) -> Tensor:
        # A single part may be a scalar, such as a scale.
        shape = parts[0][1] if len(parts) == 1 else (sum(shape[0] for _, shape in parts), *parts[0][1][1:])
        try:
            fused = torch.empty(shape, dtype=dtype or self.dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            allocated = sum(tensor.nbytes for tensor in self.tensors.values()) >> 20
            message = f"no memory on {self._device} for the weights from {parts[0][0]} on, after {allocated} MiB of other weights"
            raise CheckpointError(message) from error
        self._record(parts, fused, dtype)
        return fused

    def matrices(self, groups: Sequence[Sequence[Part]]) -> Matrices:
        if any(self.has_codes(part) for group in groups for part in group):
            return [self.matrix(group, is_head=False) for group in groups]
        return in_one(self.stacked, groups)

    def has_codes(self, part: Part) -> bool:
        return bool(self._quantization.tensors(part))

    def fused(self, part: Part) -> Matrices:
        """Allocates the tensor, or all tensors of its codes. Returns matrices without memory if there are codes."""
        stored = self._quantization.tensors(part)
        if not stored:
            return self.view(part)
        for each in stored:
            self._allocated([(each.name, each.shape)], each.dtype)
        return [torch.empty(part[1][1:], dtype=self.dtype, device="meta") for _ in range(part[1][0])]

    def in_form(self, name: str, matrices: Matrices) -> Matrices:
        return matrices

    def _record(self, parts: Sequence[Part], fused: Tensor, dtype: torch.dtype | None) -> None:
        self.tensors[parts[0][0]] = fused
        flat, first = fused.view(-1), 0
        for name, shape in parts:
            count = math.prod(shape)
            self.placements.append(Placement(name, shape, flat[first : first + count], dtype))
            first += count


def listed_tensors(
    read: Callable[[WeightReader], object], dtype: torch.dtype, quantization: Quantization = UNQUANTIZED
) -> list[Placement]:
    """Returns the names and shapes of the tensors that `read` requests. The field `into` of each placement takes no memory."""
    source = Allocated(dtype, torch.device("meta"), quantization)
    read(WeightReader(source, reference))
    return source.placements


class Filled:
    """Returns each tensor of an Allocated source once, and drops its reference to the tensor.

    If kernels pack a copy of each tensor, each original is therefore freed after its copy, and not only after the last copy.
    """

    def __init__(self, tensors: dict[str, Tensor], dtype: torch.dtype, quantization: Quantization = UNQUANTIZED) -> None:
        self._tensors, self.dtype, self._quantization = tensors, dtype, quantization

    def view(self, part: Part) -> Tensor:
        return self.stacked([part])

    def stacked(self, parts: Sequence[Part]) -> Tensor:
        return self._tensors.pop(parts[0][0])

    def matrix(self, parts: Sequence[Part], is_head: bool) -> Matrix:
        stored = [self._quantization.tensors(part) for part in parts]
        matrix: Matrix
        if any(stored):
            names = [of_part or (StoredTensor(*part),) for part, of_part in zip(parts, stored, strict=True)]
            tensors = [[self._tensors.pop(each.name) for each in of_part] for of_part in names]
            matrix = self._quantization.decoded(parts, tensors, self.dtype)
        else:
            matrix = self.stacked(parts)
        return self._quantization.applied(parts[0][0], matrix, is_head)

    def matrices(self, groups: Sequence[Sequence[Part]]) -> Matrices:
        if any(self.has_codes(part) for group in groups for part in group):
            return LazyMatrices(len(groups), lambda index: self.matrix(groups[index], is_head=False))
        return self.in_form(groups[0][0][0], in_one(self.stacked, groups))

    def has_codes(self, part: Part) -> bool:
        return bool(self._quantization.tensors(part))

    def fused(self, part: Part) -> Matrices:
        if stored := self._quantization.tensors(part):
            return decoded(part, [self._tensors.pop(each.name) for each in stored], self._quantization, self.dtype)
        return self.in_form(part[0], self.view(part))

    def in_form(self, name: str, matrices: Matrices) -> Matrices:
        return in_form(name, matrices, self._quantization)


class RandomSource:
    """Draws random weights: norms are 1, and all other values are normal with mean 0 and standard deviation STD.

    The same seed gives the same values on the same device.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str, seed: int, quantization: Quantization = UNQUANTIZED
    ) -> None:
        self.dtype, self._device, self._quantization = dtype, torch.device(device), quantization
        self._generator = torch.Generator(self._device).manual_seed(seed)

    def view(self, part: Part) -> Tensor:
        return self.stacked([part])

    def stacked(self, parts: Sequence[Part]) -> Tensor:
        name, shape = parts[0]
        rows = sum(part[0] for _, part in parts)
        values = torch.empty((rows, *shape[1:]), dtype=self.dtype, device=self._device)
        if name.endswith("norm.weight"):
            return values.fill_(1.0)
        return values.normal_(0.0, STD, generator=self._generator)

    def matrix(self, parts: Sequence[Part], is_head: bool) -> Matrix:
        return self._quantization.applied(parts[0][0], self.stacked(parts), is_head)

    def matrices(self, groups: Sequence[Sequence[Part]]) -> Matrices:
        return self.in_form(groups[0][0][0], in_one(self.stacked, groups))

    def has_codes(self, part: Part) -> bool:
        return False

    def fused(self, part: Part) -> Matrices:
        return self.in_form(part[0], self.view(part))

    def in_form(self, name: str, matrices: Matrices) -> Matrices:
        return in_form(name, matrices, self._quantization)
