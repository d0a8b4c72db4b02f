"""The origin of a request: its call, its caller, and values of its body that other code reads while the request is prepared."""

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
_TENANT = b"rootstock-share"  # BLAKE2's personalization of tenants


@dataclass(frozen=True, slots=True)
class Caller:
    """The rights and the weight of the API key of a request."""

    key: str = ""  # name of the API key; "" if the gateway has no API keys
    priority: int | None = None  # default and most urgent priority of the API key's requests; None: the default is 0, no limit
    low_first: bool = False  # whether lower priority values are more urgent
    salts_cache: bool = False  # whether the API key shares no cached prefixes with other API keys
    weight: float = 1.0  # share of the fleet that the API key gets while requests wait, relative to other API keys
    background: bool = False  # whether requests of this caller run only while no client's request waits
    models: frozenset[str] | None = None  # names of the models that the API key may use, or None for all models

    @property
    def tenant(self) -> bytes:
        """Hash of the API key's name, which workers receive; b"" if the gateway has no API keys."""
        return blake2b(self.key.encode(), digest_size=_DIGEST_BYTES, person=_TENANT).digest() if self.key else b""

    def in_background(self, low_first: bool) -> Caller:
        """Returns this caller with the least urgent priority, for background requests. `low_first` replaces Caller.low_first."""
        least = PRIORITY_RANGE[1] if low_first else PRIORITY_RANGE[0]
        return replace(self, priority=least, low_first=low_first, background=True)

    def may_use(self, model: str) -> bool:
        """Returns whether the API key may use the model of this name."""
        return self.models is None or model in self.models

    def priority_of(self, asked: int | None) -> int:
        """Returns the priority of a request, limited to the most urgent priority of the API key.

        Args:
            asked: Priority that the client requests; None for the default.
        """
        if asked is None or self.priority is None:
            return (self.priority or 0) if asked is None else asked
        return max(asked, self.priority) if self.low_first else min(asked, self.priority)

    def cache_salt_of(self, asked: str) -> str:
        """Returns the cache salt for workers and the prefix index. Only requests with equal salts share cached prefixes.

        Args:
            asked: Cache salt that the client requests; "" for none.
        """
        if not self.salts_cache or not self.key:
            return asked
        text = f"{len(self.key)}:{self.key}{asked}"
        return blake2b(text.encode(), digest_size=_DIGEST_BYTES, person=_PURPOSE).hexdigest()


NOBODY = Caller()
OMITTED_TOOLS = "omitted_tools"  # the entry of an ASGI scope's state that has Origin.omitted_tools


class Origin:
    """The call of an operation by an HTTP request, a batch line, a background response or a health probe.

    While the request is prepared, values of its body are added. Other code may read them before the preparation ends: an abort
    reads `names` and `part_names`, and HttpSink reads `wants_stream`.
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
            is_counted: False for a health probe, which has no limits and no trace and is not in the metrics of clients.
            omitted_tools: The list that omit() extends; None for a new list.
        """
        self.request_id = request_id
        self.route = route
        self.method = method
        self.caller = caller
        self.routing_key = routing_key
        self.trace_headers = trace_headers or {}
        self.is_counted = is_counted
        self.trace: RequestTrace | None = None  # None if the request is not traced
        self.names: list[str] = []  # request ids that the client chose for the whole request, besides request_id
        self.part_names: list[str] = []  # request ids that the client chose for single prompts of the request
        self.wants_stream = False  # the client requests a stream
        # Names of hosted tools that were left out of the request. The list must be complete before wants_stream is set.
        # After that, a keep-alive comment may send the head of the response, which has these names.
        self.omitted_tools: list[str] = [] if omitted_tools is None else omitted_tools

    def begin_trace(self, tracing: Tracing) -> None:
        """Begins the trace of the request if the request is sampled."""
        self.trace = begin_trace(tracing, self.request_id, self.route, self.method, self.trace_headers)

    def name(self, name: str | None, part_names: Iterable[str] = ()) -> None:
        """Adds the request ids that the client chose for the request and its prompts. From now on, an abort finds them."""
        if name is not None:
            self.names.append(name)
        self.part_names.extend(part_names)

    def stream(self) -> None:
        """Records that the client requests a stream. From now on, keep-alive comments may be sent."""
        self.wants_stream = True

    def omit(self, tools: Sequence[str]) -> None:
        """Adds names of hosted tools that the gateway leaves out of the request. A name is listed only once."""
        noted = frozenset(self.omitted_tools)  # a set is fast even if a body has 100,000 tools, whose number is checked later
        self.omitted_tools.extend(name for name in dict.fromkeys(tools) if name not in noted)

    @property
    def traceparent(self) -> str:
        """W3C traceparent of the request; "" if it is not traced."""
        return self.trace.traceparent if self.trace is not None else ""

    def tokenizing(self, call: EncodeCall) -> AbstractContextManager[None]:
        """Returns a context manager with the span of a call to the tokenizer. Writes the span's context into the call."""
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
