"""Installations that wait more than they compute: some at a time, while each test looks at what became of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from typing import TypeVar

import pytest

JOB_S = 850.0  # a job's own waits end before
T = TypeVar("T")


@contextmanager
def side_by_side(jobs: Mapping[str, Callable[[], T]], at_once: int) -> Iterator[Mapping[str, Future[T]]]:
    """One that fails is told by its own test, and the others go on. Those that have begun come to their end; the others are not
    begun any more once nobody looks."""
    pool = ThreadPoolExecutor(at_once)
    try:
        yield {name: pool.submit(job) for name, job in jobs.items()}
    finally:
        pool.shutdown(cancel_futures=True)


def what_became_of(job: Future[T]) -> T:
    """Raises what it has raised, or AssertionError where it has not ended in time."""
    try:
        return job.result(JOB_S)
    except FutureTimeout:
        raise AssertionError(f"it has {'begun' if job.running() else 'not begun'}, and not ended in {JOB_S:.0f} s") from None


def asked_for(request: pytest.FixtureRequest, test: str) -> list[str]:
    """The names with which a test of the fixture's module was collected."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    return [str(item.callspec.params["name"]) for item in items if item.originalname == test]
