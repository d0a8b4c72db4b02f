"""Selects the kernels of the executor tests: our C++ kernels, and with the mark `on_both_kernels` torch's reference kernels, too.

tests/kernels compares both kernel sets operation by operation, so most executor tests need only one. Suites that
compare with transformers, and the most important cases of all other suites, run with both.
"""

from __future__ import annotations

import pytest

from rootstock_llm.kernels.contracts.sample_ops import SampleKernels
from tests.exec.sampling import sample_kernels


@pytest.fixture(scope="module")
def kernel_name(request: pytest.FixtureRequest) -> str:
    """Returns the value of build_host_executor's parameter `kernels`."""
    name: str = getattr(request, "param", "cpp")
    return name


@pytest.fixture
def kernels(kernel_name: str) -> SampleKernels:
    return sample_kernels(kernel_name)
