"""python -m tests.docs_commands [PAGE ...] [--list] [--nightly]: runs the commands of README.md and docs/ as written there.

Each page runs from top to bottom in a fresh checkout. Pages run one after another, because all of them use port 8000. The run
fails if a block fails or has no mark. tests/docs_commands/blocks.py explains the marks.
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
    parser.add_argument("pages", nargs="*", metavar="PAGE", type=Path, help="files such as docs/how-to/keys.md; default: all")
    parser.add_argument("--list", action="store_true", help="print each block with its mark instead of running it")
    parser.add_argument("--nightly", action="store_true", help="also run blocks with the mark nightly")
    arguments = parser.parse_args()
    chosen = [path.resolve() for path in arguments.pages] or pages()
    if missing := [str(path) for path in chosen if not path.is_relative_to(ROOT) or not path.is_file()]:
        parser.error(f"{missing[0]} is not README.md or a page of docs/")
    by_page = {path: list(blocks_of(path.read_text(), str(path.relative_to(ROOT)))) for path in chosen}
    faults = [fault for blocks in by_page.values() for fault in faults_of(blocks)]
    if arguments.list:
        _print_list([block for blocks in by_page.values() for block in blocks])
    if faults or arguments.list:
        print(*faults, sep="\n", end="\n" if faults else "")
        return int(bool(faults))
    if not port_is_free():
        print(f"port {PORT}, which the pages use, is used by another process. End this process first.", file=sys.stderr)
        return 1
    failed = [fault for blocks in by_page.values() if blocks for fault in _run_page(blocks, arguments.nightly)]
    print("", *failed, f"{len(failed)} block(s) failed" if failed else "all blocks passed", sep="\n")
    return int(bool(failed))


def _run_page(blocks: Sequence[Block], nightly: bool) -> list[str]:
    """Runs a page and returns its failures. The first failure ends the page, because its blocks build on each other."""
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
