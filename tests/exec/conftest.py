"""What the executor's tests run on: our C++ kernels, and torch's twins."""

from __future__ import annotations

import pytest

from kernels.contracts.sample_ops import SampleKernels
from tests.exec.sampling import sample_kernels


@pytest.fixture(params=["cpp", "torch"], scope="module")
def kernel_name(request: pytest.FixtureRequest) -> str:
    """Of build_host_executor."""
    name: str = request.param
    return name


@pytest.fixture
def kernels(kernel_name: str) -> SampleKernels:
    return sample_kernels(kernel_name)
