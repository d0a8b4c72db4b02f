"""The code blocks of README.md and docs/, each with a mark in a comment directly before it.

| mark | meaning |
| --- | --- |
| `<!-- run -->` | The block runs by day, in the order of its page. |
| `<!-- nightly -->` | The block runs only with `--nightly`: it takes minutes, or needs programs that README does not list. |
| `<!-- cluster -->` | The block is for a cluster. Only its shell or YAML syntax is checked; tests/cluster tests such steps. |
| `<!-- output -->` | The lines that the previous block prints. `…` matches any text. |
| `<!-- output: KIND -->` | A text that no block prints. KIND is one of KINDS. |
| `<!-- skip: REASON -->` | The block cannot run. REASON is one of REASONS. |

Options of `run` and `nightly` follow a colon and are separated by `; `. OPTIONS describes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARKS = ("run", "nightly", "cluster", "output", "skip")
KINDS = ("diagram", "formula", "format", "example")
REASONS = ("needs a GPU", "needs a cloud account", "needs a public domain")
OPTIONS = {  # first words of an option → meaning of the option
    "with make run": "flags of a server that is started before the block; it keeps running for the later blocks",
    "serves": "the block is a server; it counts as ready when its gateway is ready, and keeps running for the later blocks",
    "input": "text that the block reads from stdin",
    "by": "interpreter of a Python block, which may be indented; the default is .venv/bin/python",
    "ends after": "seconds after which the block gets Ctrl-C; it must have printed something by then",
}
MARK = re.compile(r" {0,3}<!-- (\w+)(?:: (.+?))? -->\s*")
FENCE = re.compile(r"( {0,9})(`{3,}|~{3,})\s*(\w*)")
INDENT = "    "


@dataclass(frozen=True, slots=True)
class Block:
    page: str  # path below the repository
    line: int  # number of the first line, from 1
    language: str  # word after the fence; empty for an indented block
    text: str  # without indentation and fence
    mark: str  # one of MARKS; empty if the block has no mark
    detail: str  # text after the mark's colon
    options: Mapping[str, str] = field(default_factory=dict)  # remaining text of each option, by its first words

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """Yields the fenced and the indented blocks of a page from top to bottom."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        begin, fence = at, FENCE.match(lines[at])
        if fence:
            at = _end_of_fence(lines, begin, fence[2])
            body = [line.removeprefix(fence[1]) for line in lines[begin + 1 : at - 1]]
        elif _is_indented(lines, at):
            at = _end_of_indented(lines, begin)
            body = [line.removeprefix(INDENT) for line in lines[begin:at]]
        else:
            at += 1
            continue
        mark = MARK.fullmatch(lines[begin - 1]) if begin else None
        name, detail = (mark[1], mark[2] or "") if mark else ("", "")
        options = _options(detail) if name in ("run", "nightly") else {}
        yield Block(page, begin + 1, fence[3] if fence else "", "\n".join(body).rstrip() + "\n", name, detail, options)


def _options(detail: str) -> Mapping[str, str]:
    """Returns the value of each option by its words in OPTIONS. The key of an unknown option is its whole text."""
    found = {}
    for option in filter(None, detail.split("; ")):
        words = next((words for words in OPTIONS if option == words or option.startswith(f"{words} ")), option)
        found[words] = option.removeprefix(words).strip()
    return found


def _end_of_fence(lines: list[str], begin: int, fence: str) -> int:
    """Returns the index of the line after the closing fence. Raises ValueError if there is no closing fence."""
    for at in range(begin + 1, len(lines)):
        if lines[at].strip().startswith(fence) and not lines[at].strip(fence[0] + " "):
            return at + 1
    raise ValueError(f"the code fence of line {begin + 1} is not closed")


def _is_indented(lines: list[str], at: int) -> bool:
    before = lines[at - 1] if at else ""
    return lines[at].startswith(INDENT) and bool(lines[at].strip()) and (not before.strip() or bool(MARK.fullmatch(before)))


def _end_of_indented(lines: list[str], begin: int) -> int:
    """Returns the index after the block's last line. Blank lines between indented lines belong to the block."""
    end = begin
    for at in range(begin, len(lines)):
        if lines[at].strip() and not lines[at].startswith(INDENT):
            break
        end = at + 1 if lines[at].strip() else end
    return end


def faults_of(blocks: list[Block]) -> Iterator[str]:
    """Yields a message for each block of a page whose mark is missing or wrong."""
    for before, block in zip([None, *blocks], blocks, strict=False):
        unknown = sorted(block.options.keys() - OPTIONS.keys())
        if block.mark not in MARKS:
            yield f"{block.place} has no mark; marks are: {', '.join(MARKS)}"
        elif block.mark == "skip" and block.detail not in REASONS:
            yield f"{block.place} is skipped for the unknown reason '{block.detail}'; reasons are: {', '.join(REASONS)}"
        elif block.mark == "output" and block.detail not in ("", *KINDS):
            yield f"{block.place} is output of the unknown kind '{block.detail}'; kinds are: {', '.join(KINDS)}"
        elif (
            block.mark == "output"
            and not block.detail
            and (before is None or before.mark not in ("run", "nightly", "cluster", "skip"))
        ):
            yield f"{block.place} is the output of no block; if no block prints it, name its kind: {', '.join(KINDS)}"
        elif block.mark == "cluster" and block.detail:
            yield f"{block.place}: 'cluster' takes no options"
        elif unknown:
            yield f"{block.place} has the unknown option '{unknown[0]}'; options begin with: {', '.join(OPTIONS)}"
