"""Runs several installations in parallel, because they mostly wait. Each test checks the result of its own installation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import TypeVar

import pytest

JOB_S = 850.0  # time limit of a job in seconds; longer than all waits within a job
T = TypeVar("T")


@contextmanager
def side_by_side(jobs: Mapping[str, Callable[[], T]], at_once: int) -> Iterator[Mapping[str, Future[T]]]:
    """Runs jobs in `at_once` threads and yields their futures by name.

    A failed job fails only its own test. On exit, running jobs are completed and waiting jobs are cancelled.
    """
    pool = ThreadPoolExecutor(at_once)
    try:
        yield {name: pool.submit(job) for name, job in jobs.items()}
    finally:
        pool.shutdown(cancel_futures=True)


def result_of(job: Future[T]) -> T:
    """Returns the result of a job or raises its exception. Raises AssertionError if it does not end within JOB_S."""
    try:
        return job.result(JOB_S)
    except FutureTimeout:
        raise AssertionError(f"the job {'still runs' if job.running() else 'has not started'} after {JOB_S:.0f} s") from None


def collected_names(request: pytest.FixtureRequest, test: str) -> list[str]:
    """Returns the `name` parameters of the collected cases of a test in the fixture's module."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    return [str(item.callspec.params["name"]) for item in items if item.originalname == test]
