"""From the worker that has computed a prompt to the one that goes on with it (docs/pd.md)."""

from __future__ import annotations

from rootstock.v1 import worker_pb2
from services.gateway.dispatch.placement import Kept, Link


def kept_by(link: Link, finish: worker_pb2.Finish, now: float) -> Kept | None:
    """What the link's worker keeps of it for the next one, to be read at the host that discovery has named. None: no page. The
    link stays open as long as it may be kept."""
    info = link.info
    if info is None or not finish.HasField("room"):
        return None
    link.kept_until = max(link.kept_until, now + info.kv_hold_ms / 1000)
    host = link.address.rpartition(":")[0]
    source = worker_pb2.KvSource(address=f"{host}:{info.kv_port}", room=finish.room)
    return Kept(link, finish.handle, source, info.kv_layout)
