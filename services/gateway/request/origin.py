"""The identity of a request, and the facts that its body reveals before the request is prepared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from services.gateway.request.caller import NOBODY, Caller
from services.gateway.request.trace import EncodeCall, RequestTrace

OMITTED_TOOLS = "omitted_tools"  # the entry of an ASGI scope's state that has Origin.omitted_tools


class Origin:
    """Owns what the preparation of one request reports about its body. Other code may read that while the request is prepared:
    an abort reads the names, and an HTTP response the wish for a stream."""

    __slots__ = ("caller", "names", "omitted_tools", "part_names", "request_id", "trace", "wants_stream")

    def __init__(
        self,
        request_id: str,
        trace: RequestTrace | None = None,
        caller: Caller = NOBODY,
        omitted_tools: list[str] | None = None,
    ) -> None:
        """Makes the origin of a request whose body has not been read.

        Args:
            trace: None if the request is not traced.
            omitted_tools: The list that omit() extends; a new one if it is None.
        """
        self.request_id = request_id
        self.trace = trace
        self.caller = caller
        self.names: list[str] = []  # the client's names for the whole request, besides its id
        self.part_names: list[str] = []  # the client's names for prompts of the request
        self.wants_stream = False  # the client asks for a stream
        # Hosted tools that the request is served without. Complete before wants_stream is set, because the head of a response
        # names them.
        self.omitted_tools: list[str] = [] if omitted_tools is None else omitted_tools

    def name(self, name: str | None, part_names: Iterable[str] = ()) -> None:
        """Adds the client's names, if it has given any. From here on the client can abort the request by them."""
        if name is not None:
            self.names.append(name)
        self.part_names.extend(part_names)

    def stream(self) -> None:
        """Notes that the client asks for a stream. A comment may be sent from here on."""
        self.wants_stream = True

    def omit(self, tools: Sequence[str]) -> None:
        """Adds hosted tools that the request is served without, each once."""
        noted = frozenset(self.omitted_tools)  # a body may have a hundred thousand tools before their number is checked
        self.omitted_tools.extend(name for name in dict.fromkeys(tools) if name not in noted)

    @property
    def traceparent(self) -> str:
        """W3C traceparent of the request; "" if it is not traced."""
        return self.trace.traceparent if self.trace is not None else ""

    def tokenizing(self, call: EncodeCall) -> AbstractContextManager[None]:
        """Returns the span of a call of the tokenizer, which also gets the trace's id."""
        return nullcontext() if self.trace is None else self.trace.tokenizing(call)

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of every log line about the request."""
        if self.trace is None:
            return {"request_id": self.request_id}
        return {"request_id": self.request_id, "trace_id": self.trace.trace_id}


def origin_of(state: Mapping[str, Any]) -> Origin:
    """Returns the origin of a request that generates nothing, from the state of its ASGI scope."""
    return Origin(state["request_id"], caller=state["caller"], omitted_tools=state[OMITTED_TOOLS])
