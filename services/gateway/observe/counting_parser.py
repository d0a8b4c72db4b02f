"""A parser that counts the calls of which a client sees nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.gateway.parsers.events import CallDropped, Event
from services.gateway.parsers.output_parser import MakeParser, OutputParser


def counting(make: MakeParser, dropped: Callable[[], None]) -> MakeParser:
    """dropped: called for each call that is dropped."""
    return lambda formats, setup: _Counting(make(formats, setup), dropped)


class _Counting:
    def __init__(self, parser: OutputParser, dropped: Callable[[], None]) -> None:
        self._parser = parser
        self._dropped = dropped

    def feed(self, text: str) -> Sequence[Event]:
        return self._counted(self._parser.feed(text))

    def finish(self) -> Sequence[Event]:
        return self._counted(self._parser.finish())

    def _counted(self, events: Sequence[Event]) -> Sequence[Event]:
        for event in events:
            if isinstance(event, CallDropped):
                self._dropped()
        return events
