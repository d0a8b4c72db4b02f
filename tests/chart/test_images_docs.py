"""Tests the statements of the installation pages about images, files and memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rootstock_llm.kernels.cpu.build import VARIANTS
from tests.chart.dockerfile import read

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs/how-to/kubernetes"
PAGES = [ROOT / "docs/tutorials/first-cluster.md"]
PAGES += [DOCS / f"{name}.md" for name in ("install-gpu", "images", "upgrade", "operations", "sizing")]
GPUS_GB = (24, 80, 141)
OVERHEAD_GB, FRACTION = 3, 0.9


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_build_targets_in_documented_commands_exist(page: Path) -> None:
    text = page.read_text()
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
    """Returns the row with new sizes, computed from the model properties in the row."""
    layers, (heads, size) = int(row[1]), map(int, row[2].split("×"))
    kv = 2 * layers * heads * size * 2
    tokens = [(gpu * FRACTION - float(row[4]) - OVERHEAD_GB) * 1e9 / kv for gpu in GPUS_GB]
    return [*row[:3], f"{kv / 1024:g}", row[4], *(f"{count / 1000:,.0f}" if count > 0 else "–" for count in tokens)]


def test_sizing_table_equals_its_formula() -> None:
    assert rows() == [computed(row) for row in rows()]


def test_sizing_table_has_rows() -> None:
    assert len(rows()) >= 10


def test_images_page_lists_all_kernel_variants() -> None:
    named = re.findall(r"^\| `([^`]+)` \| [^|]+\|$", (DOCS / "images.md").read_text(), re.MULTILINE)
    assert named == [variant.name for variant in VARIANTS]
