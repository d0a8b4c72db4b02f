"""Writes pages until it is killed: python -m tests.exec.tiers.killed_writer FOLDER [salted].

It forks a writer for each number on a line of standard input, and prints "gone" when the writer has ended. A writer prints its
process id, and then the stored and dropped keys of every write.

With "salted", a writer writes pages of several salts under a quota, and sometimes deletes the pages of one salt. The writer
prints the salt's tag (the beginning of its page keys) before a deletion, and the dropped keys after it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rootstock_llm.services.worker.core.contracts.transfers import Selection
from rootstock_llm.services.worker.exec.tiers.segment_store import SegmentStore
from tests.exec.tiers.pages import keys, write

PAGE = 64 << 10  # large enough to bypass the page cache
CAP = 13 << 20
SEGMENT = 850 << 10  # a dozen pages
QUOTA = 2550 << 10
SALTS = (bytes(8), b"a" * 8, b"b" * 8, b"c" * 8)


def opened(folder: Path, salt_bytes: int = 0) -> SegmentStore:
    return SegmentStore(folder, PAGE, CAP, SEGMENT, b"killed", salt_bytes=salt_bytes)


def print_words(*words: str) -> None:
    os.write(1, (" ".join(words) + "\n").encode())  # in one call, so that a reader never gets half a line


def write_on(folder: Path, number: int) -> None:
    it = opened(folder)
    print_words("writer", str(os.getpid()))
    while True:
        count = 1 + number % 7
        done = write(it, keys(*range(number, number + count)))
        print_words("wrote", ",".join(key.hex() for key in done.stored), ",".join(key.hex() for key in done.dropped))
        number += count


def write_salted(folder: Path, number: int) -> None:
    it = opened(folder, QUOTA)
    print_words("writer", str(os.getpid()))
    while True:
        tag = SALTS[number % len(SALTS)]
        if number % 23 == 0:
            print_words("deletes", tag.hex(), "")
            print_words("deleted", "", ",".join(key.hex() for key in it.delete(Selection(tag)).dropped))
        done = write(it, keys(*range(number, number + 1 + number % 7), tag=tag))
        print_words("wrote", ",".join(key.hex() for key in done.stored), ",".join(key.hex() for key in done.dropped))
        number += 1 + number % 7


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            (write_salted if "salted" in sys.argv else write_on)(Path(sys.argv[1]), int(line))
        os.waitpid(child, 0)
        print_words("gone")


if __name__ == "__main__":
    main()
