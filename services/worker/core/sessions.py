"""Sessions: conversations whose turns build on each other, with their KV kept between turns.

A turn is a finished request's whole context, prompt and output. Later turns append to one, or branch from any. A turn
that is cut off (abort, timeout, fault) leaves the session as it was. A turn holds its path in the radix tree: held pages
are evicted after all others, so a session costs nobody admission, and what was evicted is computed again.

    open ──► turn ──► turn ──► …      closed by message, or ttl_s after the last turn's end
               └────► turn            (a session with a running turn does not expire)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from services.worker.core.config import SchedulerConfig
from services.worker.core.memory import KVMemory
from services.worker.core.messages import SessionTurn, Submit
from services.worker.core.radix_cache import TreeNode
from services.worker.core.request import Request


@dataclass(slots=True, eq=False)
class _Turn:
    """context: int32[n], prompt and output. node: where its cached part ends, held."""

    request_id: str
    parent: str
    context: NDArray[np.int32]
    num_prompt_tokens: int
    node: TreeNode


@dataclass(slots=True, eq=False)
class _Session:
    """turns: by request id, oldest first. expires: absolute, while nothing runs. running: request ids of unfinished turns."""

    capacity: int
    ttl_s: float
    expires: float
    turns: dict[str, _Turn] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    num_tokens: int = 0


class SessionTable:
    """All sessions of a worker and what they hold in the tree."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._sessions: dict[str, _Session] = {}
        self.expired_total = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_tokens(self) -> int:
        """Of all turns' contexts."""
        return sum(session.num_tokens for session in self._sessions.values())

    def open(self, session_id: str, capacity: int, ttl_s: float, now: float) -> str:
        """Returns why it could not be opened, "" if it was. capacity (tokens), ttl_s: 0 for the configured default."""
        if not session_id:
            return "a session has an id"
        if session_id in self._sessions:
            return f"session {session_id} is open"
        if len(self._sessions) >= self.config.max_sessions:
            return f"the worker holds {self.config.max_sessions} sessions and takes no more"
        ttl_s = ttl_s or self.config.session_ttl_s
        self._sessions[session_id] = _Session(capacity or self.config.session_capacity, ttl_s, now + ttl_s)
        return ""

    def close(self, session_id: str, memory: KVMemory) -> bool:
        """Forgets the session; its running turns end as they would, and are not kept. False: there is none."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        for turn in session.turns.values():
            memory.unhold(turn.node)
        return True

    def close_all(self, memory: KVMemory) -> None:
        for session_id in list(self._sessions):
            self.close(session_id, memory)

    def expire(self, memory: KVMemory, now: float) -> None:
        for session_id in [s for s, session in self._sessions.items() if session.expires <= now and not session.running]:
            self.close(session_id, memory)
            self.expired_total += 1

    def resolve(self, message: Submit) -> Submit | str:
        """The message with its whole prompt in place of what the turn adds, or why the turn cannot run."""
        turn = message.session
        assert turn is not None
        session = self._sessions.get(turn.session_id)
        if session is None:
            return f"session: {turn.session_id} is not open here"
        if message.request_id in session.turns or message.request_id in session.running:
            return f"session: {turn.session_id} has a turn {message.request_id}"
        parent = turn.parent or next(reversed(session.turns), "")
        if parent and parent not in session.turns:
            state = "is still running" if parent in session.running else "is not there"
            return f"session: turn {parent} of {turn.session_id} {state}"
        prompt = message.prompt_ids
        if parent and len(before := self._kept(session.turns[parent], turn)):
            starts_anew = len(prompt) > 1 and int(prompt[0]) == self.config.bos_token_id
            prompt = np.concatenate([before, prompt[1:] if starts_anew else prompt])
        if session.num_tokens + len(prompt) > session.capacity:
            return f"session: {turn.session_id} is full: it holds {session.capacity} tokens over its turns"
        room = max(self.config.context_len - len(prompt), 1)
        params = replace(message.params, max_new_tokens=min(message.params.max_new_tokens, room))
        return replace(message, prompt_ids=prompt, params=params, session=replace(turn, parent=parent))

    def begin(self, turn: SessionTurn, request_id: str) -> None:
        self._sessions[turn.session_id].running.add(request_id)

    def end(self, request: Request, node: TreeNode | None, memory: KVMemory, now: float) -> None:
        """A turn has ended; node: the end of its cached context if it is complete, else None."""
        turn = request.session
        assert turn is not None
        session = self._sessions.get(turn.session_id)
        if session is None or request.request_id not in session.running:
            return
        session.running.remove(request.request_id)
        session.expires = now + session.ttl_s
        if node is None:
            return
        if turn.replace and turn.parent:
            self._forget_children(session, turn.parent, memory)
        memory.hold(node)
        context = request.tokens()
        session.turns[request.request_id] = _Turn(request.request_id, turn.parent, context, request.num_prompt_tokens, node)
        session.num_tokens += len(context)

    def held_nodes(self) -> list[TreeNode]:
        """One entry for each hold. For checks."""
        return [turn.node for session in self._sessions.values() for turn in session.turns.values()]

    def running_turns(self) -> set[tuple[str, str]]:
        """(session, request id) of each unfinished turn. For checks."""
        return {(name, rid) for name, session in self._sessions.items() for rid in session.running}

    def _kept(self, parent: _Turn, turn: SessionTurn) -> NDArray[np.int32]:
        context = parent.context[: parent.num_prompt_tokens] if turn.drop_previous_output else parent.context
        return context if turn.offset < 0 else context[: turn.offset]

    def _forget_children(self, session: _Session, parent: str, memory: KVMemory) -> None:
        gone = {parent}
        for turn in list(session.turns.values()):
            if turn.parent in gone:
                gone.add(turn.request_id)
                del session.turns[turn.request_id]
                session.num_tokens -= len(turn.context)
                memory.unhold(turn.node)
