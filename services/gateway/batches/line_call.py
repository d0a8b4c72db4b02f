"""Runs one line of a batch through the same operation as an HTTP request to the path of the line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from rootstock_llm.services.gateway.batches.line_results import LineResponse
from rootstock_llm.services.gateway.generation.bodies import RequestBody
from rootstock_llm.services.gateway.generation.errors import OPENAI
from rootstock_llm.services.gateway.generation.origin import Caller, Origin
from rootstock_llm.services.gateway.generation.usage import access_state
from rootstock_llm.services.gateway.observe.access_log import AccessLog
from rootstock_llm.services.gateway.service.sink import CollectedAnswer, GenerationCall, MakeOperation, RunGeneration
from rootstock_llm.services.shared.limits import MAX_BATCH_RESULT_BYTES


@dataclass(frozen=True, slots=True)
class LineAttempt:
    """The result of one attempt of a line."""

    answer: LineResponse
    retry_after_s: int  # value of Retry-After; 0 if the response has no such header
    code: str  # error code; "" on success


class LineCalls:
    """Computes lines with the operations of their paths. The caller checks that `operations` has the path."""

    def __init__(
        self, run: RunGeneration, operations: Mapping[str, MakeOperation], access: AccessLog, max_body_bytes: int
    ) -> None:
        """Connects the calls to the gateway.

        Args:
            run: GenerationService.run.
            operations: Operations by path. The caller fills the mapping before the first call.
            max_body_bytes: Largest body of a line.
        """
        self._run = run
        self._operations = operations
        self._access = access
        self._max_body_bytes = max_body_bytes

    async def call(self, path: str, body: bytes, caller: Caller, request_id: str) -> LineAttempt:
        """Computes a line and returns the result. A cancellation aborts the request and releases its resources."""

        async def read(line: RequestBody) -> None:
            await line.reserve_and_receive(body, self._max_body_bytes)

        operation = self._operations[path]()
        sink, began = CollectedAnswer(OPENAI, operation.make_renderer), time.monotonic()
        call = GenerationCall(Origin(request_id, path, caller=caller), operation.prepare, read)
        try:
            await self._run(call, sink)
        finally:
            if self._access.enabled and sink.running is not None:
                state, seconds = access_state(sink.running, sink.code, interrupted=not sink.status), time.monotonic() - began
                self._access.ended("batch", "POST", path, state, sink.status, len(sink.body), seconds)
        retry_after_s = int(dict(sink.headers).get(b"retry-after", b"0"))
        body = sink.body[: MAX_BATCH_RESULT_BYTES + 1]  # answered() replaces a longer body with an error
        return LineAttempt(LineResponse(sink.status or 500, body, request_id), retry_after_s, sink.code)
