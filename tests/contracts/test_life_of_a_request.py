"""Each type that docs/design/life-of-a-request.md names is defined in the file of its row."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.contracts.life_of_a_request import PAGE, ROOT, rows


def test_page_lists_types_of_every_process() -> None:
    assert {row.section for row in rows()} == {"Gateway", "Tokenizer and detokenizer", "Worker"}
    assert len([name for row in rows() for name in row.types]) > 40


def test_types_are_defined_in_the_files_of_the_same_row() -> None:
    missing = []
    for row in rows():
        defined = {name for file in row.files for name in _classes(file)}
        missing += [f"{name}: not in {', '.join(map(str, row.files))}" for name in row.types if name not in defined]
    assert not missing


def test_every_file_on_the_page_defines_a_type_of_the_same_row() -> None:
    missing = [str(file) for row in rows() for file in row.files if not _classes(file) & set(row.types)]
    assert not missing


def test_page_lists_no_type_twice_in_a_section() -> None:
    for section in {row.section for row in rows()}:
        names = [name for row in rows() if row.section == section for name in row.types]
        assert len(names) == len(set(names)), f"{PAGE.name}: {section}"


# Returns the names of the classes in a file. Removes a leading underscore from a name, because the page omits it.
def _classes(file: Path) -> set[str]:
    return {node.name.lstrip("_") for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.ClassDef)}
