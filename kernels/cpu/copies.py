"""Copies of many pieces of memory by one call, without the interpreter lock."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.functions import INT, INT64, POINTER, bound

SIGNATURES: dict[str, list[type]] = {"copy_pieces": [POINTER] * 3 + [INT64, INT]}


class CpuCopies:
    """Loads the library at path. Raises OSError if it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        self._copy = bound(path, SIGNATURES)["copy_pieces"]

    def copy_pieces(self, to: NDArray[np.int64], source: NDArray[np.int64], sizes: NDArray[np.int64], streamed: bool) -> None:
        """to, source: int64[n], addresses, none of which is checked. sizes: int64[n], bytes. streamed: what is written goes
        past the caches, which keep what they have. Raises ValueError if there are not as many of each."""
        if not to.shape == source.shape == sizes.shape or to.ndim != 1:
            raise ValueError(f"shapes do not fit: {to.shape}, {source.shape}, {sizes.shape}")
        columns = [np.ascontiguousarray(each, dtype=np.int64) for each in (to, source, sizes)]
        self._copy(*(each.ctypes.data for each in columns), len(to), streamed)
