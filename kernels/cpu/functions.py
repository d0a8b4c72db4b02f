"""Loads functions of the C++ library by their signatures."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

POINTER, INT64, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


def load_functions(path: Path, signatures: Mapping[str, Sequence[type]]) -> dict[str, Any]:
    """Returns the functions rootstock_NAME by NAME. They return nothing and release the interpreter's lock.

    Args:
        path: the shared library.
        signatures: argument types by NAME.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: the library lacks a function.
    """
    library = ctypes.CDLL(str(path))
    functions = {name: getattr(library, f"rootstock_{name}") for name in signatures}
    for name, function in functions.items():
        function.argtypes, function.restype = signatures[name], None
    return functions
