"""Begun requests of deterministic workers move to a worker with equal numerics if one is ready; other moves are counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.services.gateway.dispatch.test_dispatch_lost import begun, stopped
from tests.services.gateway.dispatch.test_faults import ANSWER, Pending, content_of
from tests.services.gateway.fakes import FakeWorker
from tests.services.gateway.system import System, wait_until


def with_numerics(*numerics: str) -> Callable[[list[FakeWorker]], None]:
    """Returns a function that gives the workers these fingerprints of their numerics. They compute no step until allow()."""

    def configure(workers: list[FakeWorker]) -> None:
        stopped(workers)
        for worker, fingerprint in zip(workers, numerics, strict=True):
            worker.info.numerics = fingerprint

    return configure


def moves_to_other_numerics(system: System) -> float:
    return system.metric("rootstock_gateway_moves_to_other_numerics_total")


@pytest.mark.parametrize("index", [1, 2])
def test_request_with_output_moves_to_a_worker_with_equal_numerics(index: int) -> None:
    """The worker with equal numerics may have any index."""
    fingerprints = ["b"] * 3
    fingerprints[0] = fingerprints[index] = "a"
    with System(workers=3, configure=with_numerics(*fingerprints)) as system:
        pending = [Pending(system, stream=True) for _ in range(3)]
        wait_until(lambda: system.running() == [1, 1, 1], "a request on each worker")
        system.allow(5)
        wait_until(lambda: all(host.servicer.steps_left == 0 for host in system.workers), "five tokens")
        system.call(system.workers[0].stop())
        wait_until(lambda: len(system.workers[index].servicer.submits) == 2, "the submit to the other worker")
        system.allow(None)
        assert [content_of(one.result().text) for one in pending] == [ANSWER] * 3
        assert len(system.workers[3 - index].servicer.submits) == 1 and moves_to_other_numerics(system) == 0


@pytest.mark.parametrize(("fingerprints", "counted"), [(("a", "b"), 1), (("a", ""), 1), (("", "b"), 0), (("a", "a"), 0)])
def test_move_to_a_worker_with_other_numerics_is_counted(fingerprints: tuple[str, str], counted: int) -> None:
    """A move is not counted if the first worker has no fingerprint, because a worker without one is not deterministic."""
    with System(workers=2, configure=with_numerics(*fingerprints)) as system:
        others_before = moves_to_other_numerics(system)
        pending = Pending(system, stream=True)
        first = begun(system, 5)
        was_first = system.workers.index(first) == 0
        system.call(first.stop())
        system.allow(None)
        assert content_of(pending.result().text) == ANSWER
        expected = counted if was_first else int(fingerprints[1] not in ("", fingerprints[0]))
        assert moves_to_other_numerics(system) - others_before == expected


@pytest.mark.parametrize(
    ("fingerprints", "deterministic"), [(("a", "a"), True), (("a", "b"), False), (("a", ""), False), (("", ""), False)]
)
def test_model_is_deterministic_when_all_workers_have_equal_numerics(fingerprints: tuple[str, str], deterministic: bool) -> None:
    with System(workers=2, configure=with_numerics(*fingerprints)) as system:
        (model,) = system.get("/server_info").json()["models"]
        assert model["deterministic"] is deterministic


def test_model_has_the_quantization_that_its_worker_reports() -> None:
    def configure(workers: list[FakeWorker]) -> None:
        workers[0].info.quantization = "int8, int8 head"

    with System(configure=configure) as system:
        (model,) = system.get("/server_info").json()["models"]
        assert model["quantization"] == system.get("/get_model_info").json()["quantization"] == "int8, int8 head"
