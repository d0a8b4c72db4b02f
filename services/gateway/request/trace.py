"""The gateway's spans of one traced request: the server's own, and those of tokenizing, waiting and each try on a worker.

A request that is not traced has none of these objects. Everything runs on the event loop. A span that is still open when its
request closes ends with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rootstock.v1 import common_pb2 as pb
from rootstock.v1 import tokenizer_pb2, worker_pb2
from services.gateway.request.context import CallContext
from services.gateway.request.errors import CLIENT_CLOSED, ApiError

if TYPE_CHECKING:
    from services.shared.observe.spans import Span, Tracing

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
    def __init__(self, span: Span) -> None:
        self._span = span
        self._choices: list[ChoiceTrace] = []
        self.traceparent = span.traceparent
        self.trace_id = span.trace_id

    @contextmanager
    def tokenizing(self, call: EncodeCall) -> Iterator[None]:
        """Around the call, which is told its context."""
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
        """The request is valid, and its prompts are ids. choices: how many answers that makes."""
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
        """A client's own mistake is no error of the server's span."""
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
    """One choice's times in the queue, and its tries: one span for each submit, by its handle."""

    def __init__(self, parent: Span, request_id: str) -> None:
        self._parent = parent
        self._request_id = request_id
        self._queue: Span | None = None
        self._tries: dict[int, Span] = {}

    def waits(self, moved: bool) -> None:
        """moved: it had a worker before."""
        self._queue = self._parent.child("queue", {REQUEST_ID: self._request_id, "rootstock.moved": moved})

    def waited(self) -> None:
        if self._queue is not None:
            self._queue.end()
            self._queue = None

    def submits(self, address: str, worker_id: str, submit: worker_pb2.Submit, reason: str, tokens: int, predicted: int) -> str:
        """address, worker_id: where it goes. tokens: of its prompt; predicted: of those, what is thought to be cached there.
        Returns the traceparent for the worker."""
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
        """By the worker's terminal output."""
        span = self._tries.pop(finish.handle, None)
        if span is None:
            return
        if finish.reason == pb.FINISH_REASON_ABORT:
            name = pb.ErrorCode.Name(finish.error)
            if finish.error == pb.ERROR_CODE_UNAVAILABLE:
                span.set({ENDED_BY: "drain", "error.type": name})  # another worker goes on
            else:
                span.set({ENDED_BY: "abort"})
                span.fail(name, finish.message)
        else:
            tokens = {"rootstock.cached_tokens": finish.cached_tokens, "rootstock.output_tokens": finish.completion_tokens}
            span.set({ENDED_BY: "finish", "rootstock.retractions": finish.retractions, **tokens})
        span.end()

    def aborted(self, handle: int) -> None:
        """By the gateway: the client has left, another copy was first, or the request has failed."""
        if (span := self._tries.pop(handle, None)) is not None:
            span.set({ENDED_BY: "abort"})
            span.end()

    def lost(self, handle: int) -> None:
        """The worker is gone."""
        if (span := self._tries.pop(handle, None)) is not None:
            span.set({ENDED_BY: "lost"})
            span.fail("worker_lost")
            span.end()

    def end(self) -> None:
        self.waited()
        for handle in list(self._tries):
            self.aborted(handle)


def begin_trace(tracing: Tracing, context: CallContext) -> RequestTrace | None:
    """Begins the server span of a generation request. Returns None if the request is not sampled."""
    attributes = {
        "http.request.method": context.method,
        "http.route": context.route,
        "url.path": context.route,
        "gen_ai.operation.name": _OPERATIONS.get(context.route, "text_completion"),
        "gen_ai.provider.name": "rootstock",
        REQUEST_ID: context.request_id,
    }
    span = tracing.begin(f"{context.method} {context.route}", dict(context.trace_headers), attributes)
    return RequestTrace(span) if span is not None else None
