"""The origin of a request: its call, its caller, and values of its body that other code reads during the preparation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from rootstock_llm.services.gateway.generation.trace import EncodeCall, RequestTrace, begin_trace
from rootstock_llm.services.shared.limits import PRIORITY_RANGE

if TYPE_CHECKING:
    from rootstock_llm.services.shared.observe.spans import Tracing

_DIGEST_BYTES = 16
_PURPOSE = b"rootstock-salt"  # BLAKE2's personalization of salts, at most 16 bytes
_TENANT = b"rootstock-share"  # the same of tenants


@dataclass(frozen=True, slots=True)
class Caller:
    """The rights and the weight of the API key of a request."""

    key: str = ""  # name of the API key; "" without keys
    priority: int | None = None  # default and most urgent priority, or None for any priority
    low_first: bool = False  # whether lower priority values are more urgent
    salts_cache: bool = False  # whether its cached prefixes are separate from those of other keys
    weight: float = 1.0  # share of the fleet that the key gets while requests wait, relative to other keys
    background: bool = False  # whether its requests run only while no client's request waits
    models: frozenset[str] | None = None  # names of the models that the key may use, or None for every model

    @property
    def tenant(self) -> bytes:
        """Hash of the key's name, for workers; empty without keys."""
        return blake2b(self.key.encode(), digest_size=_DIGEST_BYTES, person=_TENANT).digest() if self.key else b""

    def in_background(self, low_first: bool) -> Caller:
        """Returns the caller of a background request, which always has the least urgent priority."""
        least = PRIORITY_RANGE[1] if low_first else PRIORITY_RANGE[0]
        return replace(self, priority=least, low_first=low_first, background=True)

    def may_use(self, model: str) -> bool:
        """Whether the key may use the model of this name."""
        return self.models is None or model in self.models

    def priority_of(self, asked: int | None) -> int:
        """Returns the priority of a request, within the key's limit. `asked` is the client's, or None."""
        if asked is None or self.priority is None:
            return (self.priority or 0) if asked is None else asked
        return max(asked, self.priority) if self.low_first else min(asked, self.priority)

    def cache_salt_of(self, asked: str) -> str:
        """Returns the salt for workers and the prefix index. Requests with equal salts share cached prefixes."""
        if not self.salts_cache or not self.key:
            return asked
        text = f"{len(self.key)}:{self.key}{asked}"
        return blake2b(text.encode(), digest_size=_DIGEST_BYTES, person=_PURPOSE).hexdigest()


NOBODY = Caller()
OMITTED_TOOLS = "omitted_tools"  # the entry of an ASGI scope's state that has Origin.omitted_tools


class Origin:
    """The call of an operation by an HTTP request, a batch line, a background response or a health probe.

    The preparation of the request adds values of the body, which other code may read before its end: an abort reads the names,
    and an HTTP response `wants_stream`.
    """

    __slots__ = (
        "caller",
        "is_counted",
        "method",
        "names",
        "omitted_tools",
        "part_names",
        "request_id",
        "route",
        "routing_key",
        "trace",
        "trace_headers",
        "wants_stream",
    )

    def __init__(
        self,
        request_id: str,
        route: str = "",
        method: str = "POST",
        caller: Caller = NOBODY,
        routing_key: str = "",
        trace_headers: Mapping[str, str] | None = None,
        is_counted: bool = True,
        omitted_tools: list[str] | None = None,
    ) -> None:
        """Makes the origin of a request whose body has not been read.

        Args:
            route: Path of the operation, as in metrics and spans.
            routing_key: Routing key in the request's header; the body's routing key takes precedence.
            trace_headers: W3C traceparent and tracestate of the client; None if the client sends none.
            is_counted: False for a health probe, which has no limit and no trace, and is not in the metrics of clients.
            omitted_tools: The list that omit() extends; a new one if it is None.
        """
        self.request_id = request_id
        self.route = route
        self.method = method
        self.caller = caller
        self.routing_key = routing_key
        self.trace_headers = trace_headers or {}
        self.is_counted = is_counted
        self.trace: RequestTrace | None = None  # unset if the request is not traced
        self.names: list[str] = []  # the client's names for the whole request, besides its id
        self.part_names: list[str] = []  # the client's names for prompts of the request
        self.wants_stream = False  # the client asks for a stream
        # Hosted tools that were left out of the request. Complete before wants_stream is set, because the head of the response
        # names them.
        self.omitted_tools: list[str] = [] if omitted_tools is None else omitted_tools

    def begin_trace(self, tracing: Tracing) -> None:
        """Begins the trace of the request if the request is sampled."""
        self.trace = begin_trace(tracing, self.request_id, self.route, self.method, self.trace_headers)

    def name(self, name: str | None, part_names: Iterable[str] = ()) -> None:
        """Adds the client's names. From now on, the client can abort the request by them."""
        if name is not None:
            self.names.append(name)
        self.part_names.extend(part_names)

    def stream(self) -> None:
        """Records that the client requests a stream. From now on, comments may be sent."""
        self.wants_stream = True

    def omit(self, tools: Sequence[str]) -> None:
        """Adds hosted tools that are left out of the request, each once."""
        noted = frozenset(self.omitted_tools)  # a set, because a body may have 100,000 tools before their number is checked
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
