"""Finds the worker of a session.

The KV of a session is on one worker. Each gateway computes the worker from the session's id and the ready workers. So gateways
agree without communication and store no table.

A session id from a gateway ends in the mark of its worker, a hash of the worker's id. So the id always leads to this worker.
A session id from a client leads to the worker with the highest hash of worker and session id (rendezvous hashing). If a new
worker has the highest hash, the id leads to the new worker, and the session is lost.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from hashlib import blake2b

_GATEWAY_ID = re.compile(r"s-[0-9a-f]{32}-([0-9a-f]{8})")  # an id from a gateway; the group is the worker's mark


def worker_index(session_id: str, worker_ids: Sequence[str]) -> int | None:
    """Returns the index of a session's worker. An id with a worker's mark leads to this worker; a hash decides for other ids.

    Rendezvous hashing (Thaler and Ravishankar 1998) chooses the worker with the highest hash of worker and session. If a worker
    is added or removed, only the sessions of this worker move.

    Returns:
        None if there are no workers, or the id has the mark of a worker that is not in the list.
    """
    from_gateway = _GATEWAY_ID.fullmatch(session_id)
    if from_gateway is not None:
        marks = [_mark(worker_id) for worker_id in worker_ids]
        return marks.index(from_gateway[1]) if from_gateway[1] in marks else None
    if not worker_ids:
        return None
    return max(range(len(worker_ids)), key=lambda i: (_weight(session_id, worker_ids[i]), worker_ids[i]))


def new_session_id(worker_ids: Sequence[str]) -> str:
    """Returns a new id that leads to one of the workers. `worker_ids` must not be empty."""
    name = uuid.uuid4().hex
    index = worker_index(name, worker_ids)
    assert index is not None
    return f"s-{name}-{_mark(worker_ids[index])}"


def owned_id(session_id: str, key: str) -> str:
    """Returns the id by which workers know a session of an API key.

    No other API key can name the same session, whatever id its client sends. The result ends in the same mark as `session_id`.

    Args:
        key: Name of the API key; "" if the gateway has no API keys. The id is then unchanged.
    """
    if not key:
        return session_id
    from_gateway = _GATEWAY_ID.fullmatch(session_id)
    digest = blake2b(f"{len(key)}:{key}{session_id}".encode(), digest_size=16).hexdigest()
    return f"s-{digest}-{from_gateway[1]}" if from_gateway is not None else f"k-{digest}"


def _mark(worker_id: str) -> str:
    return blake2b(worker_id.encode(), digest_size=4).hexdigest()


def _weight(session_id: str, worker_id: str) -> bytes:
    return blake2b(session_id.encode(), digest_size=16, key=blake2b(worker_id.encode(), digest_size=32).digest()).digest()
