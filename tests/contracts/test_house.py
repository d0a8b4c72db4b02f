"""Imports between files and packages have no cycle, and the diagram in docs/design/architecture.md is up to date."""

from __future__ import annotations

from tests.contracts import imports, picture


def test_imports_between_files_have_no_cycle() -> None:
    assert not imports.circles(imports.house().own())


def test_imports_between_packages_have_no_cycle() -> None:
    assert not imports.circles(imports.house().packages())


def test_only_the_compiling_process_imports_grammar_parsers() -> None:
    compiling = [f"services.worker.grammar.compile.{name}" for name in ("forking_compiler", "compiler_child")]
    files = imports.house().own()
    assert {name for name in files if compiling[0] in imports.reached(files, name)} == set(compiling[1:])


def test_import_diagram_is_up_to_date() -> None:
    assert picture.rendered() in picture.PAGE.read_text(), "run `make docs`"
