"""Carriers of NIXL's: of a fake one over loopback, in each of its manners, and of the library itself where it is installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.worker.exec.peers.nixl_process import Carrier
from tests.night import NIGHTLY

FAKE = Path(__file__).with_name("fake_nixl")
HAS_NIXL = importlib.util.find_spec("nixl") is not None
LIBRARIES: list[Any] = ["fake"]
if HAS_NIXL or NIGHTLY:
    LIBRARIES += [pytest.param("nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="nixl is not installed"))]


class KeptCarrier(Carrier):
    """For several servers and readers, one after another, which do not close it."""

    def close(self) -> None: ...

    def end(self) -> None:
        super().close()

    @property
    def pid(self) -> int:
        return self._process.pid


@contextmanager
def carrier(library: str, manner: str = "") -> Iterator[KeptCarrier]:
    """Raises OSError where it cannot be loaded. manner: see fake_nixl."""
    with pytest.MonkeyPatch.context() as patch:
        if library == "fake":
            patch.setenv("PYTHONPATH", os.pathsep.join((str(FAKE), os.environ.get("PYTHONPATH", ""))))
            patch.setenv("NIXL_FAKE", manner)
        made = KeptCarrier()
    try:
        yield made
    finally:
        made.end()
