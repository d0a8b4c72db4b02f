"""Tests of Pace: the Retry-After header of a 503 follows the recent rate of completions."""

from __future__ import annotations

import pytest

from rootstock_llm.services.gateway.dispatch.waiting import LONGEST_S, WINDOW_S, Pace


class Queue:
    """A Pace with a virtual clock and a given number of waiting requests."""

    def __init__(self, waiting: int) -> None:
        self.now, self.waiting = 1000.0, waiting
        self.pace = Pace(lambda: self.waiting, 2, lambda: self.now)

    def serve(self, per_s: float, seconds: float) -> None:
        for _ in range(int(per_s * seconds)):
            self.now += 1 / per_s
            self.pace.completed()


@pytest.mark.parametrize(
    ("waiting", "per_s", "expected"),
    [(0, 10, 2), (5, 10, 2), (100, 10, 10), (10_000, 10, LONGEST_S), (10, 1, 10)],
)
def test_retry_after_follows_the_recent_rate_of_the_queue(waiting: int, per_s: float, expected: int) -> None:
    queue = Queue(waiting)
    queue.serve(per_s, 4 * WINDOW_S)
    assert expected - 1 <= queue.pace.retry_after_s() <= expected + 1


def test_retry_after_is_about_the_measured_window_when_no_request_completes() -> None:
    queue = Queue(1)
    queue.serve(10, 60)
    queue.now += 10 * WINDOW_S
    assert WINDOW_S <= queue.pace.retry_after_s() <= 2 * WINDOW_S


def test_retry_after_is_the_minimum_when_the_queue_is_empty() -> None:
    queue = Queue(1000)
    queue.serve(1, 60)
    queue.waiting = 0
    assert queue.pace.retry_after_s() == 2
