"""Holds back text that is, or may become, a stop string, so that no part of one is given out.

The worker decides that a request has ended and by which stop string; here only the cut is made. Matching follows each stop
string by its Knuth-Morris-Pratt automaton, so that a character costs the same whatever is held; a stop string of which nothing
comes costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence


class _StopMatcher:
    """Follows one stop string through the text. matched is the length of its longest prefix that ends the text so far."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = [0]  # as far as they have been asked for, see _border_of

    def feed(self, text: str) -> int | None:
        """Reads on; the index in `text` just after the stop string's first end, or None. Not to be fed again after a match."""
        at = 0
        while at < len(text):
            if self.matched == 0:
                at = text.find(self.stop[0], at)
                if at < 0:
                    return None
            while self.matched and self.stop[self.matched] != text[at]:
                self.matched = self._border_of(self.matched)
            self.matched += self.stop[self.matched] == text[at]
            at += 1
            if self.matched == len(self.stop):
                return at
        return None

    def _border_of(self, length: int) -> int:
        """Of the stop string's prefix of so many characters: the length of its longest proper prefix that is also its suffix."""
        stop, borders = self.stop, self._borders
        for at in range(len(borders), length):
            border = borders[at - 1]
            while border and stop[at] != stop[border]:
                border = borders[border - 1]
            borders.append(border + (stop[at] == stop[border]))
        return borders[length - 1]


class StopHold:
    """Text in, text that may be given out. One caller at a time.

    From the first complete stop string on everything is held until finish(), whatever the worker has noticed.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        self._matchers = [_StopMatcher(stop) for stop in stops if stop]
        self._include_stop = include_stop
        self._held = ""
        self._match: tuple[int, int] | None = None  # (start, end) in _held of the stop string that was complete first

    @property
    def held_chars(self) -> int:
        return len(self._held)

    def push(self, text: str) -> str:
        if not self._matchers:
            return text
        if self._match is not None:
            self._held += text
            return ""
        return self._release(text)

    def finish(self, matched_stop: str) -> str:
        """What is left to give out: all that is held, but cut at the stop string that ended the request, if one did.

        A complete stop string cuts even where the worker named none ("") or one that comes later."""
        held, self._held = self._held, ""
        start = held.find(matched_stop) if matched_stop else -1
        cut = (start, start + len(matched_stop)) if start >= 0 else None
        if cut is None or (self._match is not None and self._match[0] < start):
            cut = self._match
        if cut is None:
            return held
        return held[: cut[1] if self._include_stop else cut[0]]

    def _release(self, text: str) -> str:
        before = len(self._held)
        self._held += text
        ends = [(before + end, -len(m.stop)) for m in self._matchers if (end := m.feed(text)) is not None]
        keep = max(m.matched for m in self._matchers)  # a complete one counts with its whole length
        cut = len(self._held) - keep
        if ends:
            cut = min(end + minus_length for end, minus_length in ends)
            end, minus_length = min(ends)
            self._match = (end + minus_length - cut, end - cut)
        released, self._held = self._held[:cut], self._held[cut:]
        return released
