"""From a body to all that dispatch needs: checks first, then the tokenizer, then the checks that need lengths.

Cancelling a preparation leaves nothing behind. Nothing is asked of a worker here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from services.gateway.api import prompts
from services.gateway.api.chat_preparer import Settled
from services.gateway.api.known_fields import WEB_SEARCH, hosted_type, omitted_names
from services.gateway.api.openai.chat_call import chat_call
from services.gateway.api.openai.parsed import parsed_generation
from services.gateway.api.openai.predicted import predicted_text
from services.gateway.api.openai.tools import ToolUse, tool_use
from services.gateway.api.openai.types import ChatCompletionRequest, CompletionRequest, NamedBody
from services.gateway.api.openai.validation import (
    chat_generation,
    completion_generation,
    embedding_generation,
    parse_chat,
    parse_completion,
    parse_embedding,
)
from services.gateway.api.room import UNBOUNDED, for_a_vector, for_an_answer
from services.gateway.api.session_fields import begins, check_turn
from services.gateway.api.strict_json import parse_json
from services.gateway.parsers.output_parser import MakeParser, MakeParsing, Parsing
from services.gateway.peers.detokenizer_link import DetokPool
from services.gateway.peers.tokenizer_client import TokenizerClient
from services.gateway.request import budgets
from services.gateway.request.bodies import ReceivedBody
from services.gateway.request.caller import Caller
from services.gateway.request.decoding import Decoding
from services.gateway.request.errors import ApiError, bad_request
from services.gateway.request.generation import Generation, ModelInfo, Models, Part, Plan, Prompt
from services.gateway.request.origin import Origin
from services.shared import limits
from services.shared.output_formats import NONE


class Preparer:
    """dropped: called for each call of which a client sees nothing. omits_hosted_tools: chats are served without their hosted
    tools instead of refused. Every method raises ApiError."""

    def __init__(
        self,
        models: Models,
        tokenizer: TokenizerClient,
        detoks: DetokPool,
        make_parser: MakeParser,
        dropped: Callable[[], None],
        omits_hosted_tools: bool,
    ) -> None:
        self._models = models
        self._tokenizer = tokenizer
        self._detoks = detoks
        self._make_parser = make_parser
        self._dropped = dropped
        self.omits_hosted_tools = omits_hosted_tools

    async def chat(self, body: ReceivedBody, origin: Origin) -> Plan:
        return await self.of_chat(parse_json(body.take()), origin)

    async def of_chat(self, chat: dict[str, Any], origin: Origin, settled: Settled | None = None) -> Plan:
        """chat: a body, of whatever API it was made. settled: see ChatPreparer."""
        request, use = self._parsed(chat, origin)
        if request.stream:
            origin.wants_stream()
        call, predicted = chat_call(request, origin.request_id), predicted_text(request.prediction)
        request = request.model_copy(update={"messages": (), "prediction": None})  # they may be 64 MiB, and are copied
        _call_it(request, origin, None)
        model = await self._generating_model(request.model, origin.caller)
        model = model if settled is None else settled.of(model)
        budgets.check_sets(request.allowed_token_ids, request.banned_token_ids, request.n or 1)
        generation = chat_generation(request, model.vocab_size)
        _check_turn(generation, 1)
        call.hash_root = self._models.hash_root(model, origin.caller.cache_salt_of(generation.cache_salt))
        if settled is None:
            room = for_an_answer(model, generation.session is not None)
            prompt = await prompts.of_chat(call, self._tokenizer, model, origin, room)
        else:
            prompt = settled.prompt
        if settled is not None and settled.formats is not None:
            formats, marks = settled.formats, settled.reasoning_marks
        else:
            if settled is not None:
                await self._tokenizer.ready(model.source)  # nobody has asked it for this prompt
            known, marks = self._tokenizer.formats(model.source), self._tokenizer.reasoning_marks(model.source)
            formats = use.formats(known if request.separate_reasoning is not False else replace(known, reasoning=NONE))
            formats = formats.after(prompt.rendered_end)
        generation = parsed_generation(generation, use, formats, self._parsing(marks))
        (part,) = _parts([prompt], generation, request, origin)
        if predicted is not None:
            ids = () if request.speculative is False else await self._ids_of(predicted, model, origin)
            part = replace(part, prediction=ids)
        return Plan(model, [part])

    async def _ids_of(self, predicted: str, model: ModelInfo, origin: Origin) -> Sequence[int]:
        """Empty where nobody would read them."""
        if not self._models.reads_predictions(model):
            return ()
        return await prompts.of_prediction(predicted, self._tokenizer, model, origin)

    async def count_of(self, chat: dict[str, Any], origin: Origin) -> int:
        """Tokens of a chat's prompt, which may be longer than the context. No worker is asked."""
        request, _ = self._parsed(chat, origin)
        call = chat_call(request, origin.request_id)
        model = await self._generating_model(request.model, origin.caller)
        return len((await prompts.of_chat(call, self._tokenizer, model, origin, UNBOUNDED)).ids)

    def _parsed(self, chat: dict[str, Any], origin: Origin) -> tuple[ChatCompletionRequest, ToolUse]:
        """Returns the checked body without its hosted tools, which `origin` notes, and the functions that may be called."""
        omits = self.omits_hosted_tools
        if omits and chat.get(WEB_SEARCH) is not None:
            origin.omit([WEB_SEARCH])
            chat = {**chat, WEB_SEARCH: None}
        request = parse_chat(chat, origin)
        use = tool_use(request.tools, request.tool_choice, request.parallel_tool_calls, omits)
        if omits and (omitted := omitted_names(request.tools)):
            origin.omit(omitted)
            request = request.model_copy(update={"tools": [tool for tool in request.tools or () if not hosted_type(tool)]})
        return request, use

    async def completion(self, body: ReceivedBody, origin: Origin) -> Plan:
        request = parse_completion(parse_json(body.take()), origin)
        if request.stream:
            origin.wants_stream()
        _call_it(request, origin, request.prompt)
        model = await self._generating_model(request.model, origin.caller)
        generation = completion_generation(request, model.vocab_size)
        checked = await self._completion_prompts(request, generation, model, origin)
        if len(checked) * generation.n > limits.MAX_BATCH_PROMPTS:
            raise bad_request("n", f"Prompts times 'n' may be at most {limits.MAX_BATCH_PROMPTS}.")
        budgets.check_sets(request.allowed_token_ids, request.banned_token_ids, len(checked) * generation.n)
        _check_turn(generation, len(checked))
        prefixes = [""] * len(checked)
        if request.echo:
            prefixes = [await self._text_of(prompt, generation, origin, model) for prompt in checked]
        return Plan(model, _parts(checked, generation, request, origin, prefixes))

    async def embedding(self, body: ReceivedBody, origin: Origin) -> Plan:
        request = parse_embedding(parse_json(body.take()), origin)
        _call_it(request, origin, request.input)
        model = await self.model_of(request.model, origin.caller)
        if not model.embedding_size:
            raise bad_request("model", "This model gives no embeddings.", "unsupported_model")
        generation = embedding_generation(request, model.embedding_size)
        root = self._models.hash_root(model, origin.caller.cache_salt_of(generation.cache_salt))
        room, special = for_a_vector(model), request.add_special_tokens is not False
        most = request.truncate_prompt_tokens
        if most is not None:
            room, root = UNBOUNDED, b""
        checked = await prompts.of_completion(request.input, model, self._tokenizer, origin, "input", room, root, special)
        if most is not None:
            most = min(most, model.context_len) if most >= 0 else model.context_len
            checked = [prompts.of_last(prompt, most, "truncate_prompt_tokens") for prompt in checked]
        return Plan(model, _parts(checked, generation, request, origin))

    async def _completion_prompts(
        self, request: CompletionRequest, generation: Generation, model: ModelInfo, origin: Origin
    ) -> list[Prompt]:
        root = self._models.hash_root(model, origin.caller.cache_salt_of(generation.cache_salt))
        room = for_an_answer(model, generation.session is not None)
        special = begins(request.session_params) if request.add_special_tokens is None else request.add_special_tokens
        return await prompts.of_completion(request.prompt, model, self._tokenizer, origin, "prompt", room, root, special)

    def _parsing(self, marks: Sequence[int]) -> MakeParsing:
        return lambda formats, setup: Parsing(formats, setup, self._make_parser, self._dropped, marks)

    async def _generating_model(self, name: str | None, caller: Caller) -> ModelInfo:
        model = await self.model_of(name, caller)
        if not model.generates:
            raise bad_request("model", "This model gives embeddings only; see /v1/embeddings.", "unsupported_model")
        return model

    async def text_of(self, ids: Sequence[int], skip_special_tokens: bool, origin: Origin, model: ModelInfo) -> str:
        return await decode_once(self._detoks, origin, ids, skip_special_tokens, model.source)

    async def model_of(self, name: str | None, caller: Caller) -> ModelInfo:
        """Returns the model of this name, for None the only one that the caller may use. Raises ApiError."""
        self._require(name, caller)
        model = await self._models.wait_for(name, caller)
        self._require(name, caller)
        return model

    def _require(self, name: str | None, caller: Caller) -> None:
        """Raises ApiError without a name if the caller may use several models; some may appear while a request waits."""
        if name is None and sum(map(caller.may_use, self._models.names())) > 1:
            raise bad_request("model", "'model' is required: several are served, see /v1/models.", "missing_required_parameter")

    async def _text_of(self, prompt: Prompt, generation: Generation, origin: Origin, model: ModelInfo) -> str:
        if prompt.text is not None:
            return prompt.text
        return await self.text_of(prompt.ids, generation.skip_special_tokens, origin, model)


def _call_it(request: NamedBody, origin: Origin, given: Any) -> None:
    """From here on it can be aborted by the name that its body gives it, too, and by those of its prompts. given: the prompts, in
    any of OpenAI's forms."""
    name = _name_of(request)
    if name is None:
        return
    origin.names.append(name)
    if isinstance(given, list) and given and not isinstance(given[0], int):
        origin.part_names.extend(f"{name}_{index}" for index in range(min(len(given), limits.MAX_BATCH_PROMPTS)))


def _name_of(request: NamedBody) -> str | None:
    return request.request_id if request.rid is None else request.rid


def _check_turn(generation: Generation, num_prompts: int) -> None:
    if generation.session is not None:
        check_turn(num_prompts * generation.n == 1, "echo" if generation.wants_prompt_logprobs else None)


def _parts(
    checked: Sequence[Prompt], generation: Generation, request: NamedBody, origin: Origin, prefixes: Sequence[str] = ()
) -> list[Part]:
    """A turn of a session has a name that a later one can say, its client's or the HTTP request's."""
    name = _name_of(request) or (origin.request_id if generation.session is not None else "")
    many = bool(name) and len(checked) > 1
    return [
        Part(prompt, generation, prefixes[index] if prefixes else "", f"{name}_{index}" if many else name)
        for index, prompt in enumerate(checked)
    ]


async def decode_once(detoks: DetokPool, origin: Origin, ids: Sequence[int], skip_special_tokens: bool, model: str) -> str:
    """The text of ids that are all there. Raises ApiError; cancelling it frees the handle."""
    sink = _WholeText()
    decoding = Decoding(
        sink,
        origin.request_id,
        list(ids),
        skip_special_tokens=skip_special_tokens,
        model=model,
        traceparent=origin.traceparent,
    )
    sink.decoding = decoding
    decoding.finish("")
    detoks.touch(decoding)
    try:
        return await sink.text
    finally:
        detoks.drop(decoding)


class _WholeText:
    """Collects the text of one Decoding."""

    decoding: Decoding

    def __init__(self) -> None:
        self.text: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._parts: list[str] = []

    def on_text(self, text: str, count: int) -> None:
        self._parts.append(text)
        if self.decoding.done and not self.text.done():
            self.text.set_result("".join(self._parts))

    def on_decode_failed(self, error: ApiError) -> None:
        if not self.text.done():
            self.text.set_exception(error)
