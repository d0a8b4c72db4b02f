"""What the executor's tests run on: our C++ kernels, and where a test asks for it (`on_both_kernels`) torch's twins too.

tests/kernels has the twins do what the C++ kernels do, operation by operation. So what an executor makes of them is asked of
one; on both are the suites that compare with transformers, and of each other suite the cases that bear on most of it.
"""

from __future__ import annotations

import pytest

from kernels.contracts.sample_ops import SampleKernels
from tests.exec.sampling import sample_kernels


@pytest.fixture(scope="module")
def kernel_name(request: pytest.FixtureRequest) -> str:
    """Of build_host_executor."""
    name: str = getattr(request, "param", "cpp")
    return name


@pytest.fixture
def kernels(kernel_name: str) -> SampleKernels:
    return sample_kernels(kernel_name)
