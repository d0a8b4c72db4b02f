"""Sphinx configuration of `make docs-site`, which builds the Markdown pages as a static site.

The site loads no font, script or style from a network. The sidebar is made from the links of index.md, so that no page needs a
directive of Sphinx. A link to a file or folder outside docs/ becomes text with the path, because the site has only docs/.
"""

from __future__ import annotations

import re
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent

project = "Rootstock"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "Rootstock"
html_show_copyright = False
html_copy_source = False
myst_heading_anchors = 4  # levels of headings that get GitHub's anchors
suppress_warnings = ["misc.highlighting_failure"]  # Pygments accepts neither "…" nor PromQL names with colons

SECTION = re.compile(r"^## (.+)\n([\s\S]*?)(?=^## |\Z)", re.MULTILINE)
PAGE = re.compile(r"\]\(([\w/-]+)\.md\)")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[\w-]+)?\)")


def adapt_links(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turns links to files outside docs/ into text. Appends the sidebar to index.md: a caption and the pages of each section."""
    folder = (DOCS / docname).parent

    def kept_or_text(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        return link[0] if target.is_relative_to(DOCS) else f"{link[1]} (`{target.relative_to(DOCS.parent)}`)"

    source[0] = LINK.sub(kept_or_text, source[0])
    if docname == "index":
        for title, body in SECTION.findall(source[0]):
            source[0] += "\n".join((f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n", *PAGE.findall(body), "```\n"))


def setup(app: Sphinx) -> None:
    app.connect("source-read", adapt_links)
    app.add_lexer("mermaid", TextLexer)  # diagrams are shown as text: drawing them needs a script of 3 MB
