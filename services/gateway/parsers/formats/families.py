"""The formats by name, and the parser of an output in them."""

from __future__ import annotations

from collections.abc import Mapping

from services.gateway.parsers.formats import deepseek, harmony, hermes, llama3_json, mistral, pythonic, qwen3_coder
from services.gateway.parsers.formats.reasoning import ReasoningReader
from services.gateway.parsers.output_parser import OutputParser, ParserSetup, PlainText
from services.gateway.parsers.reading import Reader, ReadingParser
from services.shared.output_formats import NONE, REASONING_FORMATS, OutputFormats

READERS: Mapping[str, Reader] = {
    "hermes": hermes.read,
    "qwen3_coder": qwen3_coder.read,
    "llama3_json": llama3_json.read,
    "pythonic": pythonic.read,
    "mistral": mistral.read,
    "deepseek_v3": deepseek.read_fenced,
    "deepseek_v31": deepseek.read_bare,
    "harmony": harmony.read,
}


def output_parser(formats: OutputFormats, setup: ParserSetup) -> OutputParser:
    """One for one output. Harmony's channels hold reasoning and calls alike, so its parser does both, whichever is asked."""
    if "harmony" in (formats.tools, formats.reasoning):
        return ReadingParser(harmony.read, setup)
    inner = PlainText() if formats.tools == NONE else ReadingParser(READERS[formats.tools], setup)
    if formats.reasoning == NONE:
        return inner
    begin, end = REASONING_FORMATS[formats.reasoning]
    reasoning = ReasoningReader((begin, end), formats.reasoning == "think_open", inner, setup)
    return ReadingParser(reasoning.read, setup)
