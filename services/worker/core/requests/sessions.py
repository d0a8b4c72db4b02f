"""Sessions: conversations whose turns build on each other, with their KV cached between turns.

A stored turn is the context of a finished request: its prompt and its output. The session stores only the tokens that the turn
adds to its parent turn. A new turn may continue any stored turn. An aborted turn leaves the session unchanged.

A stored turn holds its path in the radix tree: pages with a hold are evicted after all other pages. Sessions do not delay
admissions, because pages with a hold can be evicted. A later turn computes evicted pages again.

    open ──► turn ──► turn ──► …      closed by a message, a memory reset, or ttl_s after the opening or the last turn
               └────► turn            (a session with a running turn does not expire)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.messages import SessionTurn, Submit
from rootstock_llm.services.worker.core.kv.memory import KVMemory
from rootstock_llm.services.worker.core.kv.tree_node import TreeNode
from rootstock_llm.services.worker.core.requests.request import Request

I32 = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _Turn:
    """A stored turn. Its context is the first `num_inherited` tokens of the parent's context, followed by `added`."""

    parent: _Turn | None
    num_inherited: int
    added: I32
    num_prompt_tokens: int  # prompt tokens of the whole context
    node: TreeNode  # node at the end of the cached context, with a hold

    def context(self) -> I32:
        parts: list[I32] = []
        turn: _Turn | None = self
        end = self.num_inherited + len(self.added)
        while turn is not None:
            parts.append(turn.added[: max(end - turn.num_inherited, 0)])
            end, turn = min(end, turn.num_inherited), turn.parent
        context = np.concatenate(parts[::-1])
        assert len(context) == self.num_inherited + len(self.added), "the parent's context has at least `num_inherited` tokens"
        return context


@dataclass(frozen=True, slots=True)
class _RunningTurn:
    """An unfinished turn."""

    parent: _Turn | None
    reserved: int  # largest number of tokens that the turn may add


@dataclass(slots=True, eq=False)
class _Session:
    """An open session."""

    number: int  # unique, because another session may reuse the name
    capacity: int  # limit of num_tokens
    ttl_s: float
    expires: float  # absolute time at which the session is closed if no turn runs then
    turns: dict[str, _Turn] = field(default_factory=dict)  # by request id, oldest first
    running: dict[str, _RunningTurn] = field(default_factory=dict)  # unfinished turns, by request id
    num_tokens: int = 0  # sum of the stored turns' added tokens

    @property
    def free_tokens(self) -> int:
        """Tokens of the capacity that are neither stored nor reserved by running turns."""
        return self.capacity - self.num_tokens - sum(turn.reserved for turn in self.running.values())


class SessionTable:
    """All sessions of a worker, and their holds in the radix tree."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._sessions: dict[str, _Session] = {}
        self._next_number = 0
        self._first_expiry = float("inf")  # lower bound of the time at which the next session expires
        self._forgotten: set[str] = set()  # names of the sessions that the last close_all() closed
        self.num_tokens = 0  # stored tokens of all sessions

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def open(self, session_id: str, capacity: int, ttl_s: float, now: float) -> str:
        """Opens a session.

        Args:
            session_id: name of the session.
            capacity: limit in tokens; 0 for the configured capacity, which is also the largest capacity.
            ttl_s: lifetime in seconds after the opening or the last turn; 0 for the configured lifetime.
            now: present time.

        Returns:
            The reason why the session could not be opened; empty if it is open.
        """
        if not session_id:
            return "a session needs an id"
        if session_id in self._sessions:
            return "the session is already open"
        if len(self._sessions) >= self.config.max_sessions:
            return f"the worker has {self.config.max_sessions} open sessions, which is its limit"
        ttl_s = ttl_s or self.config.session_ttl_s
        capacity = min(capacity or self.config.session_capacity, self.config.session_capacity)
        self._next_number += 1
        self._forgotten.discard(session_id)
        self._sessions[session_id] = _Session(self._next_number, capacity, ttl_s, now + ttl_s)
        self._first_expiry = min(self._first_expiry, now + ttl_s)
        return ""

    def close(self, session_id: str, memory: KVMemory) -> bool:
        """Closes a session and deletes its turns. Its running turns continue and are not stored.

        Returns:
            False if no session has this name.
        """
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        for turn in session.turns.values():
            memory.unhold(turn.node)
        self.num_tokens -= session.num_tokens
        assert self.num_tokens >= 0, "the sum over all sessions is at least that of one session"
        return True

    def close_all(self, memory: KVMemory) -> None:
        """Closes all sessions, because the memory is reset. The refusal of a later turn names the reset as the reason."""
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
        """Returns the message with the parent's context before its prompt, or the reason why the turn cannot run.

        Limits max_new_tokens by the model's context and the session's capacity.
        """
        turn = message.session
        assert turn is not None
        session = self._sessions.get(turn.session_id)
        if session is None:
            forgotten = turn.session_id in self._forgotten
            closed = "was closed, because the worker's memory was released or its weights were replaced"
            why = closed if forgotten else "is not open on this worker"
            return f"there is no such session: it {why}"
        if message.request_id in session.turns or message.request_id in session.running:
            return f"the session already has a turn {message.request_id}"
        parent = turn.parent or next(reversed(session.turns), "")
        if parent and parent not in session.turns:
            state = "is still running" if parent in session.running else "does not exist"
            return f"turn {parent} of the session {state}"
        added = prompt = message.prompt_ids
        if parent and len(before := self._inherited(session.turns[parent], turn)):
            starts_anew = len(added) > 1 and int(added[0]) == self.config.bos_token_id
            added = added[1:] if starts_anew else added
            prompt = np.concatenate([before, added])
        budget = min(self.config.context_len - len(prompt), session.free_tokens - len(added))
        if session.free_tokens <= len(added):
            return f"the session has no capacity for this turn: all of its turns together may have {session.capacity} tokens"
        params = replace(message.params, max_new_tokens=min(message.params.max_new_tokens, max(budget, 1)))
        offset = len(prompt) - len(added)
        return replace(message, prompt_ids=prompt, params=params, session=replace(turn, parent=parent, offset=offset))

    def begin(self, request: Request) -> None:
        """Reserves capacity for the tokens that a turn may add. Called when the turn that resolve() returned is queued."""
        turn = request.session
        assert turn is not None
        session = self._sessions[turn.session_id]
        assert 0 <= turn.offset <= request.num_prompt_tokens, "resolve() has set the offset"
        assert request.request_id not in session.running, "a turn runs twice"
        request.session_number = session.number
        reserved = request.num_prompt_tokens - turn.offset + request.params.max_new_tokens
        session.running[request.request_id] = _RunningTurn(session.turns.get(turn.parent), reserved)

    def end(self, request: Request, node: TreeNode | None, memory: KVMemory, now: float) -> None:
        """Ends a turn and stores it unless it was aborted.

        If the parent turn was deleted while the turn ran, the turn is stored without a parent, with its whole context. If the
        session has too little capacity for that, the turn is not stored.

        Args:
            request: the request of the turn.
            node: end of the turn's cached context, or None if it was aborted.
            memory: the owner of the tree.
            now: present time.
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
        # Compares the turns and not their names, because a new turn may have the name of the deleted parent.
        parent = began.parent if session.turns.get(turn.parent) is began.parent else None
        num_inherited = turn.offset if parent else 0
        added = request.tokens()[num_inherited:]
        if parent is not began.parent and len(added) > session.free_tokens:
            return
        memory.hold(node)
        session.turns[request.request_id] = _Turn(parent, num_inherited, added, request.num_prompt_tokens, node)
        self._count(session, len(added))

    def turn_nodes(self) -> list[TreeNode]:
        """Returns the node of each hold, for invariant checks."""
        return [turn.node for session in self._sessions.values() for turn in session.turns.values()]

    def running_turns(self) -> set[tuple[int, str]]:
        """Returns (number of the session, request id) of each unfinished turn, for invariant checks."""
        return {(session.number, rid) for session in self._sessions.values() for rid in session.running}

    def overfull(self) -> bool:
        """Returns whether a session has more tokens than its capacity, for invariant checks."""
        return any(session.num_tokens > session.capacity for session in self._sessions.values())

    def count_tokens(self) -> int:
        """Counts the tokens of all sessions, for invariant checks."""
        return sum(len(turn.added) for session in self._sessions.values() for turn in session.turns.values())

    def _inherited(self, parent: _Turn, turn: SessionTurn) -> I32:
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
        assert 0 <= session.num_tokens <= session.capacity, "stored turns do not exceed the session's capacity"
