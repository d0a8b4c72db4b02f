"""Hugging Face chat templates: Jinja in an immutable sandbox. Runs in the rendering process: jinja2 and stdlib only.

Semantics of transformers' render_jinja_template: blocks trimmed, loop controls, tojson without HTML escapes, raise_exception,
strftime_now, and the `generation` tag, whose body is rendered as it is.
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

MAX_REFUSAL_CHARS = 500


class TemplateRefusal(jinja2.TemplateError):
    """What a template says by raise_exception()."""


class OutputTooLong(Exception):
    """The rendered text passed its limit; rendering was stopped there."""


class ChatTemplate:
    """One compiled template. Raises jinja2.TemplateSyntaxError where the source is no template.

    has_developer: the source mentions a role of this name.
    """

    def __init__(self, source: str) -> None:
        environment = _environment()
        self.has_developer = "developer" in source
        self._source = source
        self._template = environment.from_string(source)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads."""
        return frozenset(meta.find_undeclared_variables(_environment().parse(self._source)))

    def render(self, variables: Mapping[str, Any], max_chars: int) -> str:
        """Raises OutputTooLong, TemplateRefusal, or whatever else the template runs into."""
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
    """{% generation %}…{% endgeneration %} marks the assistant's text for training."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


class _TemplateDict:
    """`dict` without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """A namespace whose names cannot begin with an underscore, so that templates reach nothing of the interpreter's."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named `self`: namespace(self=…) is allowed.
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
