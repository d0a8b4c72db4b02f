"""Where there is no GPU, Triton's interpreter runs the kernels: it has to be chosen before triton is imported. By day it and the
C++ kernels are given half of the cases that differ in their parameters alone, the same ones every time; all of them by night, and
on a GPU. By day tests/exec holds the C++ kernels as well: every executor there that says nothing else computes with them."""

from __future__ import annotations

import os

import pytest
import torch

from tests.night import wait_for_night

FOLDER = "tests/kernels/"
SLOW = ("triton", "test_top_n_sigma", "test_cpu_kernels", "test_sampling_twin")
ALL = (  # whose cases have each a body, a rule or a back end to themselves
    "::test_a_greedy_row_is_as_without",
    "::test_a_row_that_is_not_finite_gives_no_token",
    "::test_draw",
    "::test_given_ids_may_be_none_where_all_rows_decode",
    "::test_greedy_cases",
    "::test_known_ids_stand_in_for_relayed_ones",
    "::test_many_tokens_of_one_row",
    "::test_measure_logprobs",
    "::test_paged_attention",
    "::test_rope_write_kv",
    "::test_sigma_is_of_what_the_edits_leave",
)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        wait_for_night(config, items, _slow)


def _slow(item: pytest.Item) -> bool:
    named = any(name in item.nodeid for name in SLOW) and not any(name in item.nodeid for name in ALL)
    return item.nodeid.startswith(FOLDER) and named
