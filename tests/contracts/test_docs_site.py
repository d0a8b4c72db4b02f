"""The static site of `make docs-site` builds without a warning and loads nothing from a network."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.night import NIGHTLY

DOCS = Path(__file__).resolve().parents[2] / "docs"
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"(https?:)?//[^>]*>")

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="sphinx is not installed"),
    pytest.mark.skipif(not NIGHTLY, reason="takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1"),
]


def test_site_loads_nothing_from_a_network(tmp_path: Path) -> None:
    """With `-W`, the build also fails for every broken internal link."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(list(DOCS.rglob("*.md")))
    assert [match[0] for page in pages for match in LOADED.finditer(page.read_text())] == []
