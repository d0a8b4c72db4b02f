"""What the core takes in and gives out, besides plans and results. Plain data.

A request is named by (peer, handle): peer is the worker's number for a front end's stream, handle that front end's number.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.worker.core.sampling import SamplingParams


class FinishReason(enum.IntEnum):
    LENGTH = 1
    MATCHED_TOKEN = 2
    MATCHED_STRING = 3
    ABORT = 4


class ErrorCode(enum.IntEnum):
    NONE = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 2
    QUEUE_FULL = 3
    TIMEOUT = 4
    OUT_OF_MEMORY = 5
    INTERNAL = 6
    UNAVAILABLE = 7


@dataclass(frozen=True, slots=True)
class Submit:
    """prompt_ids: int32[n], n >= 1. timeout_s: from arrival to the last token, 0 for none. salt: cache namespace."""

    peer: int
    handle: int
    request_id: str
    prompt_ids: NDArray[np.int32]
    params: SamplingParams
    stream: bool = True
    salt: str = ""
    priority: int = 0
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """A request's one terminal output. queue_s: from arrival to first admission, or to the end if there was none."""

    handle: int
    request_id: str
    reason: FinishReason
    matched_stop: str = ""
    matched_token: int = -1
    error: ErrorCode = ErrorCode.NONE
    message: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float = 0.0


@dataclass(slots=True)
class PeerOutput:
    """One step's news for one front end: parallel columns. handles[i] got counts[i] new tokens; tokens is flat."""

    peer: int
    handles: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepStats:
    """Ints and ratios for metrics: gauges as they are now, then counters since the start (names end in _total)."""

    num_running: int
    num_waiting: int
    pages_leased: int
    pages_cached: int
    pages_evictable: int
    pages_free: int
    new_token_ratio: float
    batch_is_full: bool
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    retractions_total: int
    evicted_pages_total: int
    requests_total: int
    aborts_total: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One message for each front end that has news."""

    peers: tuple[PeerOutput, ...]
