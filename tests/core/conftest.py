"""By day half of the cases that differ alone in the place at which a run of tokens or of a prompt is cut, and in how fast steps
are: tests/core/test_scheduler_properties.py and tests/core/test_resume_properties.py cut anywhere."""

from __future__ import annotations

import pytest

from tests.night import wait_for_night

FOLDER = "tests/core/"
OF_PLACES = (
    "test_a_pool_too_small_for_one_request_aborts_that_request_alone",
    "TestEmbeddings::test_a_vector_comes_of_the_whole_prompt_and_no_token",
    "TestForcedTokens::test_at_",
    "TestForcedTokens::test_under_retraction",
    "TestForcedTokens::test_an_abort_between_them_leaks_nothing",
    "test_each_wanted_token_has_one_however_the_prompt_is_cut",
    "test_displacement_in_the_middle_of_the_prompt_repeats_and_drops_none",
    "test_each_output_token_has_its_own",
    "test_nobody_waits_for_more_than_two_chunks_of_another_key_or_batch",
    "test_always_wrong_keeps_the_plain_rate",
    "test_retraction_repeats_and_drops_none",
    "test_right_ones_are_never_slower_than_none",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wait_for_night(config, items, lambda item: item.nodeid.startswith(FOLDER) and any(name in item.nodeid for name in OF_PLACES))
