"""Where a worker has a block of the prefix index: in which tier its slowest page lies. Pure: the scheduler core uses it too."""

from __future__ import annotations

import enum


class BlockTier(enum.IntEnum):
    """A lower one is faster. Names are those of the index in Redis."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2
