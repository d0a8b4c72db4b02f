"""From the worker that has computed a prompt to the one that goes on with it (docs/design/prefill-and-decode.md)."""

from __future__ import annotations

from rootstock.v1 import worker_pb2
from services.gateway.dispatch.placement import Ahead, Kept, Link, Placement


def kept_by(link: Link, finish: worker_pb2.Finish, now: float) -> Kept | None:
    """What the link's worker keeps of it for the next one. None: no page. The link stays open as long as it may be kept."""
    info = link.info
    if info is None or not finish.HasField("room"):
        return None
    link.kept_until = max(link.kept_until, now + info.kv_hold_ms / 1000)
    return Kept(link, finish.handle, _source(link, info, finish.room), info.kv_layout)


def read_ahead(
    placement: Placement, prefill: Link, decode: Link, handle: int, room: worker_pb2.KvRoom, predicted_tokens: int
) -> Ahead:
    """The decode worker begins to read what the prefill worker has computed so far. handle, predicted_tokens: of the submit to
    come."""
    info, weights, choice = prefill.info, decode.weights, placement.choice
    assert info is not None, "who has said something is connected"
    prefetch = worker_pb2.Prefetch(
        handle=handle,
        cache_salt=choice.cache_salt,
        revision="" if weights is None else weights.revision,
        source=_source(prefill, info, room),
        priority=choice.priority,
    )
    decode.prefetch(placement, prefetch)
    return Ahead(decode, handle, placement.pool, predicted_tokens)


def _source(link: Link, info: worker_pb2.WorkerInfo, room: worker_pb2.KvRoom) -> worker_pb2.KvSource:
    """To be read at the host that discovery has named."""
    host = link.address.rpartition(":")[0]
    return worker_pb2.KvSource(address=f"{host}:{info.kv_port}", room=room)
