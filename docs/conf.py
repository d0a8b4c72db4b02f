"""Sphinx configuration of `make docs-site`, which builds the Markdown pages as a static site.

The site loads no font, script or style from a network. The sidebar is made from the links of index.md, so that no page needs a
directive of Sphinx. A link to a folder of the repository becomes text, because the site does not hold these folders.
"""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

project = "Rootstock"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "Rootstock"
html_show_copyright = False
html_copy_source = False
myst_heading_anchors = 4  # levels of headings that get GitHub's anchors
exclude_patterns = ["_build"]

SECTION = re.compile(r"^## (.+)\n([\s\S]*?)(?=^## |\Z)", re.MULTILINE)
PAGE = re.compile(r"\]\(([\w/-]+)\.md\)")


def add_sidebar(app: Sphinx, docname: str, source: list[str]) -> None:
    """Appends a hidden table of contents to index.md: a caption per section, and the pages that the section links to."""
    if docname == "index":
        for title, body in SECTION.findall(source[0]):
            source[0] += "\n".join((f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n", *PAGE.findall(body), "```\n"))


def resolve_folder(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.TextElement) -> nodes.Element | None:
    """Returns the text of a link to a folder. Returns None for other targets, which Sphinx then reports."""
    page = Path(env.doc2path(node["refdoc"]))
    return contnode if (page.parent / node["reftarget"]).resolve().is_dir() else None


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_sidebar)
    app.connect("missing-reference", resolve_folder)
    app.add_lexer("mermaid", TextLexer)  # diagrams are shown as text: drawing them needs a script of 3 MB
