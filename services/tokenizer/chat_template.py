"""Hugging Face chat templates: Jinja in an immutable sandbox. Runs in the rendering process: jinja2 and stdlib only.

Semantics of transformers' render_jinja_template: blocks trimmed, loop controls, tojson without HTML escapes, raise_exception,
strftime_now, and the `generation` tag, whose body is rendered as it is.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
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

    wants_string: the template does not look inside a message's content, so that a list of parts has to be joined first.
    has_developer: it speaks of a role of this name.
    """

    def __init__(self, source: str) -> None:
        environment = _environment()
        tree = environment.parse(source)
        self.wants_string = not _iterates_content(tree)
        self.has_developer = "developer" in source
        self._template = environment.from_string(source)

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


def _iterates_content(tree: nodes.Template) -> bool:
    """Whether some `for` goes over a message's content, directly, through a variable, or as a macro's `content` parameter."""
    names = {"content"}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _mentions_content(assignment.node, names):
            names.add(assignment.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _mentions_content(node: nodes.Node, names: set[str]) -> bool:
    return _is_content(node, names) or any(_is_content(child, names) for child in node.find_all(nodes.Expr))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """`x.content`, `x['content']`, or a name known to stand for it, perhaps filtered or sliced."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getitem):
        is_slice = isinstance(node.arg, nodes.Slice)
        is_key = isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return is_key or (is_slice and _is_content(node.node, names))
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name in names
