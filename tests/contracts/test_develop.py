"""docs/develop.md: its lists are short enough, and what they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "develop.md"
MOST = {"A model": 4, "A kernel": 7, "A sampling parameter": 9, "An API field": 4, "A chart value": 4}
NAMED = re.compile(r"`((?:services|kernels|tests|charts|docker|docs|protos|rootstock|demo)/[^`\s*]*)`")


def section(title: str) -> str:
    return PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]


def test_every_file_and_folder_that_it_lists_exists() -> None:
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 50
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(("title", "most"), MOST.items())
def test_a_change_takes_no_more_files_than_promised(title: str, most: int) -> None:
    rows = re.findall(r"^\| (?!file |---)(.+?) \|", section(title), re.M)
    assert 3 <= len(rows) <= most


def test_a_metric_takes_three() -> None:
    rows = re.findall(r"^\| (?:the|a) .*\| (.+) \|$", section("A metric"), re.M)
    assert len(rows) == 4
    assert {row.count("; ") + 1 for row in rows} == {3}


def test_the_glossary_is_a_glossary() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", section("Glossary"), re.M)
    assert len(rows) - 2 >= 25
