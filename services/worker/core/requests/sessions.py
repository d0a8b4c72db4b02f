"""Sessions: conversations whose turns build on each other, with their KV kept between turns.

A turn is a finished request's whole context, prompt and output, kept as what it adds to the turn it builds on. Later turns
append to one, or branch from any. A turn that is cut off (abort, timeout, fault) leaves the session as it was. A turn holds
its path in the radix tree: held pages are evicted after all others, so a session costs nobody admission, and what was
evicted is computed again.

    open ──► turn ──► turn ──► …      closed by message, or ttl_s after the last turn's end
               └────► turn            (a session with a running turn does not expire)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.config import SchedulerConfig
from services.worker.core.contracts.messages import SessionTurn, Submit
from services.worker.core.kv.memory import KVMemory
from services.worker.core.kv.tree_node import TreeNode
from services.worker.core.requests.request import Request

I32 = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _Turn:
    """Its context is the first `kept` tokens of the parent's, then `added`. num_prompt_tokens: of the whole context.
    node: where its cached part ends, held."""

    parent: _Turn | None
    kept: int
    added: I32
    num_prompt_tokens: int
    node: TreeNode

    def context(self) -> I32:
        parts: list[I32] = []
        turn: _Turn | None = self
        end = self.kept + len(self.added)
        while turn is not None:
            parts.append(turn.added[: max(end - turn.kept, 0)])
            end, turn = min(end, turn.kept), turn.parent
        context = np.concatenate(parts[::-1])
        assert len(context) == self.kept + len(self.added), "a turn's parents hold what it keeps of them"
        return context


@dataclass(frozen=True, slots=True)
class _Running:
    """An unfinished turn. reserved: tokens that it may come to add to its parent's."""

    parent: _Turn | None
    reserved: int


@dataclass(slots=True, eq=False)
class _Session:
    """turns: by request id, oldest first. expires: absolute, while nothing runs. running: unfinished turns, by request id.
    num_tokens: that turns have added. number: unique, unlike the name."""

    number: int
    capacity: int
    ttl_s: float
    expires: float
    turns: dict[str, _Turn] = field(default_factory=dict)
    running: dict[str, _Running] = field(default_factory=dict)
    num_tokens: int = 0

    @property
    def room(self) -> int:
        return self.capacity - self.num_tokens - sum(turn.reserved for turn in self.running.values())


class SessionTable:
    """All sessions of a worker and what they hold in the tree. num_tokens: over all of them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._sessions: dict[str, _Session] = {}
        self._next_number = 0
        self._first_expiry = float("inf")  # no session expires before
        self._forgotten: set[str] = set()  # names of those that close_all has closed last
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def open(self, session_id: str, capacity: int, ttl_s: float, now: float) -> str:
        """Returns why it could not be opened, "" if it was. capacity (tokens), ttl_s: 0 for the configured default, which
        capacity cannot exceed."""
        if not session_id:
            return "a session has an id"
        if session_id in self._sessions:
            return "the session is open"
        if len(self._sessions) >= self.config.max_sessions:
            return f"the worker holds {self.config.max_sessions} sessions and takes no more"
        ttl_s = ttl_s or self.config.session_ttl_s
        capacity = min(capacity or self.config.session_capacity, self.config.session_capacity)
        self._next_number += 1
        self._forgotten.discard(session_id)
        self._sessions[session_id] = _Session(self._next_number, capacity, ttl_s, now + ttl_s)
        self._first_expiry = min(self._first_expiry, now + ttl_s)
        return ""

    def close(self, session_id: str, memory: KVMemory) -> bool:
        """Forgets the session; its running turns end as they would, and are not kept. False: there is none."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        for turn in session.turns.values():
            memory.unhold(turn.node)
        self.num_tokens -= session.num_tokens
        assert self.num_tokens >= 0, "the sessions hold less than one of them"
        return True

    def close_all(self, memory: KVMemory) -> None:
        """The memory is given up. Their later turns are told so."""
        self._forgotten = set(self._sessions) or self._forgotten
        for session_id in list(self._sessions):
            self.close(session_id, memory)

    def expire(self, memory: KVMemory, now: float) -> None:
        if now < self._first_expiry:
            return
        for session_id in [s for s, session in self._sessions.items() if session.expires <= now and not session.running]:
            self.close(session_id, memory)
        waiting = [session.expires for session in self._sessions.values() if not session.running]
        self._first_expiry = min(waiting, default=float("inf"))

    def resolve(self, message: Submit) -> Submit | str:
        """The message with its whole prompt in place of what the turn adds, and max_new_tokens within what context and session
        have room for; or why the turn cannot run."""
        turn = message.session
        assert turn is not None
        session = self._sessions.get(turn.session_id)
        if session is None:
            forgotten = turn.session_id in self._forgotten
            why = "was forgotten: the worker's memory was released, or its weights replaced" if forgotten else "is not open here"
            return f"there is no such session: it {why}"
        if message.request_id in session.turns or message.request_id in session.running:
            return f"the session has a turn {message.request_id}"
        parent = turn.parent or next(reversed(session.turns), "")
        if parent and parent not in session.turns:
            state = "is still running" if parent in session.running else "is not there"
            return f"turn {parent} of the session {state}"
        added = prompt = message.prompt_ids
        if parent and len(before := self._kept(session.turns[parent], turn)):
            starts_anew = len(added) > 1 and int(added[0]) == self.config.bos_token_id
            added = added[1:] if starts_anew else added
            prompt = np.concatenate([before, added])
        room = min(self.config.context_len - len(prompt), session.room - len(added))
        if session.room <= len(added):
            return f"the session is full: it holds {session.capacity} tokens over its turns"
        params = replace(message.params, max_new_tokens=min(message.params.max_new_tokens, max(room, 1)))
        offset = len(prompt) - len(added)
        return replace(message, prompt_ids=prompt, params=params, session=replace(turn, parent=parent, offset=offset))

    def begin(self, request: Request) -> None:
        """A resolved turn is queued: reserves what it may come to add."""
        turn = request.session
        assert turn is not None
        session = self._sessions[turn.session_id]
        assert 0 <= turn.offset <= request.num_prompt_tokens, "a turn that was not resolved"
        assert request.request_id not in session.running, "a turn runs twice"
        request.session_number = session.number
        reserved = request.num_prompt_tokens - turn.offset + request.params.max_new_tokens
        session.running[request.request_id] = _Running(session.turns.get(turn.parent), reserved)

    def end(self, request: Request, node: TreeNode | None, memory: KVMemory, now: float) -> None:
        """A turn has ended; node: the end of its cached context if it is complete, else None.

        Where another turn has replaced its parent meanwhile, all of its context is its own; it is kept if there is room for that.
        """
        turn = request.session
        assert turn is not None
        session = self._sessions.get(turn.session_id)
        if session is None or session.number != request.session_number:
            return
        began = session.running.pop(request.request_id)
        session.expires = now + session.ttl_s
        self._first_expiry = min(self._first_expiry, session.expires)
        if node is None:
            return
        if turn.replace and turn.parent:
            self._forget_children(session, turn.parent, memory)
        parent = began.parent if session.turns.get(turn.parent) is began.parent else None  # whose name another may have by now
        kept = turn.offset if parent else 0
        added = request.tokens()[kept:]
        if parent is not began.parent and len(added) > session.room:
            return
        memory.hold(node)
        session.turns[request.request_id] = _Turn(parent, kept, added, request.num_prompt_tokens, node)
        self._count(session, len(added))

    def held_nodes(self) -> list[TreeNode]:
        """One entry for each hold. For checks."""
        return [turn.node for session in self._sessions.values() for turn in session.turns.values()]

    def running_turns(self) -> set[tuple[int, str]]:
        """(session's number, request id) of each unfinished turn. For checks."""
        return {(session.number, rid) for session in self._sessions.values() for rid in session.running}

    def overfull(self) -> bool:
        """A session has more than it may. For checks."""
        return any(session.num_tokens > session.capacity for session in self._sessions.values())

    def count_tokens(self) -> int:
        """num_tokens, counted anew. For checks."""
        return sum(len(turn.added) for session in self._sessions.values() for turn in session.turns.values())

    def _kept(self, parent: _Turn, turn: SessionTurn) -> I32:
        context = parent.context()
        context = context[: parent.num_prompt_tokens] if turn.drop_previous_output else context
        return context if turn.offset < 0 else context[: turn.offset]

    def _forget_children(self, session: _Session, parent: str, memory: KVMemory) -> None:
        gone = {session.turns[parent]} if parent in session.turns else set()
        for name, turn in list(session.turns.items()):
            if turn.parent in gone:
                gone.add(turn)
                del session.turns[name]
                self._count(session, -len(turn.added))
                memory.unhold(turn.node)

    def _count(self, session: _Session, tokens: int) -> None:
        session.num_tokens += tokens
        self.num_tokens += tokens
        assert 0 <= session.num_tokens <= session.capacity, "a turn was let in that the session has no room for"
