"""The rendering process: `python -m services.tokenizer.render_child`, started and killed by RenderPool.

It imports jinja2 and the standard library only. What it reads and writes is framed as one JSON line, then raw bytes:
  setup    {"templates", "special_tokens", "max_chars", "max_messages", "memory_bytes", "seconds",
           "start_seconds"}  → {"error": null or text}
  request  {"sizes": [messages, tools, kwargs], "add_generation_prompt", "continue_final_message",
           "read_variables"} + three JSON texts
  reply    {"status": "ok" | "invalid" | "too_much", "message", "size"} + the rendered text in UTF-8;
           "ends": true where the process ends after it
It ends at the end of its input, out of memory, and by its own alarm if a request overruns and nobody is left to kill it.
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

from services.tokenizer import chat_messages
from services.tokenizer.chat_messages import InvalidField
from services.tokenizer.chat_template import ChatTemplate, OutputTooLong, TemplateRefusal
from services.tokenizer.history.template_forms import TemplateForms
from services.tokenizer.history.turns import Message
from services.tokenizer.mapped_blocks import map_large_blocks

ALARM_MARGIN_S = 1.0  # the parent kills first
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
SMALL_CHARS = 1 << 18  # of a rendered small chat, beside the template's own text
MAX_OTHERS = 8  # further ways in which a chat is tried that its template has refused
OTHERS_SECONDS = 1.0  # after which no further way is tried
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
PRINTED_PART = "{'type': 'text'"  # of a list that a template has printed as it is
RESERVED_KWARGS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")


class TooMuch(Exception):
    """A cap was passed; the message names it."""


class Renderer:
    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Raises what jinja2's compiler raises if a template is none."""
        self._templates = {name: ChatTemplate(source) for name, source in setup["templates"].items()}
        self._forms = {name: self._forms_of(template) for name, template in self._templates.items()}
        self._special_tokens: dict[str, str] = setup["special_tokens"]
        self._max_chars: int = setup["max_chars"]
        self._max_messages: int = setup["max_messages"]

    def render(self, header: Mapping[str, Any], messages_json: bytes, tools_json: bytes, kwargs_json: bytes) -> str:
        """Raises InvalidField, TooMuch, MemoryError."""
        tools = chat_messages.parse("tools", tools_json, list)
        kwargs = chat_messages.parse("template_kwargs", kwargs_json, dict) or {}
        for name in RESERVED_KWARGS:
            if name in kwargs:
                raise InvalidField(f"template_kwargs: {name} cannot be set here")
        raw = chat_messages.parse("messages", messages_json, list) or []
        if len(raw) > self._max_messages:
            raise TooMuch(f"messages: {len(raw)} messages, at most {self._max_messages}")
        name = self._template_name(tools)
        for variable in header.get("read_variables", ()):
            if variable not in self._templates[name].variables:
                raise InvalidField(f"{variable}: this model's chat template does not read a variable of this name")
        messages = chat_messages.prepare(raw)
        final = chat_messages.tag_final(messages) if header["continue_final_message"] else None
        variables = {**kwargs, "tools": tools, "add_generation_prompt": header["add_generation_prompt"]}
        text = self._shown(name, messages, variables)
        return text if final is None else chat_messages.cut_at_tag(text, final)

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
        """Renders the chat in the forms of its template. Raises InvalidField that names the message at which it fails."""
        template, forms, tools = self._templates[name], self._forms[name], bool(variables["tools"])
        ordered = forms.ordered(messages, tools)
        chat = forms.spelled(ordered.turns, tools)
        begun = time.monotonic()
        found = self._rendered(template, chat, variables)
        if isinstance(found, str):
            return found
        at = self._failing(template, chat, variables)
        others = forms.others(chat, ordered, None if isinstance(found, TemplateRefusal) else at, tools)
        for other in itertools.islice(others, MAX_OTHERS):
            if time.monotonic() - begun > OTHERS_SECONDS:
                break
            text = self._rendered(template, other, variables)
            if isinstance(text, str) and PRINTED_PART not in text:
                return text
        where = "messages" if at is None else f"messages[{ordered.turns[at].index}]"
        raise InvalidField(f"{where}: {_said(found)}")

    def _failing(self, template: ChatTemplate, chat: list[Message], variables: Mapping[str, Any]) -> int | None:
        """Returns the index of the message that the template has read last when it fails; None if it has read none."""
        last: list[int] = []
        self._rendered(template, [_Watched(message, at, last) for at, message in enumerate(chat)], variables)
        return last[0] if last else None

    def _rendered(
        self, template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any], max_chars: int = 0
    ) -> str | Exception:
        """Returns the text, or the reason why there is none.

        Args:
            max_chars: limit of the text; 0 for the limit of requests.

        Raises:
            TooMuch: the text is longer.
            MemoryError: the template needs more than the process may have.
        """
        given = {"documents": None, **self._special_tokens, **variables, "messages": messages}
        try:
            return template.render(given, max_chars or self._max_chars)
        except OutputTooLong:
            raise TooMuch(f"messages: the chat template's output is longer than {self._max_chars} characters") from None
        except MemoryError:
            raise
        except Exception as error:  # of any kind: a template is a program
            return error


class _Watched(dict[str, Any]):
    """A message that notes its index whenever the template reads a field of it."""

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
    """Returns a template's own words. Of other errors it returns only the type: the interpreter's words may quote the prompt."""
    if isinstance(error, TemplateRefusal):
        return str(error.message)
    return f"the chat template failed with {type(error).__name__}"


def _answer(renderer: Renderer, header: Mapping[str, Any], parts: list[bytes]) -> tuple[str, str, bytes]:
    """(status, message, rendered text)."""
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
    map_large_blocks()
    setup = json.loads(source.readline())
    try:
        renderer = _set_up(setup)
    except Exception as error:  # whatever the compiler ran into
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
