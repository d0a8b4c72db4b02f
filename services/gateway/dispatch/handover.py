"""From the worker that has computed a prompt to the one that goes on with it (docs/pd.md)."""

from __future__ import annotations

from rootstock.v1 import worker_pb2
from services.gateway.dispatch.placement import Link


def source_of(link: Link, finish: worker_pb2.Finish) -> worker_pb2.KvSource | None:
    """Where the next worker reads what the link's has computed: at the host that discovery has named. None: there is no page."""
    info = link.info
    if info is None or not finish.HasField("room"):
        return None
    host = link.address.rpartition(":")[0]
    return worker_pb2.KvSource(address=f"{host}:{info.kv_port}", room=finish.room)
