"""docs/index.md links to every page of docs/, and each page is in one of four folders."""

from __future__ import annotations

from pathlib import Path

from tests.contracts.test_citations import LINK

DOCS = Path(__file__).resolve().parents[2] / "docs"
FOLDERS = ("tutorials", "how-to", "reference", "design")


def test_index_links_to_every_page() -> None:
    linked = {(DOCS / name).resolve() for name, _ in LINK.findall((DOCS / "index.md").read_text())}
    pages = set(DOCS.rglob("*.md")) - {DOCS / "index.md"}
    assert sorted(str(page.relative_to(DOCS)) for page in pages - linked) == []


def test_every_page_is_in_one_of_the_four_folders() -> None:
    others = [path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] not in FOLDERS]
    assert others == [DOCS / "index.md"]
