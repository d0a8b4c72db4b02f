"""The file tier on a FUSE file system that becomes slow, full or read-only while a worker runs: requests get equal results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.exec.remote_kv.served_reservations import until
from tests.exec.tier_prompts import POOL_PAGES, options, prompt
from tests.exec.tiered import Served, build
from tests.exec.tiny_models import TinyModel

HAS_FUSE = bool(find_spec("mfusepy") and shutil.which("fusermount3")) and os.access("/dev/fuse", os.R_OK | os.W_OK)
READ_S, PROMPTS, CONTEXT = 2.0, 4, 1024


class Mounted:
    """A mounted file system whose faults the test selects."""

    def __init__(self, base: Path) -> None:
        self.folder, self._orders = base / "mounted", base / "orders.json"
        (base / "source").mkdir()
        self.folder.mkdir()
        self.order()
        arguments = [str(base / "source"), str(self.folder), str(self._orders)]
        self._child = subprocess.Popen([sys.executable, "-m", "tests.exec.tiers.sick_file_system", *arguments])

    def wait(self) -> None:
        """Waits until the file system is mounted."""
        until(lambda: self._child.poll() is not None or self.folder.is_mount())
        assert self._child.poll() is None, "the file system must be mounted"

    def order(self, **orders: float) -> None:
        """Replaces the faults, see sick_file_system.py."""
        new = self._orders.with_suffix(".new")
        new.write_text(json.dumps(orders))
        new.rename(self._orders)

    def close(self) -> None:
        subprocess.run(["fusermount3", "-u", "-z", str(self.folder)], check=False)  # there may be no mount
        self._child.kill()
        self._child.wait()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Mounted]:
    mounted = Mounted(tmp_path)
    try:
        mounted.wait()
        yield mounted
    finally:
        mounted.close()


@pytest.mark.skipif(not HAS_FUSE, reason="FUSE file systems cannot be mounted on this machine")
def test_requests_finish_with_the_same_bits_when_the_disk_is_slow_or_full_or_read_only(tmp_path: Path, disk: Mounted) -> None:
    folder = tmp_path / "model"
    TinyModel("Qwen3", {"head_dim": 64, "num_attention_heads": 8, "hidden_size": 128}).build(folder)
    plain = Served(*build(folder, 200, None, context_len=CONTEXT))
    expected = [plain.ask(prompt(number), seed=number).bits for number in range(PROMPTS)]
    plain.close()

    for sickness in ("full", "read_only"):
        served = Served(*build(folder, POOL_PAGES, options(disk.folder / sickness), context_len=CONTEXT))
        for number in range(PROMPTS):
            assert served.ask(prompt(number), seed=number).bits == expected[number]
            if number == PROMPTS // 2:
                disk.order(**{sickness: True})
        stats = served.core.stats()
        assert stats.storage_pages > 0 and stats.unstored_pages_total > 0
        assert served.ask(prompt(0), seed=0).bits == expected[0]
        served.close()
        disk.order()

    storage = options(disk.folder / "slow")
    served = Served(*build(folder, POOL_PAGES, storage, context_len=CONTEXT))
    for number in range(PROMPTS):
        served.ask(prompt(number), seed=number)
    served.close()
    served = Served(*build(folder, POOL_PAGES, storage, context_len=CONTEXT), prefers_reading=False)
    disk.order(read_s=READ_S)
    assert served.core.tiers is not None
    lanes, most = served.core.tiers._lanes, 0
    handle = served.submit(prompt(0), seed=0)
    while served.answers[handle].finish is None:
        served.turn(wait_s=0.05)
        most = max(most, len(lanes))
    assert served.answers[handle].bits == expected[0]
    assert len(lanes) == most > 0, "the request finished while all its reads were still running"
    stats = served.core.stats()
    assert stats.given_up_operations_total == 1 and stats.failed_operations_total == 0
    for number in range(PROMPTS):
        answer = served.ask(prompt(number), seed=number)
        assert answer.bits == expected[number]
    assert served.core.stats().given_up_operations_total == 1, "after one slow read, later requests do not read"
    assert served.core.stats().recomputed_pages_total > stats.recomputed_pages_total
    served.close()
