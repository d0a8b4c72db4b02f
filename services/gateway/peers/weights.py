"""What must be equal on two workers for one to go on with the other's answer."""

from __future__ import annotations

from typing import NamedTuple

from rootstock.v1 import worker_pb2


class Weights(NamedTuple):
    """As a worker's hello names them; equal where they are, by every byte."""

    model: str
    revision: str
    tokenizer: str


def weights_of(info: worker_pb2.WorkerInfo) -> Weights:
    return Weights(info.model, info.revision, info.tokenizer)
