"""Reads headers and data of safetensors files. A header is checked completely before it is used.

Format: the length of the header (8 bytes, little endian), the header, then the data. The header is a JSON object that has dtype,
shape and data_offsets of each tensor by its name.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rootstock_llm.services.worker.exec.weights.checkpoint import CheckpointError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
METADATA = "__metadata__"
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
ReadAt = Callable[[int, Sequence[memoryview], int], int]  # os.preadv: (descriptor, buffers, offset) -> number of read bytes


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """The range of bytes that one tensor has in a file."""

    path: Path
    name: str
    dtype: str  # name in the file, such as "BF16"
    shape: tuple[int, ...]
    begin: int  # offset of the first byte from the start of the file
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorSpan]:
    """Returns the tensors of the file by name. Raises CheckpointError if the file is unreadable or its header is wrong."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                raise CheckpointError(
                    f"{path} is not a safetensors file: its first bytes are no length of a header within {size} bytes"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    data = LENGTH_BYTES + length
    spans = [_span(path, name, entry, data, size) for name, entry in _entries(path, text) if name != METADATA]
    _check_disjoint(spans)
    return {span.name: span for span in spans}


def _entries(path: Path, text: bytes) -> list[tuple[str, Any]]:
    """Returns the (name, value) pairs of the header's object. Raises CheckpointError if it is no object or has a name twice."""
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header of {path} is not JSON: {error}") from error
    if not isinstance(pairs, _Pairs):
        raise CheckpointError(f"the header of {path} is not a JSON object")
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise CheckpointError(f"the header of {path} has a tensor name twice")
    return list(pairs)


class _Pairs(list[tuple[str, Any]]):
    """The (name, value) pairs of a JSON object. Unlike a dict, the list keeps repeated names."""


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _span(path: Path, name: str, entry: Any, data: int, size: int) -> TensorSpan:
    """Checks a tensor's entry in the header, and returns the tensor's range of bytes. Raises CheckpointError.

    Args:
        entry: value of the tensor's name in the header.
        data: offset of the first byte after the header.
        size: bytes of the file.
    """
    fields = dict(entry) if isinstance(entry, _Pairs) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise CheckpointError(f"the header of {path} has no valid dtype and shape of {name}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)) or offsets[0] > offsets[1]:
        raise CheckpointError(f"the header of {path} has no valid data_offsets of {name}")
    begin, end = offsets
    if data + end > size:
        raise CheckpointError(f"{path} is cut off: it has {size} bytes, but {name} ends at byte {data + end}")
    item = ITEM_BYTES.get(dtype)  # None for an unknown dtype; such tensors are never read, so their sizes are not checked
    if item is not None and math.prod(shape) * item != end - begin:
        raise CheckpointError(
            f"{name} of {path} has {end - begin} bytes, but shape {shape} of {dtype} has {math.prod(shape) * item}"
        )
    return TensorSpan(path, name, dtype, tuple(shape), data + begin, end - begin)


def _check_disjoint(spans: list[TensorSpan]) -> None:
    filled = sorted((span for span in spans if span.num_bytes), key=lambda span: span.begin)
    for before, after in itertools.pairwise(filled):
        if after.begin < before.begin + before.num_bytes:
            raise CheckpointError(f"{before.name} and {after.name} of {after.path} overlap")


class TensorFiles:
    """Reads tensors of a checkpoint's files, which stay open until close(). Any thread may call read()."""

    def __init__(self, paths: Sequence[Path], read_at: ReadAt = os.preadv) -> None:
        self._read_at = read_at
        self._open: dict[Path, int] = {}
        try:
            for path in dict.fromkeys(paths):
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                os.posix_fadvise(self._open[path], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except OSError as error:
            self.close()
            raise CheckpointError(f"cannot open {path}: {error}") from error

    def read(self, into: memoryview, span: TensorSpan, offset: int) -> None:
        """Fills `into` with the bytes of the tensor from byte `offset` of the tensor on. Raises CheckpointError."""
        done = 0
        while done < len(into):
            try:
                count = self._read_at(self._open[span.path], [into[done:]], span.begin + offset + done)
            except OSError as error:
                raise CheckpointError(f"cannot read {span.name} of {span.path}: {error}") from error
            if count <= 0:
                raise CheckpointError(f"{span.path} is truncated: it ends before the last byte of tensor {span.name}")
            done += count

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
