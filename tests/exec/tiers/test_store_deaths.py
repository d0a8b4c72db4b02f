"""The file tier in a process that is killed: no page that was reported as stored is missing, and all pages are whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rootstock_llm.services.worker.exec.tiers.disk import Disk
from tests.exec.tiers import killed_writer
from tests.exec.tiers.pages import SEGMENT, SLOTS, keys, readable, size_of, store, write
from tests.exec.tiers.sick_disks import Killed, MortalDisk
from tests.night import NIGHTLY

ROOT = Path(__file__).resolve().parents[3]
DEATHS = 1000 if NIGHTLY else 15
CAP = 5  # segments


def live(folder: Path, disk: Disk, reported: list[bytes]) -> None:
    """Opens a store, writes pages and closes it, twice.

    Args:
        folder: folder of the store.
        disk: the file system.
        reported: receives the page keys that the store reports as stored, oldest first.
    """
    for begin in (0, 100):
        it = store(folder, CAP, disk)
        for number in range(begin, begin + 5 * SLOTS, 3):
            done = write(it, keys(*range(number, number + 3)))
            reported[:] = [each for each in reported if each not in done.dropped] + list(done.stored)
        it.close()


def die(folder: Path, calls: int) -> tuple[list[bytes], bool]:
    """Runs live(), and lets the process die after a number of calls.

    Returns:
        The page keys that were reported as stored, and whether the process has died.
    """
    disk, reported = MortalDisk(folder, calls), list[bytes]()
    try:
        live(folder, disk, reported)
    except Killed:
        return reported, True
    finally:
        disk.bury()
    return reported, False


def check_survival(reported: list[bytes], held: list[bytes], most: int) -> None:
    """Checks that the reported pages are stored, except for at most `most` of the oldest ones.

    The last write may have evicted these pages, and its result was not reported.
    """
    stored = set(held)
    missing = [each not in stored for each in reported]
    assert sum(missing) <= most and not any(missing[sum(missing) :])


def test_store_recovers_when_the_process_dies_at_any_file_operation(tmp_path: Path) -> None:
    calls, died = 0, True
    while died:
        folder = tmp_path / str(calls)
        reported, died = die(folder, calls)
        it = store(folder, CAP)
        assert it.counts().corrupt_pages == 0, "a torn end does not count as a corrupt page"
        held = readable(it)
        assert it.take_lost() == () and held == it.keys()
        check_survival(reported, held, SLOTS)
        assert size_of(folder) <= CAP * SEGMENT
        assert write(it, keys(1000, 1001)).stored == tuple(keys(1000, 1001))
        assert readable(it)[-2:] == keys(1000, 1001)
        it.close()
        calls += 1
    assert calls > 80


def test_recovery_can_be_repeated_when_the_process_dies_at_any_file_operation(tmp_path: Path) -> None:
    """The recovery has work to do: an index is missing, an index is half-written, and a segment has a torn end."""
    calls, died = 0, True
    while died:
        folder = tmp_path / str(calls)
        first = store(folder, CAP)
        write(first, keys(*range(3 * SLOTS + 2)))
        first.close()
        (folder / "segment-00000001.index").rename(folder / "segment-00000001.index.part")
        with (folder / "segment-00000003.kv").open("ab") as file:
            file.write(b"torn")
        disk = MortalDisk(folder, calls)
        try:
            store(folder, CAP, disk).close()
            died = False
        except Killed:
            died = True
        disk.bury()
        assert readable(store(folder, CAP)) == keys(*range(3 * SLOTS + 2))
        calls += 1
    assert calls > 5


class Writers:
    """A process that starts writers of one folder, one after another."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.exec.tiers.killed_writer", str(folder)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def die(self, number: int, writes: int, seconds: float, reported: list[bytes]) -> None:
        """Starts a writer of pages from `number` on, and kills it `seconds` after `writes` + 1 writes.

        Args:
            number: first page.
            writes: number of writes before the last write.
            seconds: seconds from the last write to the kill.
            reported: receives the page keys that the writer reports as stored.
        """
        assert self._process.stdin and self._process.stdout
        print(number, file=self._process.stdin, flush=True)
        pid = int(self._process.stdout.readline().removeprefix("writer "))
        for at, line in enumerate(iter(self._process.stdout.readline, "gone\n")):
            assert line.startswith("wrote "), line
            stored, dropped = ([bytes.fromhex(word) for word in words.split(",") if word] for words in line[6:-1].split(" "))
            assert stored
            reported[:] = [each for each in reported if each not in dropped] + stored
            if at == writes:
                time.sleep(seconds)
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        self._process.communicate()


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Writers]:
    them = Writers(tmp_path)
    yield them
    them.end()


def test_store_keeps_reported_pages_when_the_writer_is_killed(tmp_path: Path, writers: Writers) -> None:
    chance = random.Random(9)
    reported: list[bytes] = []
    number = 0
    for _ in range(DEATHS):
        writers.die(number, chance.randrange(40), chance.random() * 0.004, reported)
        it = killed_writer.opened(tmp_path)
        held = readable(it)
        assert held == it.keys() and it.counts().corrupt_pages == 0
        check_survival(reported, held, 2 * killed_writer.SEGMENT // killed_writer.PAGE)
        assert len(held) > len(reported) - 30 and size_of(tmp_path) <= killed_writer.CAP
        it.close()
        reported[:] = held
        number += 10_000
    assert len(reported) > 100
