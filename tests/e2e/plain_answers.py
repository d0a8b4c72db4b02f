"""Responses of a deterministic system to mixed requests. Several test files require bitwise equal responses of other systems.

The first pytest process that needs the responses computes them and writes a file, which the other processes read.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.mixed_asks import Ask, Essence, ask_all, essence
from tests.e2e.system import System


class PlainAnswers:
    """Reads the responses from a folder that all pytest processes of the run share. Computes and writes missing responses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, asks: Sequence[Ask], **settings: Any) -> list[Essence]:
        """Returns the responses to the requests, in their order. `settings` are further settings of the system."""
        asked = json.dumps([[asdict(ask) for ask in asks], settings])
        kept = self._folder / f"plain-{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                with System(kept.with_suffix(""), worker_flags="--deterministic", **settings) as system:
                    essences = [asdict(essence(answers)) for answers in asyncio.run(ask_all(system, list(asks), 4))]
                kept.write_text(json.dumps(essences))
        return [Essence(**each) for each in json.loads(kept.read_text())]


def folder_of_the_run(factory: pytest.TempPathFactory) -> Path:
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
