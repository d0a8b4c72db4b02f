"""Replaces the matrix product of Triton's interpreter by a sum in a fixed order, as in tensor cores.

The interpreter multiplies with numpy, which adds the products of an element in an order that depends on the row in the tile.
"""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter add the products one depth after the other."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        sums = d.data.copy()
        for depth in range(a.data.shape[1]):
            sums += a.data[:, depth, None] * b.data[None, depth, :]
        return TensorHandle(sums, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
