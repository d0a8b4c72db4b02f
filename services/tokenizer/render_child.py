"""The rendering process: `python -m services.tokenizer.render_child`, started and killed by RenderPool.

It imports jinja2 and the standard library only. What it reads and writes is framed as one JSON line, then raw bytes:
  setup    {"templates", "special_tokens", "max_chars", "max_messages", "memory_bytes", "seconds",
           "start_seconds"}  → {"error": null or text}
  request  {"sizes": [messages, tools, kwargs], "add_generation_prompt", "continue_final_message"} + three JSON texts
  reply    {"status": "ok" | "invalid" | "too_much", "message", "size"} + the rendered text in UTF-8;
           "ends": true where the process ends after it
It ends at the end of its input, out of memory, and by its own alarm if a request overruns and nobody is left to kill it.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

from services.tokenizer import chat_messages
from services.tokenizer.chat_messages import CALL_FORMS, PROBE, PROBE_CHAT, PROBE_REPR, USUAL_CALLS, CallForm, InvalidField
from services.tokenizer.chat_template import ChatTemplate, OutputTooLong, TemplateRefusal
from services.tokenizer.mapped_blocks import map_large_blocks

ALARM_MARGIN_S = 1.0  # the parent kills first
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
RESERVED_KWARGS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")


class TooMuch(Exception):
    """A cap was passed; the message names it."""


class Renderer:
    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Raises what jinja2's compiler raises if a template is none."""
        self._templates = {name: ChatTemplate(source) for name, source in setup["templates"].items()}
        self._call_forms: dict[ChatTemplate, CallForm] = {}  # of those that have been asked for one
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
        template = self._template(tools)
        form = self._call_form(template) if chat_messages.have_calls(raw) else USUAL_CALLS
        messages = chat_messages.prepare(raw, template.wants_string, form, template.has_developer)
        final = chat_messages.tag_final(messages) if header["continue_final_message"] else None
        flags = {"add_generation_prompt": header["add_generation_prompt"]}
        variables = {"documents": None, **self._special_tokens, **kwargs, "messages": messages, "tools": tools, **flags}
        text = self._run(template, variables)
        return text if final is None else chat_messages.cut_at_tag(text, final)

    def _template(self, tools: list[Any] | None) -> ChatTemplate:
        has_own = tools is not None and TOOL_TEMPLATE in self._templates
        template = self._templates.get(TOOL_TEMPLATE if has_own else DEFAULT_TEMPLATE)
        if template is None:
            raise InvalidField("messages: the model has no default chat template")
        return template

    def _call_form(self, template: ChatTemplate) -> CallForm:
        """The first in which it shows a call: some fail with the others, some leave the call out."""
        if template not in self._call_forms:
            self._call_forms[template] = next((form for form in CALL_FORMS if self._shows_call(template, form)), USUAL_CALLS)
        return self._call_forms[template]

    def _shows_call(self, template: ChatTemplate, form: CallForm) -> bool:
        messages = chat_messages.prepare(PROBE_CHAT, template.wants_string, form)
        variables = {"documents": None, **self._special_tokens, "messages": messages, "tools": None}
        try:
            text = template.render({**variables, "add_generation_prompt": False}, self._max_chars)
        except MemoryError:
            raise
        except Exception:  # of any kind, the template's own refusal too: it is asked in another way
            return False
        return PROBE in text and PROBE_REPR not in text

    def _run(self, template: ChatTemplate, variables: Mapping[str, Any]) -> str:
        """Only a template's own words are passed on: the interpreter's messages may quote the prompt."""
        try:
            return template.render(variables, self._max_chars)
        except OutputTooLong:
            raise TooMuch(f"messages: the chat template's output is longer than {self._max_chars} characters") from None
        except TemplateRefusal as error:
            raise InvalidField(f"messages: {error.message}") from None
        except MemoryError:
            raise
        except Exception as error:
            raise InvalidField(f"messages: the chat template failed with {type(error).__name__}") from None


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
