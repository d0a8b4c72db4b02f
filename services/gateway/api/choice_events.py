"""What a choice has said, as events of its parser, as it comes."""

from __future__ import annotations

from collections.abc import Iterable

from services.gateway.parsers.events import CallDropped, Event
from services.gateway.parsers.output_parser import OutputParser, Parsing, PlainText
from services.gateway.request.request import Delta


class ChoiceEvents:
    """Of one choice."""

    def __init__(self, parsing: Parsing | None) -> None:
        self._parsing = parsing
        self._parser: OutputParser = PlainText() if parsing is None else parsing.parser()

    def of(self, delta: Delta) -> list[Event]:
        """Of its deltas in turn."""
        events = list(self._parser.feed(delta.text))
        if delta.ending is not None:
            events += self._parser.finish(cut=delta.ending.finish_reason == "length")
        if self._parsing is not None:
            for event in events:
                if isinstance(event, CallDropped):
                    self._parsing.dropped()
        return events

    def replay(self, texts: Iterable[str]) -> None:
        """Of deltas whose events somebody has and has counted, as they were."""
        for text in texts:
            for _ in self._parser.feed(text):
                continue
