"""What the executor's tests run on: our C++ kernels, and where a test asks for it (`on_both_kernels`) torch's twins too.

tests/kernels has the twins do what the C++ kernels do, operation by operation. So what an executor makes of them is asked of
one; on both are the suites that compare with transformers, and of each other suite the cases that bear on most of it. By day,
where there is no GPU, half of the cases of FlashInfer's double run, of models and encoders that transformers computes, of what
guesses, and of what differs in lengths, seeds, ways of sampling and pooling alone; of the longest of them, what NIGHT leaves.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.contracts.sample_ops import SampleKernels
from tests.exec.sampling import sample_kernels
from tests.night import NIGHTLY, wait_for_night

HERE = Path(__file__).parent
SLOW = (
    "test_attention_backends.py",
    "test_deterministic.py",
    "test_device_families.py",
    "test_device_upload.py",
    "test_embedding_pool.py",
    "test_encoder.py",
    "test_executor.py",
    "test_flashinfer_backend.py",
    "test_flashinfer_library.py",
    "test_logprobs.py",
    "test_model_drafters.py",
    "test_penalties.py",
    "test_resume.py",
    "test_sampler.py",
    "test_seeds.py",
    "test_speculation.py",
    "test_token_sets.py",
    "test_transformers_model.py",
    "test_weight_stream.py",
)
PARITY = ("test_parity.py", "test_scheduler_parity.py")  # of which a quarter of the cases on torch's twins
ALL = (  # whose cases have each a rule to themselves
    "::test_a_model_without_a_head_says_so",
    "::test_a_vector_that_is_not_finite_faults_its_row_alone",
    "::test_an_encoder_takes_as_many_tokens_as_it_has_positions",
    "::test_cut_and_normalisation",
    "::test_dry_examples",
    "::test_edited_greedy",
    "::test_guesses_are_those_of_the_whole_text_at_once",
    "::test_loading_errors",
    "::test_other_kinds_of_pooling_are_refused",
    "::test_refusals",
    "::test_what_the_scheduler_must_know",
    "::test_wrong_modules",
)
NIGHT = (  # beside cases by day of the same type, of the same drafter, and of the same way of sampling
    "test_model_drafters.py::test_one_string_of_ids_and_logprob_bits[itself-greedy]",
    "test_model_drafters.py::test_one_string_of_ids_and_logprob_bits[mtp-greedy]",
    "test_model_drafters.py::test_one_string_of_ids_and_logprob_bits[mtp-top-p]",
    "test_speculation.py::test_one_string_of_ids_and_logprob_bits_whatever_is_guessed[bfloat16-greedy-all wrong]",
    "test_speculation.py::test_one_string_of_ids_and_logprob_bits_whatever_is_guessed[bfloat16-top-p-all wrong]",
    "test_speculation.py::test_one_string_of_ids_and_logprob_bits_whatever_is_guessed[bfloat16-top-p-half right]",
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
        wait_for_night(config, items, _slow)
        wait_for_night(config, items, _on_twins, one_in=4)
        if not NIGHTLY:
            by_night = [item for item in items if item.path.parent == HERE and item.nodeid.endswith(NIGHT)]
            config.hook.pytest_deselected(items=by_night)
            items[:] = [item for item in items if item not in by_night]


def _slow(item: pytest.Item) -> bool:
    if item.path.parent != HERE:
        return False
    return item.path.name in SLOW and not any(name in item.nodeid for name in ALL)


def _on_twins(item: pytest.Item) -> bool:
    kinds = item.nodeid.rpartition("[")[2].removesuffix("]").split("-")
    return item.path.parent == HERE and item.path.name in PARITY and "torch" in kinds
