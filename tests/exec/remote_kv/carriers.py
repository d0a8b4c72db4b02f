"""Carriers (processes that read remote memory through NIXL) for tests.

The library is a fake NIXL over loopback with selectable faults, or the real NIXL if it is installed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rootstock_llm.services.worker.exec.remote_kv.nixl_process import Carrier
from tests.night import NIGHTLY

FAKE = Path(__file__).with_name("fake_nixl")
HAS_NIXL = importlib.util.find_spec("nixl") is not None
LIBRARIES: list[Any] = ["fake"]
if HAS_NIXL or NIGHTLY:
    LIBRARIES += [pytest.param("nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="nixl is not installed"))]


class KeptCarrier(Carrier):
    """A carrier that several servers and readers use one after another. It runs until end(), and close() has no effect."""

    def close(self) -> None: ...

    def end(self) -> None:
        super().close()

    @property
    def pid(self) -> int:
        return self._process.pid


@contextmanager
def carrier(library: str, fault: str = "") -> Iterator[KeptCarrier]:
    """Yields a carrier.

    Args:
        library: "fake" or "nixl".
        fault: fault of the fake library, see fake_nixl.

    Raises:
        OSError: the library cannot be loaded.
    """
    with pytest.MonkeyPatch.context() as patch:
        if library == "fake":
            patch.setenv("PYTHONPATH", os.pathsep.join((str(FAKE), os.environ.get("PYTHONPATH", ""))))
            patch.setenv("NIXL_FAKE", fault)
        made = KeptCarrier()
    try:
        yield made
    finally:
        made.end()
