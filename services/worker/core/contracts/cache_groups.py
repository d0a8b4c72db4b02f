"""The cache groups of a model: the layers whose cache is not the keys and values of every token.

Pages hold the keys and values of the layers with full attention. Each further group has units, see core/kv/cache_units.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CacheKind(enum.StrEnum):
    WINDOW = "window"  # keys and values of layers that attend to the last tokens
    STATE = "state"  # states of recurrent layers


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The layers of one kind. Layers with windows of several sizes form one group with the largest window."""

    kind: CacheKind
    num_units: int
    unit_bytes: int
    window: int = 0  # number of last tokens, including the token itself, to which a token attends; 0 for states
