"""Files and headings that code, comments, charts and pages refer to exist in this repository."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("services", "kernels", "tests", "charts", "docker", "docs", "examples", "protos", "demo")
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "Makefile", "pyproject.toml", "skaffold.yaml")
ENDINGS = (".py", ".md", ".yaml", ".tpl", ".txt", ".toml", ".proto", ".cpp", ".h", ".json", ".worker")
HERE = Path(__file__).name

# A path relative to the root with a file ending, and optionally #HEADING. Parts of a URL or of a longer path do not match.
CITED = re.compile(
    rf"(?<![\w./:-])((?:{'|'.join(FOLDERS)})/[\w./-]*\.(?:md|py|yaml|tpl|proto|cpp|h|json|svg|toml|txt))(?:#([\w-]+))?(?![\w/*{{<-])"
)
MODULE = re.compile(r"(?<![\w./*{}<>-])([a-z_]\w*\.py)(?![\w/*{<-])")  # a file name without a path
LISTED = re.compile(rf"`((?:{'|'.join((*FOLDERS, 'rootstock_llm'))})/[^`\s*]*)`")  # a file or folder with any ending
LINK = re.compile(r"\]\(([^)\s#:]*)(?:#([\w-]+))?\)")  # target of a Markdown link that is not a URL
FOREIGN = re.compile(r"\bDESIGN(\.md)?\b|\bCORE\.md|\bFEATURES\b|\bSTYLE\.md|(?i:\breference \d)|§|(?i:\bdesign text\b)")
# Paths that do not exist: tests create them or use them as examples.
INVENTED = {
    "services/one/__main__.py",
    "kernels/a.py",
    "kernels/notes.md",
    "tests/test_one.py",
    "tests/exec/test_sync.py",
}


def files() -> list[Path]:
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
    found += [ROOT / name for name in TOP]
    return [path for path in found if path.name != HERE and (path.suffix in ENDINGS or path.name.startswith(("Docker", "Make")))]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Returns the anchors of a page's headings in GitHub's form. A repeated heading gets a number."""
    out: set[str] = set()
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for heading in re.findall(r"^#+ (.+?)\s*$", text, re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = next(n for n in range(100) if (f"{slug}-{n}" if n else slug) not in out)
        out.add(f"{slug}-{number}" if number else slug)
    return frozenset(out)


def fault(target: Path, anchor: str | None) -> str:
    """Returns why the file or heading of a citation does not exist; "" if it exists."""
    if not target.exists():
        return "no such file"
    if anchor and target.suffix == ".md" and anchor not in anchors(target):
        return f"no heading #{anchor}"
    return ""


def citations(path: Path, text: str) -> Iterator[tuple[str, Path, str | None]]:
    for name, anchor in CITED.findall(text):
        if name not in INVENTED:
            yield name, ROOT / name, anchor or None
    if path.suffix == ".md":
        for name, anchor in LINK.findall(text):
            if name or anchor:
                yield name or path.name, (path.parent / name).resolve() if name else path, anchor or None


@cache
def modules() -> frozenset[str]:
    return frozenset(path.name for path in files() if path.suffix == ".py") | {HERE}


def prose(text: str) -> Iterator[str]:
    """Yields the docstrings and comments of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node, clean=False) or ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def modules_named(text: str) -> list[str]:
    return [name for part in prose(text) for name in MODULE.findall(part)] if MODULE.search(text) else []


def test_cited_files_and_headings_exist() -> None:
    found, seen = [], 0
    for path in files():
        for name, target, anchor in citations(path, path.read_text()):
            seen += 1
            if why := fault(target, anchor):
                found.append(f"{path.relative_to(ROOT)}: {name}#{anchor or ''}: {why}")
    assert seen > 200
    assert found == []


def test_files_and_folders_in_the_developer_recipes_exist() -> None:
    """Checks the paths in docs/how-to/develop.md, which include folders and files without an ending of CITED."""
    listed = LISTED.findall((ROOT / "docs/how-to/develop.md").read_text())
    assert len(listed) > 50
    assert [name for name in listed if not (ROOT / name).exists()] == []


def test_modules_in_docstrings_and_comments_exist() -> None:
    named = [(path, name) for path in files() if path.suffix == ".py" for name in modules_named(path.read_text())]
    assert named
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in named if name not in modules()] == []


@pytest.mark.by_day(one_in=4, seed=1)
@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('"""As in generate.py."""', ["generate.py"]),
        ("def f():\n    'See (a_b.py).'\n    return 1  # known_fields.py, too", ["a_b.py", "known_fields.py"]),
        ('"""services/one/two.py, http/three.py, test_*.py, stub.pyi"""', []),
        ('PATH = "made.py"', []),
    ],
    ids=["of a module", "of a function", "with a path", "a value"],
)
def test_module_name_in_prose_is_found(text: str, names: list[str]) -> None:
    assert modules_named(text) == names


def test_files_cite_no_document_outside_the_repository() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FOREIGN.search(line)
    ]
    assert found == []


@pytest.mark.by_day(one_in=4, seed=1)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("see docs/design/scheduler.md#memory", ""),
        ("see docs/design/scheduler.md#memories", "no heading #memories"),
        ("see docs/design/sceduler.md", "no such file"),
        ("see https://example.com/docs/nothing.md", None),
    ],
)
def test_citation_of_a_missing_file_or_heading_is_found(text: str, why: str | None) -> None:
    found = [fault(target, anchor) for _, target, anchor in citations(Path("x.py"), text)]
    assert found == ([] if why is None else [why])


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("text", ["(DESIGN §5)", "Reference 2 §12", "CORE.md, memory", "row G9 of FEATURES"])
def test_citation_of_a_document_outside_the_repository_is_found(text: str) -> None:
    assert FOREIGN.search(text)
