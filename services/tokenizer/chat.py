"""OpenAI chat messages and the Jinja chat templates that render them. Imports only jinja2 and the standard library.

This file runs in the rendering process. Messages are checked and lose their empty fields, as in transformers'
apply_chat_template: null values are left out, reasoning is present under every name that templates read, and
continue_final_message works by a tag in the final message. `history.template_forms` chooses the form in which a template gets a
message.

Templates have the semantics of transformers' render_jinja_template: trimmed blocks, loop controls, tojson without HTML escapes,
raise_exception, strftime_now, and a `generation` tag that renders its body unchanged. They run in an immutable sandbox.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from services.tokenizer.history.turns import Message

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
MAX_REFUSAL_CHARS = 500  # a longer message of a template's raise_exception() is cut
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class InvalidField(Exception):
    """A field of the request is wrong. The message names the field and the fault, without the value."""


def parse_json(name: str, data: bytes, kind: type) -> Any:
    """Returns the JSON value in `data`, or None if `data` is empty. Raises InvalidField unless the value is a `kind`."""
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
    """Returns checked copies of the messages. A field that is null, `[]` or `{}` is left out. Raises InvalidField."""
    if not messages:
        raise InvalidField("messages: empty")
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
        raise InvalidField(f"{where}: neither a string nor an array of parts")
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
    """Appends CONTINUE_TAG to the text of the last message, for cut_at_tag(). Returns the text without the tag."""
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
    """Returns the rendered chat up to the tag. Raises InvalidField if the template has left out or changed the final message."""
    at = rendered.rfind(CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in rendered:
        raise InvalidField("continue_final_message: the chat template does not show the final message as it is")
    keeps_spaces = rendered.startswith(CONTINUE_TAG, at)
    return rendered[:at] if keeps_spaces else rendered[:at].rstrip()


class TemplateRefusal(jinja2.TemplateError):
    """A template has called raise_exception(). The message is the template's own."""


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
        # There is no parameter named `self`, because a template may write namespace(self=…).
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
        raise jinja2.exceptions.SecurityError("a namespace's names cannot begin with an underscore")


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateRefusal(str(message)[:MAX_REFUSAL_CHARS])


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
