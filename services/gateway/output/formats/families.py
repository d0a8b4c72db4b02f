"""Makes the parser for the formats of a model, and reads outputs that may begin with reasoning between two marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rootstock_llm.services.gateway.output.formats import harmony
from rootstock_llm.services.gateway.output.formats.deepseek import DEEPSEEK
from rootstock_llm.services.gateway.output.formats.json_calls import HERMES, LLAMA3_JSON, MISTRAL
from rootstock_llm.services.gateway.output.formats.pythonic import PYTHONIC
from rootstock_llm.services.gateway.output.formats.qwen3_coder import QWEN3_CODER
from rootstock_llm.services.gateway.output.output_parser import OutputParser, ParserSetup, PlainText
from rootstock_llm.services.gateway.output.reading import NO_CALLS, CallFormat, OutputReading, ReadingParser
from rootstock_llm.services.gateway.output.source import SPACE, Malformed, Marks, Steps
from rootstock_llm.services.shared.output_formats import NONE, REASONING_FORMATS, OutputFormats

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


class OutputReader:
    """Reads one output: optional reasoning between two marks, then text and calls.

    Some models end their output with calls without closing their reasoning first. The reader accepts these calls. If a call's
    opening mark is in the reasoning, the reader therefore holds the text from this mark on, and also reads it as calls. If other
    text or the closing mark of the reasoning comes before the output ends, the held text becomes reasoning.
    """

    def __init__(self, calls: CallFormat, marks: Sequence[str], opened: bool) -> None:
        """Makes the reader for a format of calls and a format of reasoning.

        Args:
            calls: The format of calls.
            marks: The opening and the closing mark of reasoning. Empty for a model without reasoning.
            opened: Whether the prompt ends with the opening mark.
        """
        self._calls = calls
        self._marks = marks
        self._opened = opened
        self._options = tuple(dict.fromkeys((*calls.opens, *calls.marks)))

    def read(self, reading: OutputReading) -> Steps[None]:
        if self._marks:
            yield from self._begin(reading)
        opens, text = self._calls.opens, reading.writer.text
        longer = tuple(mark for mark in self._marks if mark.startswith(opens))  # marks that begin with the opening of a call
        marks = Marks(*dict.fromkeys((*self._options, *(mark for mark in self._marks if mark not in longer))))
        while mark := (yield from reading.source.until(marks, text)):
            rest = yield from reading.source.choose([each[len(mark) :] for each in longer if each.startswith(mark)])
            if mark in opens and not rest:
                yield from self._calls.read(reading, mark)
            else:
                reading.writer.stray(mark + rest)

    def _begin(self, reading: OutputReading) -> Steps[None]:
        blanks: list[str] = []
        yield from reading.source.run(SPACE, blanks.append)
        begun = yield from reading.source.choose(self._marks[:1])
        if begun or self._opened:
            yield from self._reasoning(reading)
        else:
            reading.writer.text("".join(blanks))

    def _reasoning(self, reading: OutputReading) -> Steps[None]:
        """Reads the reasoning up to and including the closing mark, or to the end of the output."""
        source, writer, end = reading.source, reading.writer, self._marks[1]
        marks, closing = Marks(end, *(each for each in self._calls.opens if not end.startswith(each))), Marks(end)
        while mark := (yield from source.until(marks, writer.reasoning)):
            if mark == end:
                writer.end_reasoning()
                yield from source.space()
                return
            source.hold(mark)
            source.bind(closing)
            trial = reading.trial()
            try:
                ends_in_calls = yield from self._only_calls(trial, mark)
            except Malformed:  # the held text is too long
                ends_in_calls = False
            source.bind(None)
            held = source.release()
            if ends_in_calls and not (yield from source.peek()) and not source.was_cut:
                writer.end_reasoning()
                writer.log.extend(trial.writer.log.take())
            else:
                writer.reasoning(held)

    def _only_calls(self, trial: OutputReading, mark: str) -> Steps[bool]:
        """Reads calls to the end of the text or the source's bound. Returns True if it reads a known tool's call, and no text."""
        while mark:
            if mark in self._calls.opens:
                yield from self._calls.read(trial, mark)
            if trial.failed or trial.writer.wrote_text:
                return False
            yield from trial.source.space()
            mark = yield from trial.source.choose(self._options)
        return trial.writer.num_indexed > 0 and not (yield from trial.source.peek())


def output_parser(formats: OutputFormats, setup: ParserSetup) -> OutputParser:
    """Returns a parser for one output. The parser of harmony always reads both reasoning and calls, by their channels."""
    if "harmony" in (formats.tools, formats.reasoning):
        return ReadingParser(harmony.read, harmony.MARKS, setup)
    if formats.tools == formats.reasoning == NONE:
        return PlainText()
    calls, reasoning = CALL_FORMATS[formats.tools], REASONING_FORMATS[formats.reasoning]
    reader = OutputReader(calls, reasoning, formats.reasoning == "think_open")
    return ReadingParser(reader.read, (*calls.marks, *reasoning), setup)
