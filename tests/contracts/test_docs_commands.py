"""Every code block of README.md and docs/ has a valid mark (a comment such as `<!-- run -->`); others are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs_commands.blocks import REASONS, ROOT, Block, blocks_of, faults_of, pages
from tests.docs_commands.chroot import packages
from tests.docs_commands.page_run import BlockFailed, PageRun, is_printed, read_only

SHELL = ("", "sh", "bash")


def all_blocks() -> list[list[Block]]:
    return [list(blocks_of(page.read_text(), str(page.relative_to(ROOT)))) for page in pages()]


def faults(text: str) -> list[str]:
    return list(faults_of(list(blocks_of(text, "page.md"))))


def test_every_code_block_of_the_docs_has_a_valid_mark() -> None:
    found = all_blocks()
    assert sum(map(len, found)) >= 130
    assert [fault for blocks in found for fault in faults_of(blocks)] == []


def test_docs_skip_code_blocks_only_for_one_of_three_reasons() -> None:
    skipped = [block for blocks in all_blocks() for block in blocks if block.mark == "skip"]
    assert skipped and [block.place for block in skipped if block.detail not in REASONS] == []
    assert len(skipped) < 20


def test_code_blocks_for_a_cluster_have_valid_syntax() -> None:
    assert [
        f"{block.place} {fault}"
        for blocks in all_blocks()
        for block in blocks
        if block.mark in ("cluster", "skip") and (fault := read_only(block))
    ] == []


def test_code_blocks_run_no_program_that_debian_lacks() -> None:
    """Debian has the program `python3` but no `python`. Commands in a pod may use `python`."""
    bare = re.compile(r"(?m)(?:^|[;&|(]\s*|\bdo )(?:python|pip|rootstock) ")
    commands = [block for blocks in all_blocks() for block in blocks if block.mark != "output" and block.language in SHELL]
    assert [block.place for block in commands if bare.search(block.text)] == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```\nls\n```\n", "page.md:1 has no mark"),
        ("text\n\n    ls\n", "page.md:3 has no mark"),
        ("<!-- run -->\ntext\n\n    ls\n", "page.md:4 has no mark"),
        ("<!-- later -->\n    ls\n", "page.md:2 has no mark"),
        ("<!-- skip: takes long -->\n    ls\n", "page.md:2 is skipped for the unknown reason 'takes long'"),
        ("<!-- skip -->\n    ls\n", "page.md:2 is skipped for the unknown reason ''"),
        ("<!-- output -->\n    ls\n", "page.md:2 is the output of no block"),
        ("<!-- output: whatever -->\n    ls\n", "page.md:2 is output of the unknown kind 'whatever'"),
        ("<!-- run: quickly -->\n    ls\n", "page.md:2 has the unknown option 'quickly'"),
        ("<!-- cluster: of mine -->\n    ls\n", "page.md:2: 'cluster' takes no options"),
    ],
)
def test_code_block_is_refused_when_the_mark_is_missing_or_wrong(text: str, fault: str) -> None:
    (found,) = faults(text)
    assert found.startswith(fault)


def test_parser_finds_blocks_and_marks_of_a_page() -> None:
    text = "<!-- run: serves -->\n    make run\n\n    more\n\ntext\n<!-- output -->\n```sh\n    a\n```\n- item\n"
    first, second = blocks_of(text, "page.md")
    assert (first.text, first.line, dict(first.options)) == ("make run\n\nmore\n", 2, {"serves": ""})
    assert (second.text, second.line, second.language, second.mark) == ("    a\n", 8, "sh", "output")
    assert faults(text) == []


def test_code_block_fails_when_the_exit_status_or_the_output_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.docs_commands.page_run.make_checkout", lambda folder: folder.mkdir())
    text = (
        "<!-- run -->\n    echo one; echo file-7d took 3.5 s > made\n\n<!-- output -->\n    one\n\n<!-- run -->\n    cat made\n\n"
    )
    text += "<!-- output -->\n    file-1 took 9 s\n\n<!-- output -->\n    two\n\n<!-- run -->\n    cat nothing\n"
    first, one, second, masked, two, last = blocks_of(text, "page.md")
    with PageRun(nightly=False) as page:
        assert all(page.run(block) for block in (first, one, second, masked))
        with pytest.raises(BlockFailed, match=r"page.md:14 shows"):
            page.run(two)
        with pytest.raises(BlockFailed, match="ended with status 1"):
            page.run(last)


def test_ellipsis_in_a_pages_output_matches_any_text() -> None:
    assert is_printed("NAME: a\n…\nend", "NAME: a\nx\ny\nend\n")
    assert not is_printed("NAME: a\n…\nend", "NAME: b\nx\nend\n")


def test_readme_lists_the_debian_packages_before_the_first_command() -> None:
    assert {"build-essential", "python3-venv"} <= set(packages())
