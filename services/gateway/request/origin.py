"""Whose work a call is: for the logs of every service, and where the request is traced, for its spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from services.gateway.request.caller import NOBODY, Caller
from services.gateway.request.trace import EncodeCall, RequestTrace

OMITTED_TOOLS = "omitted_tools"  # a request's state has Origin.omitted_tools under this name


@dataclass(frozen=True, slots=True)
class Origin:
    """names: what its client calls the whole request, besides its id; part_names: what it calls parts of it. Both are filled in
    when its body has been read. wants_stream: to be called then, where it asks for a stream. omitted_tools: hosted tools that the
    request is served without; filled in before wants_stream is called, because the head of the response names them."""

    request_id: str
    trace: RequestTrace | None = None
    caller: Caller = NOBODY
    names: list[str] = field(default_factory=list)
    part_names: list[str] = field(default_factory=list)
    wants_stream: Callable[[], None] = lambda: None
    omitted_tools: list[str] = field(default_factory=list)

    def omit(self, tools: Sequence[str]) -> None:
        """Notes hosted tools that the request is served without, each once."""
        noted = frozenset(self.omitted_tools)  # a body may have a hundred thousand tools before their number is checked
        self.omitted_tools.extend(name for name in dict.fromkeys(tools) if name not in noted)

    @property
    def traceparent(self) -> str:
        """Of the request itself; "" for one that is not traced."""
        return self.trace.traceparent if self.trace is not None else ""

    def tokenizing(self, call: EncodeCall) -> AbstractContextManager[None]:
        """Around a call of the tokenizer, which is told its trace."""
        return nullcontext() if self.trace is None else self.trace.tokenizing(call)

    @property
    def log_fields(self) -> dict[str, str]:
        """What every log line about the request carries."""
        if self.trace is None:
            return {"request_id": self.request_id}
        return {"request_id": self.request_id, "trace_id": self.trace.trace_id}


def origin_of(state: Mapping[str, Any]) -> Origin:
    """Returns the origin of a request that generates nothing. state: the front door's."""
    return Origin(state["request_id"], caller=state["caller"], omitted_tools=state[OMITTED_TOOLS])
