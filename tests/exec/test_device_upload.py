"""The upload buffers: the alignment of their sections, and the reuse of a buffer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rootstock_llm.services.worker.exec.streams.copies import ALIGNED, DEPTH, UploadRing
from rootstock_llm.services.worker.exec.streams.cuda_streams import Streams
from rootstock_llm.services.worker.exec.streams.host_streams import HostStreams
from tests.exec.device_doubles import InlineStreams


class Reached:
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def sections(*sizes: int) -> list[tuple[str, np.ndarray]]:
    return [(f"part {number}", np.arange(size, dtype=np.int32) + number) for number, size in enumerate(sizes)]


@pytest.fixture(params=["apart", "shared"])
def streams(request: pytest.FixtureRequest) -> Iterator[Streams]:
    """Streams whose host and device memory is separate, as on a GPU, or shared, as on a CPU."""
    made: Streams = InlineStreams() if request.param == "apart" else HostStreams(1)
    yield made
    made.close()


@pytest.mark.by_day(one_in=4, seed=86)
@pytest.mark.parametrize("sizes", [(1, 2, 3, 4, 5), (0, 7, 0), (), (500, 1, 500)])
def test_upload_ring_aligns_the_sections_of_a_buffer(streams: Streams, sizes: tuple[int, ...]) -> None:
    ring = UploadRing(streams, 64)
    for _ in range(2 * DEPTH):
        sent = sections(*sizes)
        views = ring.send(sent)
        ring.release(Reached())
        assert {name: view.tolist() for name, view in views.items()} == {name: part.tolist() for name, part in sent}
        assert all(view.data_ptr() % (4 * ALIGNED) == 0 for view in views.values() if len(view))


@pytest.mark.by_day(one_in=2)
def test_upload_ring_converts_other_dtypes(streams: Streams) -> None:
    ring = UploadRing(streams, 16)
    views = ring.send([("f", np.float32([1.5])), ("u", np.uint32([1 << 31])), ("l", np.int64([-7])), ("s", np.int16([5]))])
    assert np.frombuffer(views["f"].numpy(), np.float32) == [1.5]
    assert [views[name].item() for name in "uls"] == [-(1 << 31), -7, 5]


def test_upload_ring_waits_for_the_last_use_of_a_buffer() -> None:
    ring, marks = UploadRing(InlineStreams(), 16), [Reached() for _ in range(DEPTH + 1)]
    for mark in marks:
        ring.send(sections(3))
        ring.release(mark)
    assert [mark.waits for mark in marks] == [1, *[0] * DEPTH]


def test_upload_ring_refuses_to_send_when_no_buffer_was_released() -> None:
    ring = UploadRing(InlineStreams(), 16)
    for _ in range(DEPTH):
        ring.send(sections(3))
    with pytest.raises(RuntimeError, match="without a release"):
        ring.send(sections(3))
