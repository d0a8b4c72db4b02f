"""Copies pages and units of caches between memories with the C++ library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.kernels.cpu.functions import INT, INT64, POINTER, load_functions


class CpuCopies:
    """Copies many pieces of memory in one call, without the interpreter's lock.

    The constructor raises OSError if the library cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        self._copy = load_functions(path, {"copy_pieces": [POINTER] * 3 + [INT64, INT]})["copy_pieces"]

    def copy_pieces(self, to: NDArray[np.int64], source: NDArray[np.int64], sizes: NDArray[np.int64], streamed: bool) -> None:
        """Copies piece i from source[i] to to[i]. No address is checked.

        Args:
            to: int64[n], addresses.
            source: int64[n], addresses.
            sizes: int64[n], bytes.
            streamed: whether writes bypass the caches, so that the data in the caches stays there.

        Raises:
            ValueError: the arrays have different lengths.
        """
        if not to.shape == source.shape == sizes.shape or to.ndim != 1:
            raise ValueError(f"shapes do not fit: {to.shape}, {source.shape}, {sizes.shape}")
        columns = [np.ascontiguousarray(each, dtype=np.int64) for each in (to, source, sizes)]
        self._copy(*(each.ctypes.data for each in columns), len(to), streamed)
