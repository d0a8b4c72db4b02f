"""The house: no circle, short chains, small folders, and a picture of it that is true."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.contracts import imports, picture

SERVICES = ("gateway", "tokenizer", "detokenizer", "worker", "local", "sim", "cli")
CORE = "services.worker.core"
MOST_MODULES, MOST_PACKAGES = 15, 6
MOST_FILES = {"gateway": 12, "worker": 8}


def inside(name: str, service: str) -> bool:
    return name == f"services.{service}" or name.startswith(f"services.{service}.")


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert not imports.circles(imports.house().own())


def test_no_package_imports_itself_by_way_of_others() -> None:
    assert not imports.circles(imports.house().packages())


@pytest.mark.parametrize("service", SERVICES)
def test_chains_of_packages_are_short(service: str) -> None:
    chain = imports.longest_chain(imports.part(imports.house().packages(), lambda name: inside(name, service)))
    assert 1 <= len(chain) <= MOST_PACKAGES, " > ".join(chain)


@pytest.mark.parametrize("service", MOST_FILES)
def test_chains_of_files_are_short(service: str) -> None:
    """The worker's without core, which is held by the law for folders."""
    files = imports.house().own()
    chain = imports.longest_chain(imports.part(files, lambda name: inside(name, service) and not name.startswith(CORE)))
    assert 1 <= len(chain) <= MOST_FILES[service], " > ".join(chain)


def test_what_a_client_wrote_becomes_a_grammar_in_the_compiling_process_alone() -> None:
    compiling = [f"services.worker.grammar.compile.{name}" for name in ("grammar_source", "forking_compiler", "compiler_child")]
    files = imports.house().own()
    assert {name for name in files if compiling[0] in imports.reached(files, name)} == set(compiling[1:])


def test_no_folder_has_more_modules_than_a_reader_overlooks() -> None:
    house = imports.house()
    counts = Counter(house.folder(name) for name, path in house.modules.items() if path.name != "__init__.py")
    assert not {folder: count for folder, count in counts.items() if count > MOST_MODULES}


def test_the_picture_is_what_the_code_says() -> None:
    assert picture.rendered() in picture.PAGE.read_text(), "run `make docs`"
