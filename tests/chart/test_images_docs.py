"""What the pages on installing say about images, files and memory is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernels.cpu.variants import VARIANTS
from tests.chart.dockerfile import read

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs/kubernetes"
PAGES = ["install-kind", "install-gpu", "images", "upgrade", "operations", "sizing"]
GPUS_GB = (24, 80, 141)
OVERHEAD_GB, FRACTION = 3, 0.9


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (DOCS / f"{page}.md").read_text()):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        found = (DOCS / file) if file else DOCS / f"{page}.md"
        assert found.is_file(), target
        headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, target


@pytest.mark.parametrize("page", PAGES)
def test_files_and_targets_of_commands_exist(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    for name in re.findall(r"\bci/[\w-]+-values\.yaml", text):
        assert (ROOT / "charts/rootstock" / name).is_file(), name
    for dockerfile, options in re.findall(r"docker build -f (\S+) ([^\n]*)", text):
        known = {stage.name for stage in read(ROOT / dockerfile).stages}
        assert set(re.findall(r"--target (\w+)", options)) <= known


def rows() -> list[list[str]]:
    lines = (DOCS / "sizing.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| (Q|M|L)\S+ ?", line)]
    return [row for row in table if len(row) == 8 and row[1].isdigit()]


def computed(row: list[str]) -> list[str]:
    """As the row should be, by what it says of the model."""
    layers, (heads, size) = int(row[1]), map(int, row[2].split("×"))
    kv = 2 * layers * heads * size * 2
    tokens = [(gpu * FRACTION - float(row[4]) - OVERHEAD_GB) * 1e9 / kv for gpu in GPUS_GB]
    return [*row[:3], f"{kv / 1024:g}", row[4], *(f"{count / 1000:,.0f}" if count > 0 else "–" for count in tokens)]


def test_the_sizing_table_is_computed_by_its_formula() -> None:
    assert rows() == [computed(row) for row in rows()]


def test_the_table_has_rows() -> None:
    assert len(rows()) >= 10


def test_the_variants_of_kernels_are_all_named() -> None:
    named = re.findall(r"^\| `([^`]+)` \| [^|]+\|$", (DOCS / "images.md").read_text(), re.MULTILINE)
    assert named == [variant.name for variant in VARIANTS]
