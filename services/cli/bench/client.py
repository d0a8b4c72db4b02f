"""Measures one streaming request to an OpenAI-compatible server.

Times are in seconds. A chunk is a server-sent event with one or more tokens. TTFT ends at the first chunk. An ITL is the time
between two chunks. E2E ends at the last event with a choice, because later events contain only usage.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from rootstock_llm.services.cli.shared.exits import CommandFailed, Exit

DETAIL_CHARS = 300  # characters of an error that the results record


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's streaming endpoint, and the fields that all requests to it share."""

    url: str  # complete URL of the endpoint
    chat: bool  # whether the endpoint is /v1/chat/completions
    model: str
    ignore_eos: bool = False
    temperature: float = 0.0
    extra_body: dict[str, Any] = field(default_factory=dict)  # fields that are added to each body

    def body(self, prompt: dict[str, Any], max_tokens: int) -> bytes:
        fields: dict[str, Any] = {"model": self.model, **prompt, "max_tokens": max_tokens, "temperature": self.temperature}
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return orjson.dumps(fields | self.extra_body)


@dataclass(slots=True)
class Outcome:
    """Measurements of one request. `sent_at` and `scheduled_at` are values of time.perf_counter; durations begin at `sent_at`."""

    scheduled_at: float  # arrival of the session; equal to sent_at in a closed loop and for later turns
    sent_at: float
    ttft_s: float | None = None  # None: no token was received
    itl_s: list[float] = field(default_factory=list)  # one value per chunk after the first
    e2e_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    has_usage: bool = False  # whether the server sent usage; if not, completion_tokens is the number of chunks
    finish_reason: str | None = None
    text: str = ""
    error: str | None = None  # error class for the report, or None
    error_detail: str = ""


class StreamError(Exception):
    """The response is an error or breaks the protocol. The report counts it under the class `kind`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class StreamMeter:
    """Fills an Outcome from the bytes of one event stream. Owned by the coroutine that reads the response."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._tail = b""  # received bytes of an incomplete line
        self._texts: list[str] = []
        self._last_chunk_at = 0.0
        self._last_choice_at = 0.0
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        """Parses bytes that were read at time `now` and may end within an event.

        Raises:
            StreamError: An event is an error, or does not follow OpenAI's API.
        """
        *lines, self._tail = (self._tail + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def finish(self, complete: bool = True) -> None:
        """Completes the outcome. Raises StreamError if `complete` is set and the stream had no finish reason and no [DONE]."""
        outcome = self._outcome
        outcome.text = "".join(self._texts)
        if self._last_choice_at:
            outcome.e2e_s = self._last_choice_at - outcome.sent_at
            if outcome.ttft_s is None and outcome.finish_reason is not None:
                outcome.ttft_s = outcome.e2e_s  # the only tokens were in the last event, without text
        if outcome.ttft_s is not None and not outcome.has_usage:
            outcome.completion_tokens = 1 + len(outcome.itl_s)
        if complete and not self._done and outcome.finish_reason is None:
            raise StreamError("truncated stream", "the stream ended without a finish reason and without [DONE]")

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self._done = True
            return
        try:
            self._parsed(orjson.loads(payload), now)
        except (orjson.JSONDecodeError, AttributeError, TypeError) as error:  # not JSON, or a value of another type
            raise StreamError("malformed event", str(error)) from None

    def _parsed(self, event: dict[str, Any], now: float) -> None:
        if event.get("error"):
            raise StreamError(f"stream: {error_type(event['error'])}", str(event["error"]))
        if usage := event.get("usage"):
            self._usage(usage)
        for choice in event.get("choices") or ():
            self._choice(choice, now)

    def _usage(self, usage: dict[str, Any]) -> None:
        self._outcome.has_usage = True
        self._outcome.prompt_tokens = usage.get("prompt_tokens") or 0
        self._outcome.completion_tokens = usage.get("completion_tokens") or 0
        self._outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        self._last_choice_at = now
        self._outcome.finish_reason = choice.get("finish_reason") or self._outcome.finish_reason
        delta = choice.get("delta") or {}
        if text := choice.get("text") or delta.get("content"):
            self._texts.append(text)
        generated = text or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
        # An event without text is a chunk if its token is a part of a character. An event with only the role or only the finish
        # reason is not a chunk.
        if generated or not ("role" in delta or choice.get("finish_reason")):
            self._chunk(now)

    def _chunk(self, now: float) -> None:
        if self._outcome.ttft_s is None:
            self._outcome.ttft_s = now - self._outcome.sent_at
        else:
            self._outcome.itl_s.append(now - self._last_chunk_at)
        self._last_chunk_at = now


def error_type(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("type") or error.get("code") or "error")
    return "error"


def error_class(error: Exception) -> str:
    if isinstance(error, StreamError):
        return error.kind
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connect"
    return "disconnected"


async def stream(http: aiohttp.ClientSession, endpoint: Endpoint, body: bytes, scheduled_at: float | None = None) -> Outcome:
    """Sends one request and reads its stream to the end. If the request fails, the outcome has `error` set; nothing is raised."""
    now = time.perf_counter()
    outcome = Outcome(now if scheduled_at is None else scheduled_at, now)
    meter = StreamMeter(outcome)
    try:
        await read(http, endpoint.url, body, meter)
        meter.finish()
    except (aiohttp.ClientError, OSError, StreamError) as error:
        meter.finish(complete=False)
        outcome.error, outcome.error_detail = error_class(error), str(error)[:DETAIL_CHARS]
        outcome.e2e_s = time.perf_counter() - outcome.sent_at
    return outcome


async def read(http: aiohttp.ClientSession, url: str, body: bytes, meter: StreamMeter) -> None:
    async with http.post(url, data=body) as response:
        if response.status != 200:
            raise StreamError(f"HTTP {response.status}", (await response.text(errors="replace"))[:DETAIL_CHARS])
        async for data in response.content.iter_any():
            meter.feed(data, time.perf_counter())


def open_http(api_key: str | None = None, timeout_s: float | None = None) -> aiohttp.ClientSession:
    """Returns a session without a limit on connections, because the load shape limits the requests in flight.

    The caller must close the session.
    """
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout_s))


async def first_model(http: aiohttp.ClientSession, base_url: str) -> str:
    """Returns the first model that the server lists. Raises CommandFailed if it lists none, and aiohttp.ClientError."""
    async with http.get(f"{base_url}/v1/models", raise_for_status=True) as response:
        try:
            return str((await response.json())["data"][0]["id"])
        except (ValueError, LookupError, TypeError):  # not JSON, or not a list of models
            raise CommandFailed(Exit.FAILED, f"{base_url}/v1/models lists no model; set --model.") from None
