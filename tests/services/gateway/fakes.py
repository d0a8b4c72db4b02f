"""Fake tokenizers, detokenizers and workers on real gRPC. A token's id is its code point; id 0 is the end of sequence.

The servicers run on the event loop of System (system.py). Tests read their attributes, and change them through System.call.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import numpy as np
import orjson

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import (
    detokenizer_pb2,
    detokenizer_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from rootstock_llm.services.local.ports import free_ports
from rootstock_llm.services.tokenizer import refusal
from rootstock_llm.services.tokenizer.server import EncodeStream

EOS = 0
VOCAB_SIZE = 0x20000
CONTEXT_LEN = 512
EMBEDDING_SIZE = 4
ROUTED_PER_TOKEN = 6  # expert ids of a token at a worker that returns routed experts
MODEL = "test-model"


def ids_of(text: str) -> list[int]:
    return [ord(char) for char in text]


def text_of(ids: list[int]) -> str:
    return "".join(chr(token) for token in ids if token != EOS)


def chat_text(messages: list[dict[str, Any]], generation_prompt: bool = True) -> str:
    """Renders messages as the fake chat template does."""
    return "".join(f"<{m['role']}>{m['content']}" for m in messages) + ("<assistant>" if generation_prompt else "")


def logprob_of(token: int) -> float:
    """Returns the fake worker's log probability of a token at any position; exact in float32."""
    return -(token % 10) / 8


def experts_of(token: int, position: int) -> list[int]:
    """Returns the fake worker's experts of a token at a position, ROUTED_PER_TOKEN ids."""
    return [(token * 7 + position * 3 + at) % 300 for at in range(ROUTED_PER_TOKEN)]


def tops_of(token: int, k: int) -> list[tuple[int, float]]:
    """Returns the fake worker's `k` most likely tokens in falling order: `token` and its successors."""
    return [(token + rank, logprob_of(token) - rank) for rank in range(k)]


def chosen_of(token: int) -> float:
    """Returns the fake worker's log probability of a token that was requested by its id."""
    return -(token % 10) / 8 - 20


def vector_of(ids: list[int]) -> list[float]:
    """Returns the fake worker's embedding of a prompt: EMBEDDING_SIZE numbers, exact in float32."""
    return [len(ids) / 8, ids[0] / 8, ids[-1] / 8, 0.5]


def label_logprob_of(ids: list[int], label: int) -> float:
    """Returns the fake worker's log probability of a label after a prompt."""
    return -((len(ids) + ids[-1] + label) % 16) / 8


def logprob_rows(handle: int, tokens: list[int], wanted: pb.Logprobs) -> worker_pb2.LogprobRows:
    tops = [top for token in tokens for top in tops_of(token, wanted.top)]
    return worker_pb2.LogprobRows(
        handle=handle,
        values=[logprob_of(token) for token in tokens],
        k=wanted.top,
        top_ids=[token for token, _ in tops],
        top_values=[value for _, value in tops],
        chosen_values=[chosen_of(token) for _ in tokens for token in wanted.token_ids],
    )


class FakeTokenizer(tokenizer_pb2_grpc.TokenizerServicer):
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: list[tuple[grpc.StatusCode, str]] = []  # errors of the next calls
        self.calls: list[Any] = []
        self.cancelled = 0
        self.batches: list[tokenizer_pb2.EncodeBatch] = []  # batches of all EncodeMany streams
        self.info = tokenizer_pb2.TokenizerInfo()
        self.contexts: list[Any] = []  # contexts of all EncodeMany streams

    async def Encode(self, request: tokenizer_pb2.EncodeRequest, context: Any) -> tokenizer_pb2.EncodeResponse:
        return await self._called(self._texts(request), context)

    async def EncodeChat(self, request: tokenizer_pb2.EncodeChatRequest, context: Any) -> tokenizer_pb2.EncodeResponse:
        return await self._called(self._chat(request), context)

    async def EncodeMany(self, request: Any, context: Any) -> None:
        self.contexts.append(context)
        await _FakeStream(self.batches, context, self._texts, self._chat).serve(asyncio.Event())

    async def Info(self, request: Any, context: Any) -> tokenizer_pb2.TokenizerInfo:
        return self.info

    async def _called(self, answer: Awaitable[tokenizer_pb2.EncodeResponse], context: Any) -> tokenizer_pb2.EncodeResponse:
        try:
            return await answer
        except refusal.Refusal as error:
            await context.abort(error.code, error.message)
            raise

    async def _texts(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        await self._begin(request)
        return tokenizer_pb2.EncodeResponse(prompts=[_wanted(text, request) for text in request.texts])

    async def _chat(self, request: tokenizer_pb2.EncodeChatRequest) -> tokenizer_pb2.EncodeResponse:
        await self._begin(request)
        text = chat_text(orjson.loads(request.messages_json), request.add_generation_prompt)
        return tokenizer_pb2.EncodeResponse(prompts=[_wanted(text, request)], rendered_end=text[-16:])

    async def _begin(self, request: Any) -> None:
        """Records the request and waits for the gate. If `failures` is not empty, raises a Refusal with the next one."""
        self.calls.append(request)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failures:
            raise refusal.Refusal(*self.failures.pop(0))


class _FakeStream(EncodeStream):
    def __init__(self, batches: list[tokenizer_pb2.EncodeBatch], *args: Any) -> None:
        super().__init__(*args)
        self._batches = batches

    def _take(self, batch: tokenizer_pb2.EncodeBatch) -> None:
        self._batches.append(batch)
        super()._take(batch)


def _wanted(text: str, request: Any) -> tokenizer_pb2.TokenIds:
    """Returns the ids of a text as the real tokenizer does.

    A text of more than `max_tokens` tokens gives its first `max_tokens` ids if the request has `cuts`, and no ids otherwise.
    """
    ids, max_tokens = ids_of(text), request.max_tokens
    if not max_tokens or len(ids) <= max_tokens:
        return tokenizer_pb2.TokenIds(ids=ids)
    return tokenizer_pb2.TokenIds(ids=ids[:max_tokens] if request.cuts else [], at_least=max_tokens + 1)


PAGE_SIZE = 4  # tokens per page of KV reservations
SECRET = b"0123456789abcdef"  # secret of KV reservations


@dataclass
class Row:
    """State of one handle on a fake detokenizer's stream."""

    stop: list[str]  # stop strings
    include_stop: bool  # whether the output keeps the matched stop string
    skip_special: bool  # whether special tokens have no text
    ids: list[int] = field(default_factory=list)  # all tokens so far
    emitted: int = 0  # characters that were sent

    def advance(self, finished: bool, matched: str) -> str:
        text = text_of(self.ids) if self.skip_special else "".join(chr(i) if i else "<eos>" for i in self.ids)
        if finished:
            if matched and not self.include_stop:
                text = text[: text.rindex(matched)]
        else:
            held_back = max((n for s in self.stop for n in range(1, len(s) + 1) if text.endswith(s[:n])), default=0)
            text = text[: len(text) - held_back]
        new, self.emitted = text[self.emitted :], max(self.emitted, len(text))
        return new


class FakeDetokenizer(detokenizer_pb2_grpc.DetokenizerServicer):
    def __init__(self) -> None:
        self.batches: list[detokenizer_pb2.DecodeBatch] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.open: dict[int, Row] = {}  # rows of the newest stream
        self.forget = 0  # number of next batches; all handles are forgotten before each of these batches
        self.contexts: list[Any] = []
        self.text_gate = asyncio.Event()
        self.text_gate.set()
        self.text_calls: list[list[int]] = []
        self.bytes_of: dict[int, bytes] = {EOS: b"<eos>"}  # texts of tokens that differ from their code points

    async def TokenTexts(self, request: detokenizer_pb2.TokenTextsRequest, context: Any) -> detokenizer_pb2.TokenTextsResponse:
        self.text_calls.append(list(request.token_ids))
        await self.text_gate.wait()
        return detokenizer_pb2.TokenTextsResponse(texts=[self.bytes_of.get(i, chr(i).encode()) for i in request.token_ids])

    async def Info(self, request: Any, context: Any) -> detokenizer_pb2.DetokenizerInfo:
        return detokenizer_pb2.DetokenizerInfo()

    async def Decode(
        self, batches: AsyncIterator[detokenizer_pb2.DecodeBatch], context: Any
    ) -> AsyncIterator[detokenizer_pb2.TextBatch]:
        rows: dict[int, Row] = {}
        self.open = rows
        self.contexts.append(context)
        async for batch in batches:
            if batch.handles or batch.closes:
                self.batches.append(batch)
            await self.gate.wait()
            if self.forget and batch.handles:
                self.forget -= 1
                rows.clear()
                batch.ClearField("opens")
            yield self._answer(rows, batch)

    @staticmethod
    def _answer(rows: dict[int, Row], batch: detokenizer_pb2.DecodeBatch) -> detokenizer_pb2.TextBatch:
        for o in batch.opens:
            assert o.handle not in rows, "handles are unique on a stream"
            skip_special = o.skip_special_tokens if o.HasField("skip_special_tokens") else True
            rows[o.handle] = Row(list(o.stop), o.include_stop, skip_special, list(o.replay_ids), o.emitted_chars)
        known: list[int] = []
        texts: list[str] = []
        unknown: list[int] = []
        position = 0
        columns = (batch.handles, batch.counts, batch.finished, batch.matched_stops)
        for handle, count, finished, matched in zip(*columns, strict=True):
            ids = batch.token_ids[position : position + count]
            position += count
            if handle not in rows:
                unknown.append(handle)
                continue
            known.append(handle)
            rows[handle].ids += ids
            texts.append(rows[handle].advance(finished, matched))
            if finished:
                del rows[handle]
        for handle in batch.closes:
            rows.pop(handle, None)
        return detokenizer_pb2.TextBatch(seq=batch.seq, handles=known, texts=texts, unknown=unknown)


@dataclass
class Running:
    """A request on a fake worker."""

    submit: worker_pb2.Submit  # as received
    script: list[int]  # ids of the whole output
    made: list[int] = field(default_factory=list)  # ids of the output so far, including output_ids of the submit
    by_tier: dict[str, int] = field(default_factory=dict)  # additional fields of the Finish
    sent_pieces: int = 0  # messages of prompt_logprobs() that were sent
    num_routed: int = 0  # first position whose routed experts were not sent

    def __post_init__(self) -> None:
        self.made += self.submit.output_ids  # tokens of another worker, after which this worker continues

    @property
    def num_made(self) -> int:
        """Number of tokens that this worker has made."""
        return len(self.made) - len(self.submit.output_ids)

    def next(self) -> tuple[int, worker_pb2.Finish | None]:
        token = self.script[len(self.made)] if len(self.made) < len(self.script) else EOS
        self.made.append(token)
        return token, self._finish(token)

    def ended(self) -> worker_pb2.Finish | None:
        """Returns the Finish of a request with max_new_tokens 0, which ends with its prompt."""
        return self._finish(EOS)

    def _finish(self, token: int) -> worker_pb2.Finish | None:
        sampling = self.submit.sampling
        finish = worker_pb2.Finish(
            handle=self.submit.handle,
            prompt_tokens=len(self.submit.prompt_ids),
            cached_tokens=min(3, len(self.submit.prompt_ids)),
            completion_tokens=len(self.made),
            **self.by_tier,
        )
        text = text_of(self.made)
        matched = [stop for stop in sampling.stop if text.endswith(stop)]
        patterns = [pattern for pattern in sampling.stop_regex if re.search(pattern, text)]
        if len(self.made) >= sampling.max_new_tokens:
            finish.reason = pb.FINISH_REASON_LENGTH
        elif (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            finish.reason, finish.matched_token = pb.FINISH_REASON_MATCHED_TOKEN, token
        elif matched:
            finish.reason, finish.matched_stop = pb.FINISH_REASON_MATCHED_STRING, matched[0]
        elif patterns:
            finish.reason, finish.matched_stop = pb.FINISH_REASON_MATCHED_REGEX, patterns[0]
        elif self.submit.hand_over:
            finish.reason = pb.FINISH_REASON_HANDED_OVER
            pages = len(self.submit.prompt_ids) // PAGE_SIZE
            if pages:
                finish.room.CopyFrom(worker_pb2.KvRoom(room=self.submit.handle + 1, epoch=1, secret=SECRET, pages=pages))
        else:
            return None
        return finish

    def prompt_logprobs(self) -> list[worker_pb2.LogprobRows]:
        """Returns the prompt's log probabilities in at most two messages, like a prompt that was computed in chunks."""
        wanted = self.submit.sampling.logprobs
        if not wanted.HasField("prompt_from"):
            return []
        ids = list(self.submit.prompt_ids)[max(1, wanted.prompt_from) :]
        pieces = [piece for piece in (ids[:2], ids[2:]) if piece]
        return [logprob_rows(self.submit.handle, piece, wanted) for piece in pieces]

    def routed_experts(self) -> list[worker_pb2.RoutedExperts]:
        """Returns the experts of the tokens that were computed since the last call: all tokens but the newest output token."""
        if not self.submit.HasField("routed_experts_from"):
            return []
        first = max(self.submit.routed_experts_from, self.num_routed)
        self.num_routed = len(self.submit.prompt_ids) + max(len(self.made) - 1, 0)
        tokens = [*self.submit.prompt_ids, *self.made]
        ids = [expert for at in range(first, self.num_routed) for expert in experts_of(tokens[at], at)]
        return [worker_pb2.RoutedExperts(handle=self.submit.handle, ids=np.array(ids, "<u2").tobytes())] if ids else []

    def embedded(self) -> worker_pb2.Finish:
        ids = list(self.submit.prompt_ids)
        vector = vector_of(ids)[: self.submit.sampling.embedding.dimensions or EMBEDDING_SIZE]
        return worker_pb2.Finish(
            handle=self.submit.handle, reason=pb.FINISH_REASON_EMBEDDED, prompt_tokens=len(ids), embedding=vector
        )

    def scored(self) -> worker_pb2.Finish:
        ids, labels = list(self.submit.prompt_ids), self.submit.sampling.score.label_token_ids
        values = [label_logprob_of(ids, label) for label in labels]
        return worker_pb2.Finish(
            handle=self.submit.handle,
            reason=pb.FINISH_REASON_SCORED,
            prompt_tokens=len(ids),
            cached_tokens=1,
            label_logprobs=values,
        )


class Refusal(NamedTuple):
    """Error fields of a Finish."""

    error: int  # ErrorCode
    message: str  # text of the error
    field: str = ""  # empty from older workers
    element: int | None = None  # index in the field, if the field has elements


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """A worker whose step makes one token for every request.

    The worker reports its load when a test calls report_load(), and also every `beat_s` seconds if `beat_s` is set. If a submit
    has another model version than the worker, the worker sends a new hello and refuses the submit.
    """

    def __init__(self, name: str = "worker-0", model: str = MODEL) -> None:
        self.info = worker_pb2.WorkerInfo(worker_id=name, generation=1, model=model)
        self.info.context_len, self.info.vocab_size = CONTEXT_LEN, VOCAB_SIZE
        self.info.generates, self.info.embedding_size, self.info.ends_with_prompt = True, EMBEDDING_SIZE, True
        self.answer: Callable[[worker_pb2.Submit], str] = lambda submit: "Hello, world!"
        self.refuse: list[tuple[Any, ...]] = []  # error fields for the next submits, as in Refusal
        self.steps_left: int | None = None
        self.merge = 1  # steps per message; a real worker merges steps for a slow gateway stream
        self.by_tier: dict[str, int] = {}  # additional fields of a Finish: cached tokens by tier, and other counts
        self.early_prompt = False  # the first message of prompt_logprobs() is sent before any step
        self.load: worker_pb2.WorkerLoad | None = None  # the latest load
        self.beat_s: float | None = None
        self.submits: list[worker_pb2.Submit] = []
        self.messages: list[worker_pb2.GenerateRequest] = []
        self.aborted: list[int] = []
        self.running: dict[int, Running] = {}  # requests of the newest stream
        self.contexts: list[Any] = []
        self.steps = 0
        self._kick = asyncio.Event()
        self.ended = 0  # streams that have ended
        self._loads = 0  # number of report_load() calls
        self._ready: list[worker_pb2.PagesReady] = []  # reports of announce() that are not sent yet
        self._hello_due = False
        self._refused: list[worker_pb2.Finish] = []  # refusals of the newest stream that are not sent yet

    def report_load(self, **fields: Any) -> None:
        """Sends a load on the open stream, and as the first load of every later stream."""
        self.load = worker_pb2.WorkerLoad(**fields)
        self._loads += 1
        self._kick.set()

    def announce(self, pages: int) -> None:
        """Reports `pages` computed pages of every prompt that will be handed over."""
        for handle, running in self.running.items():
            if running.submit.hand_over:
                room = worker_pb2.KvRoom(room=handle + 1, epoch=1, secret=SECRET, pages=pages)
                self._ready.append(worker_pb2.PagesReady(handle=handle, room=room))
        self._kick.set()

    def renew(self, revision: str) -> None:
        """Changes the model version and sends a new hello."""
        self.info.revision = revision
        self._hello_due = True
        self._kick.set()

    def end_running(self, code: int, message: str = "") -> None:
        """Ends every running request with an error."""
        reason = pb.FINISH_REASON_ABORT
        self._refused += [worker_pb2.Finish(handle=handle, reason=reason, error=code, message=message) for handle in self.running]
        self.running.clear()
        self._kick.set()

    def allow(self, steps: int | None) -> None:
        self.steps_left = steps
        self._kick.set()

    async def Generate(
        self, requests: AsyncIterator[worker_pb2.GenerateRequest], context: Any
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        running: dict[int, Running] = {}
        refused: list[worker_pb2.Finish] = []
        self.running, self._refused = running, refused
        self.contexts.append(context)
        yield worker_pb2.GenerateResponse(hello=self.info)
        num_sent = 0 if self.load is not None else self._loads
        reader = asyncio.create_task(self._read(requests, running, refused))
        try:
            while True:
                if self._hello_due:
                    self._hello_due = False
                    yield worker_pb2.GenerateResponse(hello=self.info)
                if num_sent != self._loads and self.load is not None:
                    num_sent = self._loads
                    yield worker_pb2.GenerateResponse(load=self.load)
                if self._ready:
                    yield worker_pb2.GenerateResponse(step=worker_pb2.StepOutput(ready=self._ready))
                    self._ready.clear()
                early = self._early_prompts(running)
                if early.prompt_logprobs:
                    yield worker_pb2.GenerateResponse(step=early)
                if refused or (running and self.steps_left != 0):
                    step = self._step(running, refused)
                    for _ in range(self.merge - 1):
                        step.MergeFrom(self._step(running, refused))
                    yield worker_pb2.GenerateResponse(step=step)
                    await asyncio.sleep(0.001)
                else:
                    self._kick.clear()
                    try:
                        await asyncio.wait_for(self._kick.wait(), self.beat_s)
                    except TimeoutError:
                        num_sent = -1
        finally:
            reader.cancel()
            running.clear()
            self.ended += 1

    async def _read(
        self, requests: AsyncIterator[worker_pb2.GenerateRequest], running: dict[int, Running], refused: list[Any]
    ) -> None:
        async for message in requests:
            self.messages.append(message)
            for submit in message.submits:
                assert submit.handle not in running, "handles are unique on a stream"
                self.submits.append(submit)
                other = bool(submit.revision) and submit.revision != self.info.revision
                self._hello_due |= other
                if self.refuse or other:
                    refusal = Refusal(pb.ERROR_CODE_OTHER_WEIGHTS, "others") if other else Refusal(*self.refuse.pop(0))
                    refused.append(worker_pb2.Finish(handle=submit.handle, reason=pb.FINISH_REASON_ABORT, **refusal._asdict()))
                else:
                    running[submit.handle] = Running(submit, ids_of(self.answer(submit)), by_tier=self.by_tier)
            for handle in message.aborts:
                self.aborted.append(handle)
                running.pop(handle, None)
            self._kick.set()

    def _early_prompts(self, running: dict[int, Running]) -> worker_pb2.StepOutput:
        step = worker_pb2.StepOutput()
        for request in running.values() if self.early_prompt else ():
            if not request.made and not request.sent_pieces:
                step.prompt_logprobs.extend(request.prompt_logprobs()[:1])
                request.sent_pieces = 1
        return step

    def _step(self, running: dict[int, Running], refused: list[worker_pb2.Finish]) -> worker_pb2.StepOutput:
        self.steps += 1
        step = worker_pb2.StepOutput(finishes=refused)
        refused.clear()
        if self.steps_left == 0:
            return step
        if self.steps_left is not None:
            self.steps_left -= 1
        for handle, request in list(running.items()):
            finish = self._advance(step, handle, request)
            if finish is not None:
                step.finishes.append(finish)
                del running[handle]
        return step

    @staticmethod
    def _advance(step: worker_pb2.StepOutput, handle: int, request: Running) -> worker_pb2.Finish | None:
        sampling = request.submit.sampling
        if sampling.HasField("embedding"):
            return request.embedded()
        if sampling.HasField("score"):
            return request.scored()
        if not request.made:
            step.prompt_logprobs.extend(request.prompt_logprobs()[request.sent_pieces :])
        if sampling.HasField("max_new_tokens") and not sampling.max_new_tokens:
            step.routed_experts.extend(request.routed_experts())
            return request.ended()
        token, finish = request.next()
        step.routed_experts.extend(request.routed_experts())
        step.handles.append(handle)
        step.counts.append(1)
        step.token_ids.append(token)
        if request.submit.prediction_ids:  # one accepted prediction token per output token, one rejected per two output tokens
            step.predicted_handles.append(handle)
            step.accepted_prediction_tokens.append(request.num_made)
            step.rejected_prediction_tokens.append(request.num_made // 2)
        if sampling.HasField("logprobs"):
            step.logprobs.append(logprob_rows(handle, [token], sampling.logprobs))
        return finish


SERVICERS: dict[type, Callable[[Any, grpc.aio.Server], None]] = {
    FakeTokenizer: tokenizer_pb2_grpc.add_TokenizerServicer_to_server,
    FakeDetokenizer: detokenizer_pb2_grpc.add_DetokenizerServicer_to_server,
    FakeWorker: worker_pb2_grpc.add_WorkerServicer_to_server,
}


class Host:
    """A fake servicer on a port that stays the same after stop() and start()."""

    def __init__(self, servicer: Any) -> None:
        self.servicer = servicer
        self.port = 0
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        SERVICERS[type(self.servicer)](self.servicer, self._server)
        self.port = _bound(self._server, self.port)
        await self._server.start()

    async def stop(self) -> None:
        """Stops the server as if its process were killed: open calls end at once."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def reserve(self) -> None:
        """Chooses a port without serving on it."""
        await self.start()
        await self.stop()


def _bound(server: grpc.aio.Server, port: int) -> int:
    """Adds `port` to the server, or a free port if `port` is 0, and returns the added port.

    Another process may take a free port before the server does, so the function tries five times.
    """
    for _ in range(5):
        with suppress(RuntimeError):
            return int(server.add_insecure_port(f"127.0.0.1:{port or free_ports(1)[0]}"))
    raise RuntimeError(f"could not bind to port {port or '(any)'} in five attempts")
