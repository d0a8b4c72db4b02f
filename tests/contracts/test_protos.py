"""Rules for the protos: public_names.json has each field, enum value and method, and earlier versions can read new messages.

tests/contracts/test_public_names.py checks that a recorded field keeps its number, type and label.
"""

from __future__ import annotations

from google.protobuf.descriptor import EnumDescriptor

from rootstock_llm.protos import common_pb2
from tests.contracts import public_names


def test_public_names_file_has_every_proto_field() -> None:
    missing = public_names.current()["protos"] - {*public_names.recorded()["protos"]}
    assert not missing, f"run `make docs`: {sorted(missing)}"


def test_every_enum_begins_with_an_unspecified_value() -> None:
    enums: list[EnumDescriptor] = [e for file in public_names.PROTO_FILES for e in file.enum_types_by_name.values()]
    assert enums
    for enum in enums:
        assert enum.values[0].number == 0
        assert enum.values[0].name.endswith("_UNSPECIFIED")


def test_every_sampling_field_has_presence() -> None:
    for field in common_pb2.SamplingParams.DESCRIPTOR.fields:
        assert field.is_repeated or field.has_presence, field.name


def test_enums_of_the_core_equal_the_enums_of_the_messages() -> None:
    from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, FinishReason

    assert {f"FINISH_REASON_{r.name}": r.value for r in FinishReason} == dict(common_pb2.FinishReason.items()[1:])
    codes = {f"ERROR_CODE_{c.name}": c.value for c in ErrorCode if c}
    assert codes == dict(common_pb2.ErrorCode.items()[1:])
