"""The code has every public name in public_names.json. A name may be removed only together with its record."""

from __future__ import annotations

import pytest

from tests.contracts import public_names
from tests.contracts.public_names import complaint, current, merged, recorded, removed, rendered
from tests.contracts.schema_names import names_of


@pytest.mark.parametrize("kind", recorded())
def test_code_has_every_recorded_name(kind: str) -> None:
    gone = removed({kind: recorded()[kind]}, current())
    assert not gone, complaint(gone)


@pytest.mark.parametrize("kind", public_names.KINDS)
def test_removed_name_is_found_in_every_kind_of_names(kind: str) -> None:
    first = min(recorded()[kind])
    assert removed(recorded(), {**current(), kind: current()[kind] - {first}}) == [f"{kind}: {first}"]


def test_record_is_sorted_with_one_name_per_line() -> None:
    text = public_names.RECORD.read_text()
    assert text == rendered(merged(recorded(), {}))
    assert [line for line in text.splitlines() if line.count('"') > 2] == []


def test_added_names_are_not_reported_as_removed() -> None:
    assert removed({"flags": ["a --x"]}, {"flags": ["a --x", "a --y"], "tunables": ["z"]}) == []


@pytest.mark.parametrize(
    "now",
    [{"metrics": ["a_total"]}, {"metrics": ["a_total", "a_total{name}"]}, {"metrics": ["a_total", "b_total{model}"]}],
    ids=["label removed", "label renamed", "label moved"],
)
def test_removed_label_is_reported_when_the_metric_stays(now: public_names.Names) -> None:
    assert removed({"metrics": ["a_total", "a_total{model}"]}, now) == ["metrics: a_total{model}"]


def test_each_name_of_a_missing_kind_is_reported_as_removed() -> None:
    assert removed({"flags": ["a --y", "a --x"]}, {}) == ["flags: a --x", "flags: a --y"]


def test_message_about_removed_names_has_each_name_and_the_remedies() -> None:
    text = complaint(["flags: a --x", "metrics: b"])
    assert text.splitlines()[1:3] == ["  flags: a --x", "  metrics: b"]
    assert "alias for one release" in text and "state the removal in CHANGELOG" in text and "--drop" in text


def test_merged_record_keeps_removed_names_and_adds_new_names() -> None:
    record = {"flags": ["a --x"], "metrics": ["m"]}
    now = {"flags": {"a --y"}, "tunables": {"t"}}
    assert merged(record, now) == {"flags": ["a --x", "a --y"], "metrics": ["m"], "tunables": ["t"]}


def test_schema_names_are_paths_of_fields_and_allowed_words() -> None:
    choice = {"properties": {"kind": {"enum": ["a", "b", 1]}, "next": {"$ref": "#/$defs/Choice"}}}
    schema = {
        "properties": {
            "choices": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/Choice"}, {"type": "null"}]}},
            "by_name": {"additionalProperties": {"properties": {"x": {"const": "one"}}}},
            "foreign": {"x-foreign-key": True, "properties": {"y": {}}},
        }
    }
    assert names_of(schema, {"Choice": choice}) == {
        *("choices", "choices[].kind", "choices[].kind = a", "choices[].kind = b", "choices[].next"),
        *("by_name", "by_name.*.x", "by_name.*.x = one"),
    }
