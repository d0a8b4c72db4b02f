"""Imports among files and packages have no cycle, and the diagram in docs/design/architecture.md shows them as they are."""

from __future__ import annotations

from tests.contracts import imports, picture


def test_files_import_without_a_cycle() -> None:
    assert not imports.circles(imports.house().own())


def test_packages_import_without_a_cycle() -> None:
    assert not imports.circles(imports.house().packages())


def test_what_a_client_wrote_becomes_a_grammar_in_the_compiling_process_alone() -> None:
    compiling = [f"services.worker.grammar.compile.{name}" for name in ("grammar_source", "forking_compiler", "compiler_child")]
    files = imports.house().own()
    assert {name for name in files if compiling[0] in imports.reached(files, name)} == set(compiling[1:])


def test_the_picture_is_what_the_code_says() -> None:
    assert picture.rendered() in picture.PAGE.read_text(), "run `make docs`"
