"""Installations that wait more than they compute: some at a time, while each test looks at what became of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest

AT_ONCE = 4
T = TypeVar("T")


@contextmanager
def side_by_side(jobs: Mapping[str, Callable[[], T]]) -> Iterator[Mapping[str, Future[T]]]:
    """Those that have begun come to their end; the others are not begun any more once nobody looks."""
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        yield {name: pool.submit(job) for name, job in jobs.items()}
    finally:
        pool.shutdown(cancel_futures=True)


def asked_for(request: pytest.FixtureRequest, test: str) -> list[str]:
    """The names with which a test of the fixture's module was collected."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    return [str(item.callspec.params["name"]) for item in items if item.originalname == test]
