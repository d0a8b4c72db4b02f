"""The cache groups of a model: the layers whose cache is not the keys and values of every token.

Pages have the keys and values of the layers with full attention. A cache group has units instead, see core/kv/cache_units.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CacheKind(enum.StrEnum):
    WINDOW = "window"  # keys and values of layers that attend to the last tokens
    STATE = "state"  # states of recurrent layers


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The layers of one CacheKind. Layers with windows of several sizes form one group with the largest window."""

    kind: CacheKind
    num_units: int
    window: int = 0  # number of last tokens, including the token itself, to which a token attends; 0 for states
    unit_bytes: int = 0  # bytes of a unit; 0 if no tier and no remote worker gets units

    def num_parts(self, page_bytes: int) -> int:
        """Returns the number of pages of `page_bytes` bytes that a unit takes outside of the device. The last page is padded."""
        return -(-self.unit_bytes // page_bytes)


SPARE_PAGES = 2  # pages at both ends of a window that are partly outside of it


def states_per_slot(max_drafts: int) -> int:
    """Returns the largest number of states of a slot: at the last page end, and before and after the newest step.

    With draft tokens, the newest step may also store the state at a page end between accepted draft tokens.
    """
    return 4 if max_drafts else 3


def draft_window_tokens(max_drafts: int) -> int:
    """Returns the number of tokens beyond the window for which a decode row needs window units because of draft tokens.

    These are the tokens of the step in flight, the tokens of the next step, and the accepted tokens after the page end whose
    window the slot keeps.
    """
    return 3 * (max_drafts + 1) if max_drafts else 0


def window_pages(tokens: int, page_size: int, pages_per_slot: int) -> int:
    """Returns the largest number of pages of a slot over which `tokens` consecutive tokens can extend."""
    return min(-(-tokens // page_size) + SPARE_PAGES, pages_per_slot)
