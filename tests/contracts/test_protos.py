"""The wire stays readable by older peers: a field that was released keeps its number, type and label.

python -m tests.contracts.test_protos adds to protos.json what is not in it yet, and changes nothing that is.
"""

from __future__ import annotations

import json
from pathlib import Path

from google.protobuf.descriptor import EnumDescriptor, FileDescriptor

from rootstock.v1 import common_pb2, control_pb2, detokenizer_pb2, gateway_pb2, kv_pb2, tokenizer_pb2, worker_pb2

GOLDEN = Path(__file__).with_name("protos.json")
FILES: list[FileDescriptor] = [
    m.DESCRIPTOR for m in (common_pb2, tokenizer_pb2, detokenizer_pb2, worker_pb2, control_pb2, gateway_pb2, kv_pb2)
]


def shape() -> dict[str, dict[str, list[object]]]:
    """message or enum → field → [number, type, repeated, has presence]."""
    out: dict[str, dict[str, list[object]]] = {}
    for file in FILES:
        for message in file.message_types_by_name.values():
            out[message.full_name] = {f.name: [f.number, f.type, f.is_repeated, f.has_presence] for f in message.fields}
        for enum in file.enum_types_by_name.values():
            out[enum.full_name] = {value.name: [value.number] for value in enum.values}
    return out


def test_released_fields_keep_their_numbers_and_types() -> None:
    now = shape()
    for name, fields in json.loads(GOLDEN.read_text()).items():
        for field, wire in fields.items():
            assert now[name][field] == wire, f"{name}.{field} has changed; give the new meaning a new field"


def test_the_golden_file_knows_every_field() -> None:
    golden = json.loads(GOLDEN.read_text())
    missing = [f"{name}.{field}" for name, fields in shape().items() for field in fields if field not in golden.get(name, {})]
    assert not missing, f"run `python -m tests.contracts.test_protos`: {missing}"


def test_what_is_added_changes_nothing_that_is_there() -> None:
    golden = {"M": {"old": [1, 3, False, True]}}
    now: dict[str, dict[str, list[object]]] = {"M": {"old": [9, 9, True, True], "new": [2, 3, False, True]}, "N": {"x": [0]}}
    assert with_new_fields(golden, now) == {"M": {"old": [1, 3, False, True], "new": [2, 3, False, True]}, "N": {"x": [0]}}


def with_new_fields(
    golden: dict[str, dict[str, list[object]]], now: dict[str, dict[str, list[object]]]
) -> dict[str, dict[str, list[object]]]:
    return {name: {**now.get(name, {}), **golden.get(name, {})} for name in {**golden, **now}}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(with_new_fields(json.loads(GOLDEN.read_text()), shape()), indent=1) + "\n")


def test_enums_begin_with_unspecified() -> None:
    enums: list[EnumDescriptor] = [e for file in FILES for e in file.enum_types_by_name.values()]
    assert enums
    for enum in enums:
        assert enum.values[0].number == 0
        assert enum.values[0].name.endswith("_UNSPECIFIED")


def test_every_sampling_field_knows_whether_it_was_set() -> None:
    for field in common_pb2.SamplingParams.DESCRIPTOR.fields:
        assert field.is_repeated or field.has_presence, field.name


def test_the_cores_enums_are_the_wires() -> None:
    from services.worker.core.contracts.messages import ErrorCode, FinishReason

    assert {f"FINISH_REASON_{r.name}": r.value for r in FinishReason} == dict(common_pb2.FinishReason.items()[1:])
    codes = {f"ERROR_CODE_{c.name}": c.value for c in ErrorCode if c}
    assert codes == dict(common_pb2.ErrorCode.items()[1:])
