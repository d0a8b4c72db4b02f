"""Replacements of DraftController.choose that draft regardless of cost and acceptance rate."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.planning.draft_controller import DraftController

Numbers = NDArray[np.int64]


def always(controller: DraftController, slots: Numbers, most: Numbers) -> Numbers:
    return np.minimum(most, controller._choices[-1])


def now_and_then() -> Callable[[DraftController, Numbers, Numbers], Numbers]:
    """Returns a replacement of DraftController.choose that drafts only in every third step."""
    steps = count()
    return lambda controller, slots, most: always(controller, slots, most) if next(steps) % 3 == 0 else np.zeros_like(most)
