"""The tier in which a worker has a block of the prefix index. Standard library only, for the scheduler core."""

from __future__ import annotations

import enum


class BlockTier(enum.IntEnum):
    """The tier of the block's slowest page. A smaller value is faster. The names are part of Redis keys."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2
