"""python -m services.local.models_reference: the list in docs/models.md of what our decoder covers, from its families."""

from __future__ import annotations

import re
from pathlib import Path

from services.worker.exec.weights.families import FAMILIES, HEAD

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
WRITTEN = re.compile(r"(?<=<!-- make docs: architectures -->\n)(.*?)(?=^ *<!-- end -->)", re.M | re.S)


def render(page: str) -> str:
    """The page with the list as it is."""
    names = ", ".join(f"{family}{HEAD}" for family in sorted(FAMILIES))
    written, count = WRITTEN.subn(f"   {names}\n", page)
    assert count == 1, "the page has one place for the list"
    return written


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
