"""The rendering process: `python -m services.tokenizer.render_child`, started and killed by RenderPool.

The process imports jinja2 and the standard library only. Each message on its standard input and output is one JSON line, followed
by raw bytes:

| message | JSON line | bytes |
| --- | --- | --- |
| setup | templates, special_tokens, max_chars, max_messages, memory_bytes, seconds, start_seconds | |
| reply to the setup | error: null or a text | |
| request | sizes, add_generation_prompt, continue_final_message, read_variables | messages, tools and kwargs in JSON |
| reply to a request | status (ok, invalid, too_much), message, size; "ends" if the process ends now | rendered text |

The process ends at the end of its input, when it is out of memory, and by its own alarm if a request takes too long and the
parent does not kill it.
"""

from __future__ import annotations

import itertools
import json
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from services.shared.memory import map_large_blocks
from services.tokenizer.chat import (
    ChatTemplate,
    InvalidField,
    OutputTooLong,
    TemplateRefusal,
    cut_at_tag,
    parse_json,
    prepare_messages,
    tag_final,
)
from services.tokenizer.history.template_forms import TemplateForms
from services.tokenizer.history.turns import Message

MAPPED_BLOCK_BYTES = 1 << 18  # threshold of map_large_blocks(); a text of 256 KiB is a large request
ALARM_MARGIN_S = 1.0  # added to the time limit, so that the parent kills the process first
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
SMALL_CHARS = 1 << 18  # limit of a rendered small chat, which includes the template's own text
MAX_OTHERS = 8  # other forms of a chat that are tried after its template has refused the first
OTHERS_SECONDS = 1.0  # time after which no other form is tried
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
PRINTED_PART = "{'type': 'text'"  # appears in the text if a template has printed a list of parts as Python writes it
RESERVED_KWARGS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")


class TooMuch(Exception):
    """A request exceeds a limit. The message names the limit."""


class Renderer:
    """The compiled templates of a model and the forms of message that each of them shows."""

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
                raise InvalidField(f"{variable}: this model's chat template does not read a variable of this name")
        messages = prepare_messages(raw)
        final = tag_final(messages) if header["continue_final_message"] else None
        variables = {**kwargs, "tools": tools, "add_generation_prompt": header["add_generation_prompt"]}
        text = self._shown(name, messages, variables)
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

    def _shown(self, name: str, messages: list[Message], variables: Mapping[str, Any]) -> str:
        """Renders the chat in the forms of its template. Raises InvalidField with the message at which the template fails."""
        template, forms, tools = self._templates[name], self._forms[name], bool(variables["tools"])
        turns, is_tried = forms.ordered(messages, tools)
        chat = forms.spelled(turns, tools)
        begun = time.monotonic()
        found = self._rendered(template, chat, variables)
        if isinstance(found, str):
            return found
        at = self._failing(template, chat, variables)
        others = forms.others(chat, turns, None if isinstance(found, TemplateRefusal) else at, tools, is_tried)
        for other in itertools.islice(others, MAX_OTHERS):
            if time.monotonic() - begun > OTHERS_SECONDS:
                break
            text = self._rendered(template, other, variables)
            if isinstance(text, str) and PRINTED_PART not in text:
                return text
        where = "messages" if at is None else f"messages[{turns[at].index}]"
        raise InvalidField(f"{where}: {_said(found)}")

    def _failing(self, template: ChatTemplate, chat: list[Message], variables: Mapping[str, Any]) -> int | None:
        """Returns the index of the message that the template reads last before it fails, or None if it reads no message."""
        last: list[int] = []
        self._rendered(template, [_Watched(message, at, last) for at, message in enumerate(chat)], variables)
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


class _Watched(dict[str, Any]):
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


def _said(error: Exception) -> str:
    """Returns a template's own message. Returns only the type of another error, because Python's message may quote the prompt."""
    if isinstance(error, TemplateRefusal):
        return str(error.message)
    return f"the chat template failed with {type(error).__name__}"


def _answer(renderer: Renderer, header: Mapping[str, Any], parts: list[bytes]) -> tuple[str, str, bytes]:
    """Returns status, message and rendered text of the reply."""
    try:
        return "ok", "", renderer.render(header, *parts).encode()
    except InvalidField as error:
        return "invalid", str(error), b""
    except UnicodeEncodeError:
        return "invalid", "messages: text with half of a surrogate pair", b""
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
            status, message, body = _answer(renderer, header, parts)
        except MemoryError:
            message = "messages: the chat template needs too much memory"
            _send(out, {"status": "too_much", "message": message, "size": 0, "ends": True})
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(out, {"status": status, "message": message, "size": len(body)}, body)


if __name__ == "__main__":
    main()
