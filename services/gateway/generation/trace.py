"""The gateway's spans of one traced request: the server span, and spans of tokenizing, waiting and each attempt on a worker.

A request that is not traced has no RequestTrace and no ChoiceTrace. Everything runs on the event loop. When a request ends, its
open spans end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import tokenizer_pb2, worker_pb2
from rootstock_llm.services.gateway.generation.errors import CLIENT_CLOSED, ApiError

if TYPE_CHECKING:
    from rootstock_llm.services.shared.observe.spans import Span, Tracing

REQUEST_ID = "rootstock.request_id"
ENDED_BY = "rootstock.ended_by"
EncodeCall = tokenizer_pb2.EncodeRequest | tokenizer_pb2.EncodeChatRequest
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/embeddings": "embeddings",
    "/encode": "embeddings",
    "/v1/score": "score",
    "/score": "score",
}


class RequestTrace:
    """The server span of one request, and the traces of its choices."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._choices: list[ChoiceTrace] = []
        self.traceparent = span.traceparent
        self.trace_id = span.trace_id

    @contextmanager
    def tokenizing(self, call: EncodeCall) -> Iterator[None]:
        """Makes the span of a call to the tokenizer, and writes the span's context into the call."""
        span = self._span.client("tokenize", {REQUEST_ID: call.request_id})
        call.traceparent = span.traceparent
        try:
            yield
        except ApiError as error:
            span.fail(error.code or str(error.status))
            raise
        finally:
            span.end()

    def begin(self, model: str, choices: int) -> None:
        """Records the model and the number of choices of a prepared request."""
        self._span.set({"gen_ai.request.model": model, "gen_ai.request.choice.count": choices})

    def choice(self, request_id: str) -> ChoiceTrace:
        trace = ChoiceTrace(self._span, request_id)
        self._choices.append(trace)
        return trace

    def first_byte(self, status: int) -> None:
        self._span.set({"http.response.status_code": status})
        self._span.event("first_byte")

    def answered(self, usage: Mapping[str, Any], finish_reasons: list[str]) -> None:
        self._span.set(
            {
                "gen_ai.usage.input_tokens": usage["prompt_tokens"],
                "gen_ai.usage.output_tokens": usage["completion_tokens"],
                "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "gen_ai.response.finish_reasons": finish_reasons,
            }
        )

    def failed(self, error: ApiError) -> None:
        """Records the error of a request. Only a status of 500 or more marks the server span as failed."""
        name = error.code or str(error.status)
        if error.status >= 500:
            self._span.fail(name, error.message)
        else:
            self._span.set({"error.type": name})

    def client_gone(self) -> None:
        self._span.set({"error.type": "client_gone", "http.response.status_code": CLIENT_CLOSED})

    def end(self) -> None:
        for choice in self._choices:
            choice.end()
        self._span.end()


class ChoiceTrace:
    """The spans of one choice: one for each wait in the queue, and one for each submit."""

    def __init__(self, parent: Span, request_id: str) -> None:
        self._parent = parent
        self._request_id = request_id
        self._queue: Span | None = None
        self._tries: dict[int, Span] = {}  # by the handle of the submit

    def waits(self, moved: bool) -> None:
        """Begins the span of a wait for a worker. `moved` is True if the choice has lost a worker before."""
        self._queue = self._parent.child("queue", {REQUEST_ID: self._request_id, "rootstock.moved": moved})

    def waited(self) -> None:
        if self._queue is not None:
            self._queue.end()
            self._queue = None

    def submits(self, address: str, worker_id: str, submit: worker_pb2.Submit, reason: str, tokens: int, predicted: int) -> str:
        """Begins the span of a submit, and returns the traceparent for the worker.

        Args:
            address, worker_id: Address and id of the worker.
            reason: Label of the routing decision.
            tokens: Tokens of the prompt.
            predicted: Tokens of the prompt that the worker probably has cached.
        """
        span = self._parent.client(
            "attempt",
            {
                REQUEST_ID: self._request_id,
                "rootstock.worker.address": address,
                "rootstock.worker": worker_id,
                "rootstock.routing.reason": reason,
                "rootstock.routing.predicted_tokens": predicted,
                "rootstock.prompt_tokens": tokens,
                "rootstock.resumed_tokens": len(submit.output_ids),
            },
        )
        self._tries[submit.handle] = span
        return span.traceparent

    def finished(self, finish: worker_pb2.Finish) -> None:
        """Ends the span of a submit, and records the values of the worker's last message."""
        span = self._tries.pop(finish.handle, None)
        if span is None:
            return
        if finish.reason == pb.FINISH_REASON_ABORT:
            name = pb.ErrorCode.Name(finish.error)
            if finish.error == pb.ERROR_CODE_UNAVAILABLE:
                span.set({ENDED_BY: "drain", "error.type": name})  # not a failure, because another worker continues the choice
            else:
                span.set({ENDED_BY: "abort"})
                span.fail(name, finish.message)
        else:
            tokens = {"rootstock.cached_tokens": finish.cached_tokens, "rootstock.output_tokens": finish.completion_tokens}
            span.set({ENDED_BY: "finish", "rootstock.retractions": finish.retractions, **tokens})
        span.end()

    def aborted(self, handle: int) -> None:
        """Ends the span of a submit that the gateway has aborted."""
        if (span := self._tries.pop(handle, None)) is not None:
            span.set({ENDED_BY: "abort"})
            span.end()

    def lost(self, handle: int) -> None:
        """Ends the span of a submit whose worker is lost."""
        if (span := self._tries.pop(handle, None)) is not None:
            span.set({ENDED_BY: "lost"})
            span.fail("worker_lost")
            span.end()

    def end(self) -> None:
        self.waited()
        for handle in list(self._tries):
            self.aborted(handle)


def begin_trace(tracing: Tracing, request_id: str, route: str, method: str, headers: Mapping[str, str]) -> RequestTrace | None:
    """Begins the server span of a generation request. Returns None if the request is not sampled.

    Args:
        headers: W3C traceparent and tracestate of the client.
    """
    attributes = {
        "http.request.method": method,
        "http.route": route,
        "url.path": route,
        "gen_ai.operation.name": _OPERATIONS.get(route, "text_completion"),
        "gen_ai.provider.name": "rootstock",
        REQUEST_ID: request_id,
    }
    span = tracing.begin(f"{method} {route}", dict(headers), attributes)
    return RequestTrace(span) if span is not None else None
