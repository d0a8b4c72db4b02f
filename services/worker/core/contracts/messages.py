"""What the core takes in and gives out, besides plans and results. Plain data.

A request is named by (peer, handle): peer is the worker's number for a front end's stream, handle that front end's number.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.plan import PromptLogprobs, RowLogprobs, no_tokens
from services.worker.core.contracts.reservations import KvReservation, KvSource
from services.worker.core.contracts.sampling import SamplingParams
from services.worker.core.contracts.transfers import Tier


class FinishReason(enum.IntEnum):
    LENGTH = 1
    MATCHED_TOKEN = 2
    MATCHED_STRING = 3
    ABORT = 4
    MATCHED_REGEX = 5
    EMBEDDED = 6  # a vector was asked for, and computed
    HANDED_OVER = 7  # another worker goes on with it
    SCORED = 8  # log probabilities behind the prompt were asked for, and computed


class ErrorCode(enum.IntEnum):
    NONE = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 2
    QUEUE_FULL = 3
    TIMEOUT = 4
    OUT_OF_MEMORY = 5
    INTERNAL = 6
    UNAVAILABLE = 7
    OTHER_WEIGHTS = 8


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """Where in a session a request goes on. parent: request id of an earlier turn, "" for the session's start (its first
    turn's, where there is one and nothing is replaced: the latest turn). offset: tokens of the parent's context that are
    kept, -1 for all. replace: the parent's later turns are forgotten. drop_previous_output: of the parent only its prompt counts.
    """

    session_id: str
    parent: str = ""
    offset: int = -1
    replace: bool = False
    drop_previous_output: bool = False


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """Keys of a prompt's whole pages, for tiers of KV, in the tree of this name: where it is another one's by now, they count for
    nothing."""

    tree: str
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Submit:
    """prompt_ids: int32[n], n >= 1; in a session, what this turn adds. timeout_s: from arrival to the last token, 0 for none.
    salt, lora: cache namespace. routing_key: requests of one key share a cache elsewhere; the routing-key policy groups them.
    output_ids: output that the request has already, sampled elsewhere; it goes on after it as a retracted request does.
    revision: of the weights that it is for, "" for any. tenant: whose it is, b"" for nobody in particular; weight: of its share,
    above 0. batch: of prompts of this peer that came together, 0 for one that came alone. page_keys: made by whoever read the
    message; None: the core makes those that it needs. hand_over: the request ends with its next token, if that does not end it
    anyway, and its pages are kept in this room. source: where they can be read, None for nowhere. Neither in a session nor for an
    embedding or a score. prediction: int32[n], text that the output may turn out to be: for guesses, and for nothing else.
    """

    peer: int
    handle: int
    request_id: str
    prompt_ids: NDArray[np.int32]
    params: SamplingParams
    stream: bool = True
    salt: str = ""
    priority: int = 0
    timeout_s: float = 0.0
    lora: str = ""
    routing_key: str = ""
    session: SessionTurn | None = None
    output_ids: tuple[int, ...] = ()
    revision: str = ""
    tenant: bytes = b""
    batch: int = 0
    weight: float = 1.0
    page_keys: PromptKeys | None = None
    hand_over: KvReservation | None = None
    source: KvSource | None = None
    prediction: NDArray[np.int32] = field(default_factory=no_tokens)


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Pages of a prompt that another worker computes just now, to be read before the request comes that goes on with it, under
    this handle. prompt_ids: int32[n], n >= 1. salt, lora, revision, page_keys, priority: as of a Submit. source: with the pages
    that can be read."""

    peer: int
    handle: int
    prompt_ids: NDArray[np.int32]
    source: KvSource
    salt: str = ""
    lora: str = ""
    revision: str = ""
    page_keys: PromptKeys | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class PagesReady:
    """Of the prompt of this handle so many pages, from its first on, can be read from the room: what a prefill worker has
    computed of it so far."""

    handle: int
    room: KvReservation
    num_pages: int


@dataclass(frozen=True, slots=True)
class Verified:
    """Of a request: decode rows that verified guesses, the guesses in them, and those that were right. predicted,
    right_predicted: those of both that were of the request's prediction."""

    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    predicted: int = 0
    right_predicted: int = 0

    def and_row(self, drafted: int, accepted: int, predicted: bool = False) -> Verified:
        """predicted: its guesses were of the prediction."""
        assert 0 <= accepted <= drafted, "what is accepted was guessed"
        of_prediction = (drafted, accepted) if predicted else (0, 0)
        return Verified(
            self.rows + 1,
            self.drafted + drafted,
            self.accepted + accepted,
            self.predicted + of_prediction[0],
            self.right_predicted + of_prediction[1],
        )


NOTHING_VERIFIED = Verified()


@dataclass(frozen=True, slots=True)
class Finish:
    """A request's one terminal output. queue_s: from arrival to first admission, or to the end if there was none.
    cached_from: cached_tokens by the tier that they were in, empty where there is one.
    matched_stop: the stop string or the stop pattern. embedding: float32[dimensions] with EMBEDDED. label_logprobs:
    float32[labels] with SCORED, see ScoreParams. field: with
    INVALID_ARGUMENT what is at fault, "" for nothing in particular; message says why, without the field's name, which
    goes before it on the wire. room, room_pages: with HANDED_OVER, where so many whole pages of it are kept; None: nowhere."""

    handle: int
    request_id: str
    reason: FinishReason
    matched_stop: str = ""
    matched_token: int = -1
    error: ErrorCode = ErrorCode.NONE
    message: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_from: dict[Tier, int] = field(default_factory=dict)
    completion_tokens: int = 0
    queue_s: float = 0.0
    retractions: int = 0
    verified: Verified = NOTHING_VERIFIED
    embedding: NDArray[np.float32] | None = None
    label_logprobs: NDArray[np.float32] | None = None
    field: str = ""
    element: int | None = None  # index of the value of a repeated `field`
    room: KvReservation | None = None
    room_pages: int = 0


@dataclass(slots=True)
class PeerOutput:
    """One step's news for one front end: parallel columns. handles[i] got counts[i] new tokens; tokens is flat.

    logprobs: (handle, values of each of that row's new tokens), for rows whose request wants them. prompt_logprobs:
    (handle, values) of the next prompt tokens, in order of position. predicted: (handle, what its guesses have come to up to
    these tokens), for requests with a prediction. ready: of prompts that are still computed.
    """

    peer: int
    handles: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    logprobs: list[tuple[int, list[RowLogprobs]]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = field(default_factory=list)
    predicted: list[tuple[int, Verified]] = field(default_factory=list)
    ready: list[PagesReady] = field(default_factory=list)


class PauseMode(enum.StrEnum):
    """What a pause does to requests that are here. New ones wait until it ends, whatever the mode."""

    ABORT = "abort"  # they end
    RETRACT = "retract"  # running ones give their memory back and wait; their cached prefixes may be flushed
    IN_PLACE = "in_place"  # they keep their memory and go on where they were


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One message for each front end that has news."""

    peers: tuple[PeerOutput, ...]
