"""Headers and data of safetensors files. A header is validated completely before any of it is used.

Format: 8 bytes of header length (little endian), a JSON object of name to dtype, shape and data_offsets, then the data.
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
ReadAt = Callable[[int, Sequence[memoryview], int], int]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The bytes of one tensor in a file."""

    path: Path
    name: str
    # as the file names it, such as "BF16"
    dtype: str
    shape: tuple[int, ...]
    # bytes from the start of the file
    begin: int
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorPlace]:
    """Returns the tensors of the file by name. Raises CheckpointError with the file, and with the tensor if one is at fault."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                raise CheckpointError(f"{path} is no safetensors file: its header does not fit {size} bytes")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    data = LENGTH_BYTES + length
    places = [_place(path, name, entry, data, size) for name, entry in _entries(path, text) if name != METADATA]
    _check_apart(places)
    return {place.name: place for place in places}


def _entries(path: Path, text: bytes) -> list[tuple[str, Any]]:
    """Returns the pairs of the outermost object, in order. A name that is given twice raises CheckpointError."""
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header of {path} is no JSON: {error}") from error
    if not isinstance(pairs, _Pairs):
        raise CheckpointError(f"the header of {path} holds no JSON object")
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise CheckpointError(f"the header of {path} names a tensor twice")
    return list(pairs)


class _Pairs(list[tuple[str, Any]]):
    """The pairs of a JSON object."""


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


# entry: value of the tensor's name in the header. data: index in the file of the first byte after the header. size: of the file.
def _place(path: Path, name: str, entry: Any, data: int, size: int) -> TensorPlace:
    fields = dict(entry) if isinstance(entry, _Pairs) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise CheckpointError(f"the header of {path} has no dtype and shape of {name}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)) or offsets[0] > offsets[1]:
        raise CheckpointError(f"the header of {path} has no data_offsets of {name}")
    begin, end = offsets
    if data + end > size:
        raise CheckpointError(f"{path} is cut off: {name} ends at byte {data + end} of {size}")
    item = ITEM_BYTES.get(dtype)  # other dtypes are never read, so that their sizes are not checked
    if item is not None and math.prod(shape) * item != end - begin:
        raise CheckpointError(f"{name} of {path} has {end - begin} bytes, its shape {shape} of {dtype} another number")
    return TensorPlace(path, name, dtype, tuple(shape), data + begin, end - begin)


def _check_apart(places: list[TensorPlace]) -> None:
    filled = sorted((place for place in places if place.num_bytes), key=lambda place: place.begin)
    for before, after in itertools.pairwise(filled):
        if after.begin < before.begin + before.num_bytes:
            raise CheckpointError(f"{before.name} and {after.name} of {after.path} overlap")


class TensorFiles:
    """The files of a checkpoint, open until close(). Any thread may call read()."""

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

    def read(self, into: memoryview, place: TensorPlace, offset: int) -> None:
        """Fills `into` with bytes of the tensor, beginning at its byte `offset`. Raises CheckpointError."""
        done = 0
        while done < len(into):
            try:
                count = self._read_at(self._open[place.path], [into[done:]], place.begin + offset + done)
            except OSError as error:
                raise CheckpointError(f"cannot read {place.name} of {place.path}: {error}") from error
            if count <= 0:
                raise CheckpointError(f"{place.path} is truncated: it ends before the last byte of tensor {place.name}")
            done += count

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
