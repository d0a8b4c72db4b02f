"""A request and its phases. The scheduler is the only writer; `move` is the only code that changes a phase."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.worker.core.memory import Lease
from services.worker.core.sampling import SamplingParams


class Phase(enum.IntEnum):
    WAITING = 0
    EXTEND = 1
    DECODE = 2
    FINISHED = 3


_LEGAL: dict[Phase, tuple[Phase, ...]] = {
    Phase.WAITING: (Phase.EXTEND, Phase.FINISHED),
    Phase.EXTEND: (Phase.DECODE, Phase.WAITING, Phase.FINISHED),
    Phase.DECODE: (Phase.WAITING, Phase.FINISHED),
    Phase.FINISHED: (),
}


@dataclass(slots=True, eq=False)
class Request:
    """seq: order of arrival, unique. num_sent: output tokens already told to the front end. deadline: absolute, or inf.

    lease is set exactly in EXTEND and DECODE. flight_step: the step that was uncommitted when the request lost its lease
    to retraction, whose sampled token still counts (-1: none).
    """

    seq: int
    peer: int
    handle: int
    request_id: str
    prompt_ids: NDArray[np.int32]
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    namespace: str
    priority: int
    interval: int
    arrival: float
    deadline: float
    tail_tokens: int
    output_ids: list[int] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    lease: Lease | None = None
    num_sent: int = 0
    num_cached_tokens: int = 0
    queue_s: float = -1.0
    flight_step: int = -1
    key: bytes = b""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    def move(self, phase: Phase) -> None:
        if phase not in _LEGAL[self.phase]:
            raise ValueError(f"request {self.request_id}: {self.phase.name} to {phase.name} is not a legal transition")
        self.phase = phase

    def tokens(self) -> NDArray[np.int32]:
        """int32[n]: prompt and committed output. What admission treats as the prompt."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, np.asarray(self.output_ids, dtype=np.int32)])

    def rekey(self) -> None:
        """Sets `key`, the bytes that the radix tree compares, to the tokens as they are now."""
        self.key = self.tokens().tobytes()
