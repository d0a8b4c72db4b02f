"""The log of a store's block names returns no torn names, no names of other identities, and no names without pages."""

from __future__ import annotations

import errno
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from rootstock_llm.services.worker.core.contracts.transfers import TierBlock
from rootstock_llm.services.worker.core.tiers.page_keys import KEY_BYTES
from rootstock_llm.services.worker.exec.tiers import block_log
from rootstock_llm.services.worker.exec.tiers.block_log import BlockLog
from rootstock_llm.services.worker.exec.tiers.disk import Disk

IDENTITY = bytes(range(32))


def block(number: int, pages: int = 4) -> TierBlock:
    keys = tuple(number.to_bytes(4, "big") + page.to_bytes(KEY_BYTES - 4, "big") for page in range(pages))
    return TierBlock(b"name%04d" % number, b"revision", keys)


BLOCKS = [block(1), block(2, 1), block(3, 64), block(4)]


def log_of(folder: Path, blocks: Sequence[TierBlock], identity: bytes = IDENTITY, disk: Disk | None = None) -> BlockLog:
    """Returns the log of a store that has the pages of these blocks."""
    return BlockLog(folder / "blocks", identity, lambda: [key for each in blocks for key in each.keys], disk)


def found(folder: Path, blocks: Sequence[TierBlock], identity: bytes = IDENTITY) -> list[TierBlock]:
    log = log_of(folder, blocks, identity)
    try:
        return log.read()
    finally:
        log.close()


def written(folder: Path, blocks: Sequence[TierBlock] = BLOCKS) -> Path:
    log = log_of(folder, blocks)
    assert log.read() == []
    for each in blocks:
        log.append([each])
    log.close()
    return folder / "blocks"


def test_written_blocks_are_read_by_the_next_log(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for _ in range(2):
        assert found(tmp_path, BLOCKS) == BLOCKS


@pytest.mark.by_day(one_in=3, seed=4)
@pytest.mark.parametrize("cut", [1, 7, 8, 9, 155, 156])
def test_incomplete_last_record_loses_only_one_block(tmp_path: Path, cut: int) -> None:
    """Blocks that are appended after the torn end can be read."""
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    log = log_of(tmp_path, [*BLOCKS, block(5)])
    assert log.read() == BLOCKS[:3]
    log.append([block(5)])
    log.close()
    assert found(tmp_path, [*BLOCKS, block(5)]) == [*BLOCKS[:3], block(5)]


def test_only_blocks_before_a_flipped_byte_are_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 41):
        turned = bytearray(data)
        turned[at] ^= 4
        path.write_bytes(turned)
        left = found(tmp_path, BLOCKS)
        assert left == BLOCKS[: len(left)] and len(left) < len(BLOCKS)


def test_log_drops_blocks_without_pages_and_blocks_of_other_identities(tmp_path: Path) -> None:
    path = written(tmp_path)
    size = path.stat().st_size
    assert found(tmp_path, BLOCKS[1:3]) == BLOCKS[1:3] and path.stat().st_size < size
    assert found(tmp_path, BLOCKS, identity=bytes(32)) == []
    assert found(tmp_path, BLOCKS) == [], "the file now belongs to the other identity"


def test_sweep_removes_the_names_of_blocks_with_deleted_pages(tmp_path: Path) -> None:
    held = list(BLOCKS)
    log = BlockLog(tmp_path / "blocks", IDENTITY, lambda: [key for each in held for key in each.keys])
    log.append(BLOCKS)
    del held[1:3]
    log.sweep()
    assert BLOCKS[1].name not in (tmp_path / "blocks").read_bytes()
    held[:] = BLOCKS[1:2]
    log.append(held)
    log.sweep()
    log.close()
    assert found(tmp_path, BLOCKS) == [BLOCKS[1]]


def test_log_stays_small_when_blocks_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_log, "SPARE_BYTES", 2000)
    held: list[TierBlock] = []
    log = BlockLog(tmp_path / "blocks", IDENTITY, lambda: [key for each in held for key in each.keys])
    for number in range(500):
        held = [*held[-5:], block(number)]
        log.append(held[-1:])
        assert (tmp_path / "blocks").stat().st_size < 2000 + 2 * 7 * 200
    log.close()
    assert found(tmp_path, held)[-6:] == held


class FullDisk(Disk):
    """A disk that writes only a few bytes while `full`."""

    full = False

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        return super().write(fd, [bytes(parts[0])[:10]] if self.full else parts, offset)


def test_log_loses_only_the_blocks_that_are_added_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootstock_llm.services.worker.exec.tiers.write_pause.FIRST_SECONDS", 0.0)
    disk = FullDisk()
    log = log_of(tmp_path, BLOCKS, disk=disk)
    log.append(BLOCKS[:1])
    disk.full = True
    log.append(BLOCKS[1:2])
    log.sweep()
    disk.full = False
    log.append(BLOCKS[2:3])
    log.close()
    assert found(tmp_path, BLOCKS) == [BLOCKS[0], BLOCKS[2]]


class Stuck(Disk):
    """A disk that reports an error when a written file is closed, as a network disk may. `closed` has the closed descriptors."""

    def __init__(self) -> None:
        self.closed: list[int] = []
        self._written: set[int] = set()

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        self._written.add(fd)
        return super().write(fd, parts, offset)

    def close(self, fd: int) -> None:
        super().close(fd)
        if fd in self._written:
            self._written.remove(fd)
            self.closed.append(fd)
            raise OSError(errno.EIO, "not all was written")


def test_log_closes_a_file_once_when_close_reports_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second close could close another file that has the same descriptor by then."""
    monkeypatch.setattr("rootstock_llm.services.worker.exec.tiers.write_pause.FIRST_SECONDS", 0.0)
    disk = Stuck()
    log = log_of(tmp_path, BLOCKS, disk=disk)
    log.append(BLOCKS[:2])
    log.sweep()
    log.append(BLOCKS[2:])
    assert len(disk.closed) == 1
    with pytest.raises(OSError, match="not all was written"):
        log.close()
    log.close()
    assert len(disk.closed) == 2 and found(tmp_path, BLOCKS) == BLOCKS


def test_log_ignores_a_missing_folder(tmp_path: Path) -> None:
    log = log_of(tmp_path / "none", BLOCKS)
    assert log.read() == []
    log.append(BLOCKS)
    log.close()
