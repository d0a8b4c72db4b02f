"""python -m tests.docs_commands [PAGE ...] [--list] [--nightly]: runs the commands of README.md and docs/ as written there.

Each page runs from top to bottom in a fresh checkout, one page after the other, because pages name port 8000. A block without a
mark is a failure, and so is a block that fails. tests/docs_commands/blocks.py explains the marks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.docs_commands.blocks import MARKS, ROOT, Block, blocks_of, faults_of, pages
from tests.docs_commands.page_run import PORT, BlockFailed, PageRun, port_is_free, read_only


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", type=Path, help="files, as docs/how-to/keys.md; all if none is named")
    parser.add_argument("--list", action="store_true", help="print each block with its mark, and run nothing")
    parser.add_argument("--nightly", action="store_true", help="run blocks that are marked as nightly too")
    arguments = parser.parse_args()
    chosen = [path.resolve() for path in arguments.pages] or pages()
    if missing := [str(path) for path in chosen if not path.is_relative_to(ROOT) or not path.is_file()]:
        parser.error(f"no page of this repository: {missing[0]}")
    by_page = {path: list(blocks_of(path.read_text(), str(path.relative_to(ROOT)))) for path in chosen}
    faults = [fault for blocks in by_page.values() for fault in faults_of(blocks)]
    if arguments.list:
        _print_list([block for blocks in by_page.values() for block in blocks])
    if faults or arguments.list:
        print(*faults, sep="\n", end="\n" if faults else "")
        return int(bool(faults))
    if not port_is_free():
        print(f"port {PORT}, which the pages name, is used by another process. End that process first.", file=sys.stderr)
        return 1
    failed = [fault for blocks in by_page.values() if blocks for fault in _run_page(blocks, arguments.nightly)]
    print("", *failed, f"{len(failed)} block(s) failed" if failed else "all blocks passed", sep="\n")
    return int(bool(failed))


def _run_page(blocks: Sequence[Block], nightly: bool) -> list[str]:
    """Returns the failures. A page's blocks build on each other, so the first failure ends the page."""
    wrong = [f"{block.place} {fault}" for block in blocks if block.mark in ("cluster", "skip") and (fault := read_only(block))]
    if not any(block.mark in ("run", "nightly") for block in blocks):
        return wrong
    with PageRun(nightly) as page:
        for block in blocks:
            begun = time.monotonic()
            try:
                if page.run(block):
                    print(f"{block.place} {block.mark}: passed, {time.monotonic() - begun:.1f} s", flush=True)
            except BlockFailed as error:
                print(f"{block.place} {block.mark}: FAILED", flush=True)
                return [*wrong, str(error)]
    return wrong


def _print_list(blocks: Sequence[Block]) -> None:
    for block in blocks:
        first = block.text.strip().partition("\n")[0]
        print(f"{block.place}  {block.mark or 'UNMARKED'}{': ' + block.detail if block.detail else ''}  {first[:80]}")
    counts = Counter(block.mark or "UNMARKED" for block in blocks)
    print(", ".join(f"{counts[mark]} {mark}" for mark in (*MARKS, "UNMARKED") if counts[mark]))


if __name__ == "__main__":
    sys.exit(main())
