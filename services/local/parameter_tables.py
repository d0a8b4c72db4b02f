"""python -m rootstock_llm.services.local.parameter_tables writes the tables of fields and error codes into the pages of PAGES.

A table stands between the line `<!-- make docs: NAME -->` and the next line `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rootstock_llm.services.gateway.api import known_fields
from rootstock_llm.services.gateway.api.anthropic import operations as anthropic_operations
from rootstock_llm.services.gateway.api.anthropic import translation as anthropic_translation
from rootstock_llm.services.gateway.api.anthropic.types import MessagesRequest
from rootstock_llm.services.gateway.api.batches import operations as batches_operations
from rootstock_llm.services.gateway.api.document import server
from rootstock_llm.services.gateway.api.known_fields import KnownFields, Neutral
from rootstock_llm.services.gateway.api.openai import operations as openai_operations
from rootstock_llm.services.gateway.api.openai.types import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from rootstock_llm.services.gateway.api.responses import operations as responses_operations
from rootstock_llm.services.gateway.api.responses import translation as responses_translation
from rootstock_llm.services.gateway.api.responses.types import ResponsesRequest
from rootstock_llm.services.gateway.api.sglang import operations as sglang_operations
from rootstock_llm.services.gateway.api.sglang.types import NativeGenerateRequest, NativeSampling, ScoreRequest
from rootstock_llm.services.gateway.api.texts import operations as texts_operations
from rootstock_llm.services.gateway.generation.body_fields import AnswerBody
from rootstock_llm.services.gateway.generation.errors import BATCH_CODES, CODES
from rootstock_llm.services.shared.sampling_parameters import OPENAI, PARAMETERS, UNSERVED, Api, Kind, SamplingParameter

PAGES = ("docs/reference/api.md", "docs/how-to/batches.md", "docs/reference/sglang-api.md", "docs/reference/api-fields.md")
_TABLE = re.compile(r"(<!-- make docs: ([a-z ]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
_HEAD = "| field | values | default | effect |\n| --- | --- | --- | --- |\n"


def rendered(page: str) -> str:
    """Returns the page with the current tables. Raises KeyError if a comment names an unknown table."""
    return _TABLE.sub(lambda match: match[1] + TABLES[match[2]](), page)


def _openai_parameters() -> str:
    return _HEAD + "".join(_line(_openai_name(row), row) for row in PARAMETERS if any(api in row.names for api in OPENAI))


def _generate_parameters() -> str:
    rows = [_line(f"`{row.names[Api.GENERATE]}`", row) for row in PARAMETERS if Api.GENERATE in row.names]
    neutral = [row for row in UNSERVED if Api.GENERATE in row.apis and row.neutral]
    alone = [f"| `{row.name}` | only {_spelled(row.neutral)} | | Has no effect. |\n" for row in neutral]
    return "".join((_HEAD, *rows, *alone))


def _unserved_fields() -> str:
    options = {f"stream_options.{name}": values for name, values in known_fields.STREAM_OPTIONS.items()}
    groups: Mapping[str, Neutral] = {
        "sampling": known_fields.SAMPLING,
        "the prompt": known_fields.PROMPT,
        "the response": {**known_fields.ANSWER, **options},
        "routing and placement": known_fields.PLACEMENT,
        "names of fields of other servers": known_fields.OF_OTHERS,
        "only chat": known_fields.OF_CHAT,
        "completions and embeddings, which have no template": known_fields.OF_TEMPLATES,
        "only embeddings": known_fields.OF_EMBEDDINGS,
    }
    lines = [f"| {what} | {', '.join(_with_neutral(*item) for item in group.items())} |\n" for what, group in groups.items()]
    return "| subject | fields |\n| --- | --- |\n" + "".join(lines)


def _answer_fields() -> str:
    lines = [f"| `{name}` | {field.description} |\n" for name, field in AnswerBody.model_fields.items()]
    return "| field | meaning |\n| --- | --- |\n" + "".join(lines)


def _error_codes() -> str:
    lines = [
        f"| `{code}` | {', '.join(map(str, row.statuses))} | {row.meaning} | {row.remedy} |\n"
        for code, row in sorted(CODES.items())
    ]
    return "| code | status | meaning | remedy |\n| --- | --- | --- | --- |\n" + "".join(lines)


def _batch_codes() -> str:
    lines = [f"| `{code}` | {row.meaning} | {row.remedy} |\n" for code, row in sorted(BATCH_CODES.items())]
    return "| code | meaning | remedy |\n| --- | --- | --- |\n" + "".join(lines)


def _routes() -> str:
    lines = [f"| {each.tag} | `{each.method.upper()} {each.path}` | {each.summary} |\n" for each in OPERATIONS]
    return "| API | route | effect |\n| --- | --- | --- |\n" + "".join(lines)


def _fields_of(body: type[BaseModel], known: KnownFields) -> Callable[[], str]:
    """Returns a function that makes the table of a body's known fields: served, neutral and refused ones."""

    def table() -> str:
        rows = {name: f"served | {field.description or ''}" for name, field in body.model_fields.items()}
        rows = {**dict.fromkeys(known.unused, "neutral | Accepted with any value; does not change the response."), **rows}
        for name, neutral in known.neutral.items():
            taken = f"Accepted only with {_spelled(neutral)}." if neutral else ""
            rows.setdefault(name, f"{'neutral' if neutral else 'refused'} | {taken}")
        lines = [f"| `{name}` | {cells} |\n" for name, cells in sorted(rows.items())]
        return "| field | support | meaning |\n| --- | --- | --- |\n" + "".join(lines)

    return table


# Every operation that a gateway can serve.
OPERATIONS = (
    *openai_operations.OPERATIONS,
    *responses_operations.OPERATIONS,
    *anthropic_operations.OPERATIONS,
    *batches_operations.OPERATIONS,
    *sglang_operations.OPERATIONS,
    *texts_operations.OPERATIONS,
    *server.operations(metrics=True, playground=True),
)
# Request bodies with a table of fields in the reference pages, by the table's name. The second value lists the fields that the
# server knows and does not act on.
BODIES: Mapping[str, tuple[type[BaseModel], KnownFields]] = {
    "chat": (ChatCompletionRequest, known_fields.CHAT),
    "completion": (CompletionRequest, known_fields.COMPLETION),
    "embedding": (EmbeddingRequest, known_fields.EMBEDDING),
    "response": (ResponsesRequest, responses_translation.KNOWN),
    "message": (MessagesRequest, anthropic_translation.KNOWN),
    "generate": (NativeGenerateRequest, known_fields.NATIVE),
    "score": (ScoreRequest, known_fields.SCORE),
    "native sampling": (NativeSampling, known_fields.NATIVE_SAMPLING),
}
TABLES: Mapping[str, Callable[[], str]] = {
    "routes": _routes,
    **{f"{name} fields": _fields_of(body, known) for name, (body, known) in BODIES.items()},
    "sampling parameters": _openai_parameters,
    "sampling params": _generate_parameters,
    "unserved fields": _unserved_fields,
    "answer fields": _answer_fields,
    "error codes": _error_codes,
    "batch codes": _batch_codes,
}


def _openai_name(row: SamplingParameter) -> str:
    if all(api in row.names for api in OPENAI):
        return f"`{row.names[Api.CHAT]}`"
    return f"`{row.names[Api.CHAT]}`, chat" if Api.CHAT in row.names else f"`{row.names[Api.COMPLETION]}`, completions"


def _line(name: str, row: SamplingParameter) -> str:
    default = "" if row.default is None else _spelled((row.default,))
    note = " \\*" if row.of_model else ""
    return f"| {name} | {_values(row)} | {default}{note} | {row.doc} |\n"


def _values(row: SamplingParameter) -> str:
    counted = f"{row.least:,} to {row.most:,}" if row.least else f"up to {row.most:,}"
    match row.kind:
        case Kind.FLAG:
            return str(Kind.FLAG)
        case Kind.TEXTS:
            return f"a string, or {counted}, of 1 to {row.chars:,} characters"
        case Kind.STRINGS:
            return f"{counted} strings of 1 to {row.chars:,} characters"
        case Kind.TOKEN_IDS:
            return f"{counted} ids"
        case Kind.BIASES:
            return f"{counted} of {_range(row)}"
        case _:
            return _range(row)


def _range(row: SamplingParameter) -> str:
    if row.low is None or row.high is None:
        return f"at least {row.low:,}"
    low = f"above {_power(row.low)}" if row.excludes_low else _power(row.low)
    return f"{low} to {_power(row.high)}"


def _power(number: float) -> str:
    """Formats a number. Writes a large number as 2^N or 2^N - 1; the caller passes no other large number."""
    if abs(number) < 1 << 24:
        return f"{number:,.10g}"
    exponent, sign = round(abs(number)).bit_length() - 1, "-" if number < 0 else ""
    if abs(number) == 1 << exponent:
        return f"{sign}2^{exponent}"
    return f"{sign}2^{exponent + 1} - 1"


def _with_neutral(name: str, neutral: tuple[Any, ...]) -> str:
    return f"`{name}` ({_spelled(neutral)})" if neutral else f"`{name}`"


def _spelled(values: Iterable[Any]) -> str:
    numbers = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    return ", ".join(dict.fromkeys(map(json.dumps, numbers)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", default=PAGES, help="the pages to write; by default all")
    for name in parser.parse_args().pages:
        page = Path(name)
        page.write_text(rendered(page.read_text()))


if __name__ == "__main__":
    main()
