"""Where a session lives.

A session's KV is on one worker. Every gateway computes which one from the session's id and the workers that it sees ready, so
several gateways agree without talking, and none keeps a table. An id that a gateway has made up ends in its worker's mark and
stays with that worker whatever others come and go; an id that a client has chosen moves when a worker appears that ranks
higher for it, and the session is then unknown there.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from hashlib import blake2b

_MADE_HERE = re.compile(r"s-[0-9a-f]{32}-([0-9a-f]{8})")


def place(session_id: str, worker_ids: Sequence[str]) -> int | None:
    """Index of the session's worker; None if there is none, or if the id names a worker that is not among them.

    Rendezvous hashing (Thaler and Ravishankar 1998): the worker with the highest hash of (worker, session) wins, so one
    that comes or goes moves only the sessions that it wins.
    """
    made_here = _MADE_HERE.fullmatch(session_id)
    if made_here is not None:
        marks = [_mark(worker_id) for worker_id in worker_ids]
        return marks.index(made_here[1]) if made_here[1] in marks else None
    if not worker_ids:
        return None
    return max(range(len(worker_ids)), key=lambda i: (_weight(session_id, worker_ids[i]), worker_ids[i]))


def new_session_id(worker_ids: Sequence[str]) -> str:
    """An id that stays with one of these workers, of which there is at least one."""
    name = uuid.uuid4().hex
    index = place(name, worker_ids)
    assert index is not None
    return f"s-{name}-{_mark(worker_ids[index])}"


def owned_id(session_id: str, key: str) -> str:
    """What workers know a session of this API key by: nobody else comes to the same one, whatever id he says. One that
    was made here keeps its worker's mark. key: its name, "" where there are none, and ids are as clients say them."""
    if not key:
        return session_id
    made_here = _MADE_HERE.fullmatch(session_id)
    digest = blake2b(f"{len(key)}:{key}{session_id}".encode(), digest_size=16).hexdigest()
    return f"s-{digest}-{made_here[1]}" if made_here is not None else f"k-{digest}"


def _mark(worker_id: str) -> str:
    return blake2b(worker_id.encode(), digest_size=4).hexdigest()


def _weight(session_id: str, worker_id: str) -> bytes:
    return blake2b(session_id.encode(), digest_size=16, key=blake2b(worker_id.encode(), digest_size=32).digest()).digest()
