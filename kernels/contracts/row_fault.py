"""What can be wrong with one row of a step. No torch here: the scheduler's plan has it too."""

from __future__ import annotations

import enum


class RowFault(enum.IntEnum):
    """Ends the row's request alone. Kernels give NAN_LOGITS and NO_TOKEN_ALLOWED as their codes, and 0 for none."""

    NAN_LOGITS = 1
    OUT_OF_VOCAB = 2
    NO_TOKEN_ALLOWED = 3  # masks, bans and stop rules together leave nothing to sample
    FAILED = 4  # the row's own parameters could not be applied
    OUT_OF_MEMORY = 5  # the device had no room for the row's part of the step, however small
