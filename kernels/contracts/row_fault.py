"""Defines the faults of one row of a step. The module does not import torch, because the scheduler's plan imports it."""

from __future__ import annotations

import enum


class RowFault(enum.IntEnum):
    """A fault of one row of a step. It ends the request of this row; the other requests of the step continue.

    Sampling kernels report NAN_LOGITS and NO_TOKEN_ALLOWED by these values, and 0 for no fault.
    """

    NAN_LOGITS = 1  # the largest raw logit or an element of the embedding is NaN or infinite
    OUT_OF_VOCAB = 2  # a token id of the row is outside the vocabulary
    NO_TOKEN_ALLOWED = 3  # masks, bans and stop rules together leave no token to sample
    FAILED = 4  # the sampling parameters of the row could not be applied, or its DRY penalties could not be computed
    OUT_OF_MEMORY = 5  # the device has too little memory for the row's part of the step, even in the smallest pieces
