"""Begun requests of deterministic workers move to a worker with equal numerics if one is ready; other moves are counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.services.gateway.dispatch.test_dispatch_lost import begun, stopped
from tests.services.gateway.dispatch.test_faults import ANSWER, Pending, content_of
from tests.services.gateway.fakes import FakeWorker
from tests.services.gateway.system import System, wait_until


def of(*numerics: str) -> Callable[[list[FakeWorker]], None]:
    """Workers that make no step, with these fingerprints."""

    def configure(workers: list[FakeWorker]) -> None:
        stopped(workers)
        for worker, fingerprint in zip(workers, numerics, strict=True):
            worker.info.numerics = fingerprint

    return configure


def others(system: System) -> float:
    return system.metric("rootstock_gateway_moves_to_other_numerics_total")


@pytest.mark.parametrize("place", [1, 2])
def test_begun_request_moves_to_a_worker_with_equal_numerics(place: int) -> None:
    """The position of the matching worker does not matter."""
    fingerprints = ["b"] * 3
    fingerprints[0] = fingerprints[place] = "a"
    with System(workers=3, configure=of(*fingerprints)) as system:
        pending = [Pending(system, stream=True) for _ in range(3)]
        wait_until(lambda: system.running() == [1, 1, 1], "one on each")
        system.allow(5)
        wait_until(lambda: all(host.servicer.steps_left == 0 for host in system.workers), "five tokens")
        system.call(system.workers[0].stop())
        wait_until(lambda: len(system.workers[place].servicer.submits) == 2, "the move")
        system.allow(None)
        assert [content_of(one.result().text) for one in pending] == [ANSWER] * 3
        assert len(system.workers[3 - place].servicer.submits) == 1 and others(system) == 0


@pytest.mark.parametrize(("fingerprints", "counted"), [(("a", "b"), 1), (("a", ""), 1), (("", "b"), 0), (("a", "a"), 0)])
def test_move_to_other_numerics_is_counted(fingerprints: tuple[str, str], counted: int) -> None:
    """A worker that promises nothing breaks no promise."""
    with System(workers=2, configure=of(*fingerprints)) as system:
        others_before = others(system)
        pending = Pending(system, stream=True)
        first = begun(system, 5)
        was_first = system.workers.index(first) == 0
        system.call(first.stop())
        system.allow(None)
        assert content_of(pending.result().text) == ANSWER
        expected = counted if was_first else int(fingerprints[1] not in ("", fingerprints[0]))
        assert others(system) - others_before == expected


@pytest.mark.parametrize(
    ("fingerprints", "said"), [(("a", "a"), True), (("a", "b"), False), (("a", ""), False), (("", ""), False)]
)
def test_model_is_deterministic_when_all_workers_have_equal_numerics(fingerprints: tuple[str, str], said: bool) -> None:
    with System(workers=2, configure=of(*fingerprints)) as system:
        (model,) = system.get("/server_info").json()["models"]
        assert model["deterministic"] is said
