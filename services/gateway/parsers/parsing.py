"""How the outputs of one request are read: a parser for each, all of the same make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.parsers.formats.families import output_parser
from services.gateway.parsers.output_parser import OutputParser, ParserSetup
from services.shared.output_formats import OutputFormats


@dataclass(frozen=True, slots=True)
class Parsing:
    formats: OutputFormats
    setup: ParserSetup

    @property
    def kept_tokens(self) -> Sequence[str]:
        """Special tokens that the text must have, by their text."""
        return self.formats.kept

    def parser(self) -> OutputParser:
        """For one output."""
        return output_parser(self.formats, self.setup)
