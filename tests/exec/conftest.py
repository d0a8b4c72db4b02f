"""Selects the kernels of the executor tests: our C++ kernels, and with the mark `on_both_kernels` also torch's reference kernels.

tests/kernels compares both kernel sets operation by operation, so most executor tests run with one. Files that compare with
transformers, and the most important tests of other files, run with both.
"""

from __future__ import annotations

import pytest

from rootstock_llm.kernels.contracts.sample_ops import SampleKernels
from tests.exec.sampling import sample_kernels


@pytest.fixture(scope="module")
def kernel_name(request: pytest.FixtureRequest) -> str:
    """Value of build_host_executor's parameter `kernels`: "cpp" or "torch"."""
    name: str = getattr(request, "param", "cpp")
    return name


@pytest.fixture
def kernels(kernel_name: str) -> SampleKernels:
    return sample_kernels(kernel_name)
