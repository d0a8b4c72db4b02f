"""The rendering process: `python -m rootstock_llm.services.tokenizer.render_child`, started and killed by RenderPool.

The process imports jinja2 and the standard library only. Each message on its standard input and output is one JSON line, followed
by raw bytes:

| message | JSON line | bytes |
| --- | --- | --- |
| setup | templates, special_tokens, max_chars, max_messages, memory_bytes, seconds, start_seconds | |
| reply to the setup | error: null or a text | |
| request | sizes, add_generation_prompt, continue_final_message, read_variables | messages, tools and kwargs in JSON |
| reply to a request | status (ok, invalid, too_much), message, size; "ends": true if the process then ends | rendered text |

The process ends at the end of its input, or when it is out of memory. If a request takes too long, the parent kills the process.
An alarm ends the process if the parent does not.

Messages are checked and prepared as in transformers' apply_chat_template: fields with null are omitted, reasoning is present
under the names `reasoning_content` and `thinking`, and continue_final_message is implemented with a tag in the final message.
`history.template_forms` chooses the form in which a template gets a message.

Templates have the semantics of transformers' render_jinja_template: trimmed blocks, loop controls, tojson without HTML escapes,
raise_exception, strftime_now, and a `generation` tag that renders its body unchanged. They run in an immutable sandbox.
"""

from __future__ import annotations

import datetime
import itertools
import json
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, BinaryIO, NoReturn

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from rootstock_llm.services.shared.memory import map_large_blocks
from rootstock_llm.services.tokenizer.history.template_forms import TemplateForms
from rootstock_llm.services.tokenizer.history.turns import Message

MAPPED_BLOCK_BYTES = 1 << 18  # threshold of map_large_blocks(); a text of 256 KiB is a large request
ALARM_MARGIN_S = 1.0  # seconds by which the alarm is later than the time limit, so that the parent kills the process first
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
SMALL_CHARS = 1 << 18  # largest output for a small test chat, in characters, including the template's own text
MAX_ALTERNATIVES = 8  # other forms of a chat that are tried if the template has refused the first form
ALTERNATIVES_SECONDS = 1.0  # time after which no other form is tried
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds a thing.",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string", "description": "A thing."}},
            "required": ["what"],
        },
    },
}
PRINTED_PART = "{'type': 'text'"  # occurs in the output if a template has printed a list of parts in Python syntax
RESERVED_KWARGS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
MAX_REFUSAL_CHARS = 500  # longer messages of a template's raise_exception() are cut
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class InvalidField(Exception):
    """A field of the request is invalid. The message names the field and the fault, and does not contain the value."""


def parse_json(name: str, data: bytes, kind: type) -> Any:
    """Returns the JSON value in `data`, or None if `data` is empty. Raises InvalidField unless its type is `kind`."""
    if not data:
        return None
    try:
        value = json.loads(data)
    except RecursionError:
        raise InvalidField(f"{name}: nested too deeply") from None
    except ValueError:  # malformed, not UTF-8, or a number with too many digits
        raise InvalidField(f"{name}: not valid JSON") from None
    if not isinstance(value, kind):
        raise InvalidField(f"{name}: not {'an array' if kind is list else 'an object'}")
    return value


def prepare_messages(messages: list[Any]) -> list[Message]:
    """Returns checked copies of the messages, without fields that are null, `[]` or `{}`. Raises InvalidField.

    A refusal becomes the content if there is none, and a deprecated function_call becomes a tool call. Reasoning under any name
    in _REASONING_FIELDS is copied to `reasoning_content` and `thinking`.
    """
    if not messages:
        raise InvalidField("messages: must have at least one message")
    return [_prepare_one(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _prepare_one(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise InvalidField(f"{where}: not an object")
    if not isinstance(message.get("role"), str):
        raise InvalidField(f"{where}.role: not a string")
    result = {name: value for name, value in message.items() if value is not None and value != [] and value != {}}
    if "content" in result:
        _check_content(result["content"], f"{where}.content")
    elif isinstance(result.get("refusal"), str):
        result["content"] = result["refusal"]
    if "tool_calls" in result:
        _check_calls(result["tool_calls"], f"{where}.tool_calls")
    elif isinstance(result.get("function_call"), dict):  # the API's deprecated form of a single call
        result["tool_calls"] = [{"type": "function", "function": result.pop("function_call")}]
    reasoning = next((result[name] for name in _REASONING_FIELDS if result.get(name)), None)
    for name in _REASONING_FIELDS:
        if result.get(name) == "":
            del result[name]
    return result if reasoning is None else {"thinking": reasoning, **result, "reasoning_content": reasoning}


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidField(f"{where}: must be a string or an array of parts")
    for at, part in enumerate(content):
        if not isinstance(part, dict):
            raise InvalidField(f"{where}[{at}]: not an object")
        if part.get("type") != "text":
            raise InvalidField(f"{where}[{at}].type: only 'text' is supported")
        if not isinstance(part.get("text"), str):
            raise InvalidField(f"{where}[{at}].text: not a string")


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise InvalidField(f"{where}: not an array")
    for at, call in enumerate(calls):
        if not isinstance(call, dict):
            raise InvalidField(f"{where}[{at}]: not an object")


def tag_final(messages: list[Message]) -> str:
    """Appends CONTINUE_TAG to the text of the last message, for cut_at_tag(). Returns the text without the tag.

    Raises:
        InvalidField: the last message has calls and no text.
    """
    final = messages[-1].get("content")
    if isinstance(final, list):
        part = final[-1]
        messages[-1]["content"] = [*final[:-1], {**part, "text": part["text"] + CONTINUE_TAG}]
        return str(part["text"])
    if final is None and "tool_calls" in messages[-1]:
        raise InvalidField(f"messages[{len(messages) - 1}].content: continue_final_message needs text to continue")
    messages[-1]["content"] = (final or "") + CONTINUE_TAG
    return final or ""


def cut_at_tag(rendered: str, final: str) -> str:
    """Returns the rendered chat up to the tag. Raises InvalidField if the template has omitted or changed the final message."""
    at = rendered.rfind(CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in rendered:
        raise InvalidField("continue_final_message: the chat template changes or omits the final message")
    keeps_spaces = rendered.startswith(CONTINUE_TAG, at)
    return rendered[:at] if keeps_spaces else rendered[:at].rstrip()


class TemplateRefusal(jinja2.TemplateError):
    """A template has called raise_exception(). The message comes from the template."""


class OutputTooLong(Exception):
    """The rendered text is longer than its limit. Rendering stops at the limit."""


class ChatTemplate:
    """A compiled template. The constructor raises jinja2.TemplateSyntaxError if the source does not compile."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        self.has_developer = "developer" in source  # whether the source mentions the role `developer`
        self._source = source
        self._template = environment.from_string(source)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads."""
        return frozenset(meta.find_undeclared_variables(_environment().parse(self._source)))

    def render(self, variables: Mapping[str, Any], max_chars: int) -> str:
        """Returns the rendered text.

        Raises:
            OutputTooLong: the text is longer than max_chars.
            TemplateRefusal: the template called raise_exception().
            Exception: any error in the template's own code.
        """
        pieces: list[str] = []
        left = max_chars
        for piece in self._template.generate(**variables):
            pieces.append(piece)
            left -= len(piece)
            if left < 0:
                raise OutputTooLong
        return "".join(pieces)


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = [_GenerationTag, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """The tag {% generation %}…{% endgeneration %}, which marks the assistant's text for training. Renders its body."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


class _TemplateDict:
    """A callable like `dict` that does not expose the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """A namespace that refuses names with a leading underscore, so that templates cannot reach interpreter internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No parameter is named `self`, so that a template may write namespace(self=…).
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError("names in a namespace must not begin with an underscore")


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateRefusal(str(message)[:MAX_REFUSAL_CHARS])


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


class TooMuch(Exception):
    """A request exceeds a limit. The message names the limit."""


class Renderer:
    """The compiled templates of a model, and for each template the forms of messages that it renders completely."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Compiles the templates. Raises the exception of jinja2's compiler if a template does not compile."""
        self._templates = {name: ChatTemplate(source) for name, source in setup["templates"].items()}
        self._forms = {name: self._forms_of(template) for name, template in self._templates.items()}
        self._special_tokens: dict[str, str] = setup["special_tokens"]
        self._max_chars: int = setup["max_chars"]
        self._max_messages: int = setup["max_messages"]

    def render(self, header: Mapping[str, Any], messages_json: bytes, tools_json: bytes, kwargs_json: bytes) -> str:
        """Returns the rendered chat.

        Raises:
            InvalidField: a field of the request is wrong, or the template refuses the chat.
            TooMuch: the request or the text exceeds a limit.
            MemoryError: the template needs more memory than the process may have.
        """
        tools = parse_json("tools", tools_json, list)
        kwargs = parse_json("template_kwargs", kwargs_json, dict) or {}
        for name in RESERVED_KWARGS:
            if name in kwargs:
                raise InvalidField(f"template_kwargs: {name} cannot be set here")
        raw = parse_json("messages", messages_json, list) or []
        if len(raw) > self._max_messages:
            raise TooMuch(f"messages: {len(raw)} messages, at most {self._max_messages}")
        name = self._template_name(tools)
        for variable in header.get("read_variables", ()):
            if variable not in self._templates[name].variables:
                raise InvalidField(f"{variable}: this model's chat template does not use this variable")
        messages = prepare_messages(raw)
        final = tag_final(messages) if header["continue_final_message"] else None
        variables = {**kwargs, "tools": tools, "add_generation_prompt": header["add_generation_prompt"]}
        text = self._render_in_forms(name, messages, variables)
        return text if final is None else cut_at_tag(text, final)

    def _template_name(self, tools: list[Any] | None) -> str:
        name = TOOL_TEMPLATE if tools is not None and TOOL_TEMPLATE in self._templates else DEFAULT_TEMPLATE
        if name not in self._templates:
            raise InvalidField("messages: the model has no default chat template")
        return name

    def _forms_of(self, template: ChatTemplate) -> TemplateForms:
        def rendered(messages: list[Message], tools: bool) -> str | None:
            variables = {"tools": [PROBE_TOOL] if tools else None, "add_generation_prompt": False}
            try:
                found = self._rendered(template, messages, variables, SMALL_CHARS)
            except TooMuch:
                return None
            return found if isinstance(found, str) else None

        return TemplateForms(rendered, template.has_developer)

    def _render_in_forms(self, name: str, messages: list[Message], variables: Mapping[str, Any]) -> str:
        """Renders the chat in the forms of its template. Raises InvalidField with the index of the message at which it fails."""
        template, forms, tools = self._templates[name], self._forms[name], bool(variables["tools"])
        turns, is_tried = forms.ordered(messages, tools)
        chat = forms.spelled(turns, tools)
        begun = time.monotonic()
        found = self._rendered(template, chat, variables)
        if isinstance(found, str):
            return found
        at = self._failing_index(template, chat, variables)
        alternatives = forms.alternatives(chat, turns, None if isinstance(found, TemplateRefusal) else at, tools, is_tried)
        for other in itertools.islice(alternatives, MAX_ALTERNATIVES):
            if time.monotonic() - begun > ALTERNATIVES_SECONDS:
                break
            text = self._rendered(template, other, variables)
            if isinstance(text, str) and PRINTED_PART not in text:
                return text
        where = "messages" if at is None else f"messages[{turns[at].index}]"
        raise InvalidField(f"{where}: {_reason(found)}")

    def _failing_index(self, template: ChatTemplate, chat: list[Message], variables: Mapping[str, Any]) -> int | None:
        """Returns the index of the message that the template reads last before it fails, or None if it reads no message."""
        last: list[int] = []
        self._rendered(template, [_ObservedMessage(message, at, last) for at, message in enumerate(chat)], variables)
        return last[0] if last else None

    def _rendered(
        self, template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any], max_chars: int = 0
    ) -> str | Exception:
        """Returns the rendered text, or the exception that the template raised.

        Args:
            max_chars: limit of the text; 0 for the limit of requests.

        Raises:
            TooMuch: the text is longer than the limit.
            MemoryError: the template needs more memory than the process may have.
        """
        given = {"documents": None, **self._special_tokens, **variables, "messages": messages}
        try:
            return template.render(given, max_chars or self._max_chars)
        except OutputTooLong:
            raise TooMuch(f"messages: the chat template's output is longer than {self._max_chars} characters") from None
        except MemoryError:
            raise
        except Exception as error:  # a template is a program and may raise anything
            return error


class _ObservedMessage(dict[str, Any]):
    """A message that records its index in `last` when the template reads one of its fields."""

    def __init__(self, message: Message, at: int, last: list[int]) -> None:
        super().__init__(message)
        self._at, self._last = at, last

    def __getitem__(self, name: str) -> Any:
        self._last[:] = [self._at]
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._last[:] = [self._at]
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self._last[:] = [self._at]
        return super().__contains__(name)


def _reason(error: Exception) -> str:
    """Returns the message of a template's refusal, or only the type of another error, whose message may quote the prompt."""
    if isinstance(error, TemplateRefusal):
        return str(error.message)
    return f"the chat template failed with {type(error).__name__}"


def _reply(renderer: Renderer, header: Mapping[str, Any], parts: list[bytes]) -> tuple[str, str, bytes]:
    """Returns status, message and rendered text of the reply."""
    try:
        return "ok", "", renderer.render(header, *parts).encode()
    except InvalidField as error:
        return "invalid", str(error), b""
    except UnicodeEncodeError:
        return "invalid", "messages: a text has an unpaired surrogate", b""
    except TooMuch as error:
        return "too_much", str(error), b""


def _send(out: BinaryIO, line: Mapping[str, Any], body: bytes = b"") -> None:
    out.write(json.dumps(line).encode() + b"\n")
    out.write(body)
    out.flush()


def _set_up(setup: Mapping[str, Any]) -> Renderer:
    memory = setup["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.setitimer(signal.ITIMER_REAL, setup["start_seconds"] + ALARM_MARGIN_S)
    return Renderer(setup)


def main() -> None:
    source, out = sys.stdin.buffer, sys.stdout.buffer
    map_large_blocks(MAPPED_BLOCK_BYTES)
    setup = json.loads(source.readline())
    try:
        renderer = _set_up(setup)
    except Exception as error:  # any error of jinja2's compiler
        _send(out, {"error": f"{type(error).__name__}: {error}"})
        return
    _send(out, {"error": None})
    signal.setitimer(signal.ITIMER_REAL, 0)
    while line := source.readline():
        header = json.loads(line)
        parts = [source.read(size) for size in header["sizes"]]
        signal.setitimer(signal.ITIMER_REAL, setup["seconds"] + ALARM_MARGIN_S)
        try:
            status, message, body = _reply(renderer, header, parts)
        except MemoryError:
            message = "messages: the chat template needs too much memory"
            _send(out, {"status": "too_much", "message": message, "size": 0, "ends": True})
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(out, {"status": status, "message": message, "size": len(body)}, body)


if __name__ == "__main__":
    main()
