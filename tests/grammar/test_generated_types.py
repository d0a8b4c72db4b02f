"""Tests schemas of zod's and pydantic's types: all output validates, or the refusal of the schema names its unsupported keyword.

`zod_schemas.json` holds `z.toJSONSchema(TYPE, {io: "input"})` for each type: alone, and as the only property of a strict object.
jsonschema reads patterns as Python does: digits, blanks and ends of lines match more than in ECMA 262.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import random
import re
import typing
import uuid
import zoneinfo
from typing import Annotated, Any, Literal, NamedTuple

import jsonschema
import pydantic
import pytest
import typing_extensions
from pydantic import Field

from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarSpec
from rootstock_llm.services.worker.grammar.compile.grammar_compiler import Compiled
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused
from tests.grammar import model
from tests.night import NIGHTLY

WRITES = 200 if NIGHTLY else 3  # outputs per schema
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
ZOD = json.loads((pathlib.Path(__file__).parent / "zod_schemas.json").read_text())
ZOD_SCHEMAS = {f"{name} {form}": schema for name, forms in ZOD["schemas"].items() for form, schema in forms.items()}
# Paths of refused keywords. Their reasons are in docs/how-to/structured-output.md.
REFUSED_OF_ZOD = {"z.emoji() alone": "#/pattern", "z.emoji() required": "#/properties/value/pattern"}
CLOSERS = model.CLOSERS | {b"@", b".", b"a", b":", b"/"}  # these complete an email or IP address, and a URL


class Kind(enum.Enum):
    A = "a"
    B = "b"


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str = "Rex"


class Tree(pydantic.BaseModel):
    value: int
    children: list[Tree] = []


class Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    a: int


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int


class Empty(pydantic.BaseModel):
    pass


class Point(NamedTuple):
    x: int
    y: str = "0"


class Record(typing_extensions.TypedDict):
    a: int
    b: typing_extensions.NotRequired[str]


Small = Annotated[str, Field(pattern="^[a-z]+$")]
PYDANTIC: dict[str, Any] = {
    **{kind.__name__: kind for kind in (str, int, float, bool, bytes, complex, list, dict, object)},
    **{kind.__name__: kind for kind in (Cat, Tree, Closed, Open, Empty, Point, Record, Kind, Number)},
    **{kind.__name__: kind for kind in (decimal.Decimal, fractions.Fraction, pathlib.Path, re.Pattern, zoneinfo.ZoneInfo)},
    **{kind.__name__: kind for kind in (uuid.UUID, datetime.datetime, datetime.date, datetime.time, datetime.timedelta)},
    **{
        kind.__name__: kind
        for kind in (
            *(ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Network),
            *(ipaddress.IPv4Interface, ipaddress.IPv6Interface),
            *(pydantic.IPvAnyAddress, pydantic.IPvAnyNetwork, pydantic.IPvAnyInterface),
            *(pydantic.AnyUrl, pydantic.HttpUrl, pydantic.FileUrl, pydantic.PostgresDsn, pydantic.RedisDsn, pydantic.MongoDsn),
            *(pydantic.SecretStr, pydantic.SecretBytes, pydantic.ByteSize, pydantic.ImportString, pydantic.Json),
        )
    },
    **{
        name: getattr(pydantic, name)
        for name in (
            *("UUID1", "UUID3", "UUID4", "UUID5", "UUID6", "UUID7", "UUID8", "PositiveInt", "NonNegativeFloat", "FiniteFloat"),
            *(
                "StrictStr",
                "AwareDatetime",
                "NaiveDatetime",
                "PastDate",
                "FutureDatetime",
                "FilePath",
                "DirectoryPath",
                "NewPath",
            ),
            *("Base64Bytes", "Base64Str", "Base64UrlBytes", "Base64UrlStr", "JsonValue"),
        )
    },
    "Any": Any,
    "None": None,
    "email": Annotated[str, Field(json_schema_extra={"format": "email"})],
    "constr(min_length=1)": Annotated[str, Field(min_length=1)],
    "constr(min_length=1, max_length=5)": Annotated[str, Field(min_length=1, max_length=5)],
    "constr(pattern)": Small,
    "constr(pattern, min_length=2, max_length=40)": Annotated[str, Field(pattern="^[a-z]+$", min_length=2, max_length=40)],
    "constr(pattern with a lookahead)": Annotated[str, Field(json_schema_extra={"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"})],
    "conint(gt=0)": Annotated[int, Field(gt=0)],
    "conint(ge=1, le=10)": Annotated[int, Field(ge=1, le=10)],
    "conint(multiple_of=5)": Annotated[int, Field(multiple_of=5)],
    "conint(ge=0, le=100, multiple_of=5)": Annotated[int, Field(ge=0, le=100, multiple_of=5)],
    "conint(ge=-7, lt=1000, multiple_of=7)": Annotated[int, Field(ge=-7, lt=1000, multiple_of=7)],
    "confloat(ge=0, le=1)": Annotated[float, Field(ge=0, le=1)],
    "confloat(multiple_of=0.25)": Annotated[float, Field(multiple_of=0.25)],
    "confloat(ge=0, le=5, multiple_of=0.5)": Annotated[float, Field(ge=0, le=5, multiple_of=0.5)],
    "confloat(multiple_of=0.01)": Annotated[float, Field(multiple_of=0.01)],
    "condecimal(max_digits=8, decimal_places=2)": Annotated[decimal.Decimal, Field(max_digits=8, decimal_places=2)],
    "Literal": Literal["a", 1, True, None],
    "list[int]": list[int],
    "conlist(int, min_length=1, max_length=3)": Annotated[list[int], Field(min_length=1, max_length=3)],
    "tuple[int, str]": tuple[int, str],
    "tuple[int, ...]": tuple[int, ...],
    "set[int]": set[int],
    "frozenset[str]": frozenset[str],
    "deque[int]": collections.deque[int],
    "dict[str, int]": dict[str, int],
    "dict[int, str]": dict[int, str],
    "dict[Kind, int]": dict[Kind, int],
    "dict[Literal, int]": dict[Literal["a", "b"], int],
    "dict[pattern, int]": dict[Small, int],
    "dict[UUID, int]": dict[uuid.UUID, int],
    "dict[date, int]": dict[datetime.date, int],
    "dict[str, int], min_length=1": Annotated[dict[str, int], Field(min_length=1)],
    "dict[str, int], max_length=3": Annotated[dict[str, int], Field(max_length=3)],
    "dict[str, int], min_length=2": Annotated[dict[str, int], Field(min_length=2)],
    "Optional[int]": typing.Optional[int],  # noqa: UP045
    "int | str": int | str,
    "Cat | Dog": Cat | Dog,
    "discriminated Cat | Dog": Annotated[Cat | Dog, Field(discriminator="kind")],
    "Json[list[int]]": pydantic.Json[list[int]],
}
REFUSED_OF_PYDANTIC = {  # by type: the keyword of its schema that is refused
    "Pattern": "format",
    "ZoneInfo": "format",
    "HttpUrl": "format",
    "Json": "contentMediaType",
    "Json[list[int]]": "contentMediaType",
    "confloat(multiple_of=0.01)": "multipleOf",
    "dict[str, int], min_length=2": "minProperties",
    "set[int]": "uniqueItems",
    "frozenset[str]": "uniqueItems",
}


def of_pydantic(name: str) -> Any:
    made: type[pydantic.BaseModel] = pydantic.create_model("Made", value=(PYDANTIC[name], ...))
    return made.model_json_schema()


def compiled(schema: Any) -> Compiled:
    return model.compiled(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


def check_outputs(name: str, schema: Any) -> None:
    grammar = compiled(schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    chooser = random.Random(name)
    texts = [model.write(grammar, chooser, free_tokens=chooser.choice([0, 5, 30]), closers=CLOSERS) for _ in range(WRITES)]
    for text in texts:
        assert text is not None, "the output did not end within the limit of tokens"
        errors = [error.message for error in validator.iter_errors(json.loads(text))]
        assert not errors, f"{text}: {errors[:1]}"


def refused_keyword(schema: Any) -> str:
    with pytest.raises(GrammarRefused) as refusal:
        compiled(schema)
    return refusal.value.path


def test_zod_data_has_a_schema_of_each_type() -> None:
    assert ZOD["zod"] == "4.6.7" and len(ZOD["schemas"]) == 71


@pytest.mark.parametrize("name", [name for name in ZOD_SCHEMAS if name not in REFUSED_OF_ZOD])
def test_output_is_valid_when_zod_wrote_the_schema(name: str) -> None:
    check_outputs(name, ZOD_SCHEMAS[name])


@pytest.mark.parametrize("name", REFUSED_OF_ZOD)
def test_zod_schema_is_refused_at_an_unsupported_keyword(name: str) -> None:
    assert refused_keyword(ZOD_SCHEMAS[name]) == REFUSED_OF_ZOD[name]


@pytest.mark.parametrize("name", [name for name in PYDANTIC if name not in REFUSED_OF_PYDANTIC])
def test_output_is_valid_when_pydantic_wrote_the_schema(name: str) -> None:
    check_outputs(name, of_pydantic(name))


@pytest.mark.parametrize("name", REFUSED_OF_PYDANTIC)
def test_pydantic_schema_is_refused_at_an_unsupported_keyword(name: str) -> None:
    assert refused_keyword(of_pydantic(name)) == f"#/properties/value/{REFUSED_OF_PYDANTIC[name]}"
