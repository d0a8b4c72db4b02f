"""Maps format names to parsers."""

from __future__ import annotations

from collections.abc import Mapping

from services.gateway.parsers.formats import harmony
from services.gateway.parsers.formats.deepseek import DEEPSEEK
from services.gateway.parsers.formats.hermes import HERMES
from services.gateway.parsers.formats.llama3_json import LLAMA3_JSON
from services.gateway.parsers.formats.mistral import MISTRAL
from services.gateway.parsers.formats.pythonic import PYTHONIC
from services.gateway.parsers.formats.qwen3_coder import QWEN3_CODER
from services.gateway.parsers.formats.reasoning import OutputReader
from services.gateway.parsers.output_parser import OutputParser, ParserSetup, PlainText
from services.gateway.parsers.reading import NO_CALLS, CallFormat, ReadingParser
from services.shared.output_formats import NONE, REASONING_FORMATS, OutputFormats

CALL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "llama3_json": LLAMA3_JSON,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK,
    NONE: NO_CALLS,
}


def output_parser(formats: OutputFormats, setup: ParserSetup) -> OutputParser:
    """Returns a parser for one output. Harmony's parser always reads reasoning and calls, because both are in its channels."""
    if "harmony" in (formats.tools, formats.reasoning):
        return ReadingParser(harmony.read, harmony.MARKS, setup)
    if formats == OutputFormats():
        return PlainText()
    calls, reasoning = CALL_FORMATS[formats.tools], REASONING_FORMATS[formats.reasoning]
    reader = OutputReader(calls, reasoning, formats.reasoning == "think_open")
    return ReadingParser(reader.read, (*calls.marks, *reasoning), setup)
