"""The code excerpts and tests that the seeded faults name exist."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.areas import AREAS, FAULTS

ROOT = Path(__file__).resolve().parents[2]


def occurrences(path: str, text: str) -> int:
    file = ROOT / path
    return file.read_text().count(text) if file.is_file() else 0


def test_each_seeded_fault_matches_the_code_once() -> None:
    assert {fault.name: count for fault in FAULTS if (count := occurrences(fault.path, fault.right)) != 1} == {}
    assert [fault.name for fault in FAULTS if fault.right == fault.wrong] == []


def test_each_seeded_fault_refers_to_existing_test_files() -> None:
    assert [file for files in AREAS.values() for file in files if not (ROOT / file).is_file()] == []
    assert [fault.name for fault in FAULTS if not any(fault.only in file for file in AREAS[fault.area])] == []
    assert {fault.area for fault in FAULTS} == AREAS.keys()
