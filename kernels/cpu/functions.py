"""The functions of the C++ library, bound by name."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

POINTER, INT64, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


def bound(path: Path, signatures: Mapping[str, Sequence[type]]) -> dict[str, Any]:
    """Each function rootstock_NAME with the types of its arguments; none returns anything, and all release the interpreter
    lock. Raises OSError if the library cannot be loaded, AttributeError if it lacks one."""
    library = ctypes.CDLL(str(path))
    functions = {name: getattr(library, f"rootstock_{name}") for name in signatures}
    for name, function in functions.items():
        function.argtypes, function.restype = signatures[name], None
    return functions


def require_contiguous(*tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")


def misfit(*tensors: Tensor) -> ValueError:
    """Made only once a check has failed: describing shapes costs more than a small kernel."""
    return ValueError(f"shapes or dtypes do not fit: {', '.join(f'{tuple(t.shape)} {t.dtype}' for t in tensors)}")
