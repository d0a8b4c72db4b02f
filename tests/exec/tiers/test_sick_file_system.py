"""The file tier on a real file system, by FUSE, that is slow, full or read-only while a worker runs: answers are what they would
be, and nobody waits for it."""

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

from tests.exec.peers.rooms import until
from tests.exec.test_tiers import POOL_PAGES, options, prompt
from tests.exec.tiered import Served, build
from tests.exec.tiny_models import TinyModel

HAS_FUSE = bool(find_spec("mfusepy") and shutil.which("fusermount3")) and os.access("/dev/fuse", os.R_OK | os.W_OK)
READ_S, PROMPTS, CONTEXT = 2.0, 4, 1024


class Mounted:
    """A file system at `folder`, which does as it is told."""

    def __init__(self, base: Path) -> None:
        self.folder, self._orders = base / "mounted", base / "orders.json"
        (base / "source").mkdir()
        self.folder.mkdir()
        self.order()
        arguments = [str(base / "source"), str(self.folder), str(self._orders)]
        self._child = subprocess.Popen([sys.executable, "-m", "tests.exec.tiers.sick_file_system", *arguments])
        until(self.folder.is_mount)

    def order(self, **orders: float) -> None:
        new = self._orders.with_suffix(".new")
        new.write_text(json.dumps(orders))
        new.rename(self._orders)

    def close(self) -> None:
        self.order()
        subprocess.run(["fusermount3", "-u", "-z", str(self.folder)], check=True)
        self._child.wait(60)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Mounted]:
    mounted = Mounted(tmp_path)
    yield mounted
    mounted.close()


@pytest.mark.skipif(not HAS_FUSE, reason="no file system by FUSE can be mounted here")
def test_a_disk_that_is_slow_full_or_read_only_costs_nobody_an_answer(tmp_path: Path, disk: Mounted) -> None:
    folder = tmp_path / "model"
    TinyModel("Qwen3", {"head_dim": 64, "num_attention_heads": 8, "hidden_size": 128}).build(folder)
    storage = options(disk.folder / "pages")
    plain = Served(*build(folder, 200, None, context_len=CONTEXT))
    expected = [plain.ask(prompt(number), seed=number).bits for number in range(PROMPTS)]
    plain.close()

    served = Served(*build(folder, POOL_PAGES, storage, context_len=CONTEXT))
    for number, orders in enumerate(({}, {}, {"full": True}, {"read_only": True})):
        disk.order(**orders)
        assert served.ask(prompt(number), seed=number).bits == expected[number]
    assert served.ask(prompt(0), seed=0).bits == expected[0]
    disk.order()
    stored = served.core.stats().storage_pages
    assert stored > 0
    served.close()

    served = Served(*build(folder, POOL_PAGES, storage, context_len=CONTEXT), prefers_reading=False)
    disk.order(read_s=READ_S)
    handle = served.submit(prompt(0), seed=0)
    while served.answers[handle].finish is None:
        served.turn(wait_s=0.05)
    assert served.answers[handle].bits == expected[0]
    assert not served.core.settled, "who was answered has not waited for the end of the read"
    stats = served.core.stats()
    assert stats.given_up_operations_total == 1 and stats.failed_operations_total == 0
    for number in range(PROMPTS):
        answer = served.ask(prompt(number), seed=number)
        assert answer.bits == expected[number]
    assert served.core.stats().given_up_operations_total == 1, "what is known to be slow is not tried for each"
    assert served.core.stats().recomputed_pages_total > stats.recomputed_pages_total
    served.close()
