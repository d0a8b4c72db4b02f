"""What the executor's tests run on: our C++ kernels, and where a test asks for it (`on_both_kernels`) torch's twins too.

tests/kernels has the twins do what the C++ kernels do, operation by operation. So what an executor makes of them is asked of
one; on both are the suites that compare with transformers, and of each other suite the cases that bear on most of it. By day,
where there is no GPU, half of the cases of FlashInfer's double run, of models and encoders that transformers computes, and of
what differs in lengths, seeds, ways of sampling and pooling alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.contracts.sample_ops import SampleKernels
from tests.exec.sampling import sample_kernels
from tests.night import wait_for_night

SLOW = (
    "test_attention_backends.py",
    "test_deterministic.py",
    "test_device_upload.py",
    "test_embedding_pool.py",
    "test_encoder.py",
    "test_executor.py",
    "test_flashinfer_backend.py",
    "test_flashinfer_library.py",
    "test_logprobs.py",
    "test_penalties.py",
    "test_seeds.py",
    "test_speculation.py",
    "test_token_sets.py",
    "test_transformers_model.py",
    "test_weight_stream.py",
)


@pytest.fixture(scope="module")
def kernel_name(request: pytest.FixtureRequest) -> str:
    """Of build_host_executor."""
    name: str = getattr(request, "param", "cpp")
    return name


@pytest.fixture
def kernels(kernel_name: str) -> SampleKernels:
    return sample_kernels(kernel_name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not Path("/dev/nvidiactl").exists():
        wait_for_night(config, items, lambda item: item.path.name in SLOW)
