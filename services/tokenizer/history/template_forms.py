"""Finds the forms of messages and the order of roles that a chat template renders completely.

The form of a message is how its content, its call arguments and its call ids are written, for example content as a string or as a
list of parts. The search renders small test chats. This file imports only the standard library.

A form or an order is right if the template renders the small chat and the result contains the text of each message. With a wrong
form, a template may for example omit a call, or print a list of parts in Python or JSON syntax. Each kind of message
and each order of kinds is tried once, and the result is cached. A cache with MAX_ORDERS results is emptied before the next one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import combinations, product
from typing import Any, Literal, NamedTuple

from rootstock_llm.services.tokenizer.history.turns import (
    CONSEQUENT,
    REPAIRS,
    STRICT,
    Message,
    Repair,
    Turn,
    Turns,
    developers_as_systems,
    text_of,
)

ContentKind = Literal["text", "parts", "missing"]
ArgumentsKind = Literal["object", "text", "none"]  # `none`: a call without a function
# `given`: the client's parts. `text`: a string, empty for missing content. `part`: a list with one part. `null`: None.
# `absent`: no field.
ContentForm = Literal["given", "text", "part", "null", "absent"]
# `object`: a mapping. `text`: a string, as in the API. `named`: a mapping with one entry, TEXT_NAME → the text.
ArgumentsForm = Literal["object", "text", "named"]
CONTENT_FORMS: dict[ContentKind, tuple[ContentForm, ...]] = {
    "text": ("text", "part"),
    "parts": ("given", "text", "part"),
    "missing": ("text", "null", "absent", "part"),
}
TEXT_NAME = "arguments"  # the only name in a `named` object
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")

# Renders messages, with or without tools. Returns None if the template fails.
Render = Callable[[list[Message], bool], str | None]

MAX_TRIES = 128  # largest number of small chats that are rendered to find the repairs of one order of roles
MAX_ORDER = 48  # turns of a small chat; the shortened order is cut to this length
MAX_ORDERS = 512  # cached orders; also cached spellings

_MARK = "a7f3c9"  # a text that no template contains
_ID = "call_5f0c1d2e3a4b59687786a5b4"  # a call id in the format of this server
# Shape.calls of a turn in an order of roles, by the turn's number of calls; more than 2 calls count as 2.
_CALLS: tuple[tuple[ArgumentsKind, ...], ...] = ((), ("object",), ("object", "object"))
_USER: Message = {"role": "user", "content": "Find it."}
_ANSWER: Message = {"role": "assistant", "content": "Found."}


@dataclass(frozen=True, slots=True)
class Spelling:
    """The forms of the content, arguments and call ids of a message."""

    content: ContentForm = "text"
    arguments: ArgumentsForm = "object"
    short_ids: bool = False  # whether ids of calls must have nine letters and digits; other ids are replaced by a digest


def content_kind(message: Message) -> ContentKind:
    content = message.get("content")
    if isinstance(content, str):
        return "text" if content else "missing"
    return "missing" if content is None else "parts"


def with_content(message: Message, form: ContentForm) -> Message:
    """Returns the message with its content in this form; the message itself if it already has this form."""
    if form == "given" or (form == "text" and isinstance(message.get("content"), str)):
        return message
    rest = {name: value for name, value in message.items() if name != "content"}
    if form == "absent":
        return rest
    text = text_of(message)
    content: Any = None if form == "null" else text if form == "text" else [{"type": "text", "text": text}]
    return {"role": message["role"], "content": content, **rest}


def arguments_of(call: Any) -> dict[str, Any] | str | None:
    """Returns the arguments of a call.

    Returns:
        An object, if the arguments are an object or the JSON of one; {} for missing or empty arguments; otherwise, their text.
        None for a call without a function.
    """
    function = call.get("function")
    if not isinstance(function, dict):
        return None
    given = function.get("arguments")
    if given is None or given == "" or isinstance(given, dict):
        return given or {}
    if not isinstance(given, str):
        return json.dumps(given, ensure_ascii=False)
    try:
        parsed = json.loads(given)
        if "\\u" in given:
            parsed = json.loads(_whole_pairs(json.dumps(parsed, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return given
    return parsed if isinstance(parsed, dict) else given


def _whole_pairs(text: str) -> str:
    """Replaces each unpaired surrogate by U+FFFD, because UTF-8 cannot represent it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def with_arguments(call: Any, arguments: dict[str, Any] | str, form: ArgumentsForm) -> Any:
    """Returns the call with arguments in this form.

    Args:
        arguments: the result of arguments_of().
    """
    value: Any = arguments
    if form == "text" and not isinstance(arguments, str):
        given = call["function"].get("arguments")
        value = given if isinstance(given, str) and given else json.dumps(arguments, ensure_ascii=False)
    elif form == "named":
        value = {TEXT_NAME: arguments}
    return {**call, "function": {**call["function"], "arguments": value}}


def with_short_ids(message: Message, index: int) -> Message:
    """Returns the message with short ids in its calls and in tool_call_id.

    Args:
        index: index of the message in the chat. If a call has no id, its new id is made from this index.
    """
    if isinstance(message.get("tool_call_id"), str):
        message = {**message, "tool_call_id": short_id(message["tool_call_id"])}
    calls: Sequence[Any] = message.get("tool_calls", ())
    if calls:
        ids = [call.get("id") for call in calls]
        named = [given if isinstance(given, str) else f"{index}-{at}" for at, given in enumerate(ids)]
        message = {**message, "tool_calls": [{**call, "id": short_id(name)} for call, name in zip(calls, named, strict=True)]}
    return message


def short_id(given: str) -> str:
    return given if _SHORT_ID.fullmatch(given) else blake2b(given.encode(errors="replace")).hexdigest()[:9]


class Shape(NamedTuple):
    """The properties of a message that determine its form and its position in the order of roles.

    In the shapes of an order, all arguments count as objects, and more than two calls count as two calls.
    """

    role: str
    content: ContentKind
    calls: tuple[ArgumentsKind, ...]  # kind of each call's arguments; a shape that selects a form has at most one call
    reasons: bool  # whether the message has reasoning_content

    @property
    def arguments(self) -> ArgumentsKind | None:
        """Kind of the first call's arguments, or None if the message has no call."""
        return self.calls[0] if self.calls else None


class TemplateForms:
    """The forms of messages that one template renders completely.

    Args:
        knows_developer: whether the template's source mentions the role developer. If not, developer is treated as system.
    """

    def __init__(self, render: Render, knows_developer: bool) -> None:
        self._render = render
        self._knows_developer = knows_developer
        self._spellings: dict[tuple[Shape, bool], Spelling] = {}
        self._short_ids: dict[bool, bool] = {}
        self._orders: dict[tuple[tuple[Shape, ...], bool], tuple[Repair, ...] | None] = {}

    def ordered(self, messages: Sequence[Message], tools: bool) -> tuple[Turns, bool]:
        """Puts a chat into an order that the template renders completely.

        Returns:
            (repaired turns, is_tried). is_tried: whether the template has rendered a small chat of this order, or no repair would
            change the order.
        """
        turns: Turns = [Turn(index, message) for index, message in enumerate(messages)]
        if not self._knows_developer:
            turns = developers_as_systems(turns)
        order = _shortened([_shape(turn) for turn in turns]), tools
        if order not in self._orders:
            if len(self._orders) >= MAX_ORDERS:
                self._orders.clear()
            self._orders[order] = self._repairs(*order)
        repairs = self._orders[order]
        return _repaired(turns, repairs or ()), repairs is not None

    def spelled(self, turns: Turns, tools: bool) -> list[Message]:
        """Returns the messages of the turns, each in the form that the template renders for its shape."""
        short = self._shortens(turns, tools)
        return [self._spelled(turn.message, tools, short, at) for at, turn in enumerate(turns)]

    def _shortens(self, turns: Turns, tools: bool) -> bool:
        return any(turn.calls for turn in turns) and self._needs_short_ids(tools)

    def alternatives(
        self, messages: list[Message], turns: Turns, at: int | None, tools: bool, is_tried: bool
    ) -> Iterator[list[Message]]:
        """Yields other forms of a chat that the template has refused.

        Args:
            messages: the refused form, made of the turns.
            at: index of the message at which the template failed; None if it is unknown, or if another form cannot help.
            is_tried: the second result of ordered().
        """
        if at is not None:
            message, short = turns[at].message, self._shortens(turns, tools)
            for content in CONTENT_FORMS[content_kind(message)]:
                for in_text in (False, True):
                    other = _in_form(message, content, in_text)
                    if short:
                        other = with_short_ids(other, at)
                    if other != messages[at]:
                        yield [*messages[:at], other, *messages[at + 1 :]]
        if not is_tried:
            yield self.spelled(_repaired(turns, STRICT), tools)

    def _spelled(self, message: Message, tools: bool, short: bool, at: int) -> Message:
        reasons = "reasoning_content" in message
        calls = message.get("tool_calls", ())
        content = content_kind(message)
        if not calls:
            result = with_content(message, self._spelling(Shape(message["role"], content, (), reasons), tools).content)
        else:
            given = [arguments_of(call) for call in calls]
            shapes = [Shape(message["role"], content, (_arguments_kind(each),), reasons) for each in given]
            spelled = [
                call if each is None else with_arguments(call, each, self._spelling(shape, tools).arguments)
                for call, each, shape in zip(calls, given, shapes, strict=True)
            ]
            result = {**with_content(message, self._spelling(shapes[0], tools).content), "tool_calls": spelled}
        return with_short_ids(result, at) if short else result

    def _spelling(self, shape: Shape, tools: bool) -> Spelling:
        found = self._spellings.get((shape, tools))
        if found is None:
            if len(self._spellings) >= MAX_ORDERS:  # a client may send any role
                self._spellings.clear()
            found = self._spellings[shape, tools] = self._tried(shape, tools)
        return found

    def _needs_short_ids(self, tools: bool) -> bool:
        if tools not in self._short_ids:
            self._short_ids[tools] = self._tried(
                Shape("assistant", "missing", ("object",), False), tools, (False, True)
            ).short_ids
        return self._short_ids[tools]

    def _tried(self, shape: Shape, tools: bool, short_ids: Sequence[bool] | None = None) -> Spelling:
        """Returns the first spelling that the template renders completely.

        If there is none, returns the first spelling that the template renders, or else the first candidate.

        Args:
            short_ids: values of Spelling.short_ids to try; None: the value that the template needs.
        """
        ids = short_ids or ((self._needs_short_ids(tools),) if shape.arguments else (False,))
        arguments: tuple[Any, ...] = ("text", "named") if shape.arguments == "text" else ("object", "text")
        candidates = [
            Spelling(content, form, short)
            for short, form, content in product(ids, arguments if shape.arguments else ("object",), CONTENT_FORMS[shape.content])
        ]
        rendered: Spelling | None = None
        for before, after in self._surroundings(shape, tools):
            without = self._render([*before, *after], tools) or ""
            for candidate in candidates:
                message = _probe(shape, candidate)
                chat = [*before, message, *after]
                text = self._render([with_short_ids(m, 0) for m in chat] if candidate.short_ids else chat, tools)
                if text is None or _prints_nothing_as(candidate, text, without):
                    continue
                if _is_shown(shape, text):
                    return candidate
                rendered = rendered or candidate
        return rendered or candidates[0]

    def _surroundings(self, shape: Shape, tools: bool) -> Iterator[tuple[list[Message], list[Message]]]:
        """Yields pairs (messages before, messages after) that may surround a message of this shape. Usual pairs come first."""
        if shape.role == "user":
            yield [], []
        elif shape.role == "assistant":
            user = self._spelled(_USER, tools, False, 0)
            if shape.arguments:
                yield [user], [{"role": "tool", "tool_call_id": _ID, "content": "There."}]
            yield [user], [user]
            yield [user], []
        elif shape.role in ("tool", "function"):
            call: Message = {"role": "assistant", "tool_calls": [_call({"what": "x"}, _ID)]}
            short = self._needs_short_ids(tools)
            yield [self._spelled(each, tools, short, 0) for each in (_USER, call)], []
            yield [self._spelled(each, tools, False, 0) for each in (_USER, _ANSWER)], []
        else:
            user = self._spelled(_USER, tools, False, 0)
            yield [], [user]
            yield [user], []

    def _repairs(self, order: tuple[Shape, ...], tools: bool) -> tuple[Repair, ...] | None:
        """Returns the repairs with which the template renders the most texts of a small chat.

        Combinations are tried in the order of _choices(), until one renders all texts or MAX_TRIES chats were rendered.

        Returns:
            () if no repair changes the chat. None if the template refuses the small chat with every tried combination.
        """
        turns = _small_chat(order)
        marks = [_marks_of(turn) for turn in turns]
        wanted = sum(map(len, marks))
        effective = [repair for repair in REPAIRS if _differs(repair(turns), turns)]
        if not effective:
            return ()
        effective = [repair for repair in REPAIRS if repair in effective or repair in CONSEQUENT]
        best: tuple[Repair, ...] | None = None
        most = -1
        tried: set[str] = set()
        for chosen in _choices(effective):
            chat = self.spelled(_repaired(turns, chosen), tools)
            if (written := repr(chat)) in tried:
                continue
            tried.add(written)
            text = self._render(chat, tools)
            shown = -1 if text is None else sum(mark in text for each in marks for mark in each)
            if shown > most:
                best, most = chosen, shown
            if most == wanted or len(tried) >= MAX_TRIES:
                break
        return best


def _choices(effective: Sequence[Repair]) -> Iterator[tuple[Repair, ...]]:
    """Yields combinations of repairs: first all of at most two repairs, then larger ones, from all repairs down to three."""
    counts = [0, 1, 2, *range(len(effective), 2, -1)]
    for count in dict.fromkeys(count for count in counts if count <= len(effective)):
        yield from combinations(effective, count)


def _repaired(turns: Turns, repairs: Sequence[Repair]) -> Turns:
    for repair in repairs:
        turns = repair(turns)
    return turns


def _differs(first: Turns, second: Turns) -> bool:
    return [turn.message for turn in first] != [turn.message for turn in second]


def _shape(turn: Turn) -> Shape:
    return Shape(turn.role, content_kind(turn.message), _CALLS[min(len(turn.calls), 2)], "reasoning_content" in turn.message)


def _shortened(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Returns a shorter order of turns, with fewer repetitions and at most MAX_ORDER turns.

    An exchange begins with each user turn that follows a turn of another role. Of equal consecutive turns in an exchange, two are
    kept. Of equal exchanges before the last exchange, the first is kept.
    """
    exchanges: list[list[Shape]] = [[]]
    for shape in shapes:
        last = exchanges[-1]
        if shape.role == "user" and last and last[-1].role != "user":
            exchanges.append([shape])
        elif last[-2:] != [shape, shape]:
            last.append(shape)
    seen = {tuple(exchange): exchange for exchange in reversed(exchanges[:-1])}
    found = [exchange for exchange in exchanges[:-1] if seen.get(tuple(exchange)) is exchange]
    return tuple(shape for exchange in [*found, exchanges[-1]] for shape in exchange)[:MAX_ORDER]


def _small_chat(order: Sequence[Shape]) -> Turns:
    turns: list[Turn] = []
    waiting: list[str] = []  # ids of calls without a result
    for at, shape in enumerate(order):
        message: Message = {"role": shape.role}
        if shape.content != "missing":
            text = f"q{at}{_MARK}t"
            message["content"] = text if shape.content == "text" else [{"type": "text", "text": text}]
        if shape.reasons:
            message |= dict.fromkeys(("reasoning_content", "thinking"), "Hm.")
        if shape.calls:
            waiting = [f"{_ID[:-3]}{at:02}{number}" for number in range(len(shape.calls))]
            message["tool_calls"] = [_call({"what": f"q{at}{_MARK}{number}"}, name) for number, name in enumerate(waiting)]
        if shape.role == "tool" and waiting:
            message["tool_call_id"] = waiting.pop(0)
        turns.append(Turn(at, message))
    return turns


def _marks_of(turn: Turn) -> list[str]:
    """Returns the texts of a turn that the rendered chat must contain: the arguments of its calls, or else its content."""
    if turn.calls:
        return [call["function"]["arguments"]["what"] for call in turn.calls]
    return [f"q{turn.index}{_MARK}t"] if "content" in turn.message else []


def _call(arguments: Any, name: str) -> Message:
    return {"id": name, "type": "function", "function": {"name": "find", "arguments": arguments}}


def _arguments_kind(arguments: dict[str, Any] | str | None) -> ArgumentsKind:
    return "none" if arguments is None else "text" if isinstance(arguments, str) else "object"


def _probe(shape: Shape, spelling: Spelling) -> Message:
    """Returns a test message of this shape in this spelling. Its texts contain _MARK."""
    message: Message = {"role": shape.role}
    if shape.content != "missing":
        texts = [f"{_MARK}1", f"{_MARK}2"]
        message["content"] = texts[0] if shape.content == "text" else [{"type": "text", "text": text} for text in texts]
    if shape.role in ("tool", "function"):
        message["tool_call_id"] = _ID
    if shape.reasons:
        message |= dict.fromkeys(("reasoning_content", "thinking"), "Hm.")
    if shape.arguments:
        call = _call('{"what": "' + _MARK + '"}' if shape.arguments == "object" else f"broken {_MARK}", _ID)
        arguments = arguments_of(call)
        message["tool_calls"] = [call if arguments is None else with_arguments(call, arguments, spelling.arguments)]
    return with_content(message, spelling.content)


def _prints_nothing_as(spelling: Spelling, text: str, without: str) -> bool:
    """Returns whether the template has rendered the missing text of a message as None, or as a list with an empty part.

    Args:
        without: the rendered chat without the message.
    """
    sign = "None" if spelling.content == "null" else "'type': 'text', 'text': ''" if spelling.content == "part" else ""
    return bool(sign) and text.count(sign) > without.count(sign)


def _is_shown(shape: Shape, text: str) -> bool:
    """Returns whether a rendered chat contains the texts of the message from _probe(), and not within a Python list or dict.

    True for a message without text and calls.
    """
    if shape.arguments:
        return _MARK in text and f"'what': '{_MARK}'" not in text and f"'arguments': 'broken {_MARK}'" not in text
    if shape.content == "missing":
        return True
    as_part = (f"'text': '{_MARK}", f'"text": "{_MARK}')
    marks = [f"{_MARK}1", f"{_MARK}2"] if shape.content == "parts" else [f"{_MARK}1"]
    return all(mark in text for mark in marks) and not any(sign in text for sign in as_part)


def _in_form(message: Message, content: ContentForm, in_text: bool) -> Message:
    """Returns the message with content in this form.

    Args:
        in_text: True: arguments of calls become text. False: they become objects; a text that is not a JSON object becomes the
            value of a member with a fixed name.
    """
    result = with_content(message, content)
    calls = message.get("tool_calls", ())
    if calls:
        given = [arguments_of(call) for call in calls]
        spelled = [
            call
            if each is None
            else with_arguments(call, each, "text" if in_text else "named" if isinstance(each, str) else "object")
            for call, each in zip(calls, given, strict=True)
        ]
        result = {**result, "tool_calls": spelled}
    return result
