"""Finds the form of each message and the order of roles that a template shows, by rendering small chats. Standard library only.

A form or an order is right if the template renders the small chat and the result contains the text of each message. A template
that reads only text may leave out a call. A template that prints a list of parts shows Python or JSON syntax. Each kind of
message and each order of kinds is tried once, and the process remembers the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

from services.tokenizer.history.spelling import (
    CONTENT_FORMS,
    ContentForm,
    ContentKind,
    Spelling,
    arguments_of,
    content_kind,
    with_arguments,
    with_content,
    with_short_ids,
)
from services.tokenizer.history.turns import CONSEQUENT, REPAIRS, STRICT, Message, Repair, Turn, Turns, developers_as_systems

# Renders messages, with or without tools. Returns None if the template fails.
Render = Callable[[list[Message], bool], str | None]

MAX_TRIES = 128  # small chats rendered for one order of roles
MAX_ORDER = 48  # turns of a small chat; turns after them in the shortened order are not tried
MAX_ORDERS = 512  # orders that are remembered

_MARK = "a7f3c9"  # a text that no template contains
_ID = "call_5f0c1d2e3a4b59687786a5b4"  # the form of this server's call ids
_USER: Message = {"role": "user", "content": "Find it."}
_ANSWER: Message = {"role": "assistant", "content": "Found."}


class Shape(NamedTuple):
    """The properties of a message on which its form depends."""

    role: str
    content: ContentKind
    arguments: str  # "object", "text" or "none" (a call without a function); empty if the message has no calls
    reasons: bool
    tools: bool  # the request has tools


class Ordered(NamedTuple):
    """A chat in the order that its template shows."""

    turns: Turns
    is_tried: bool  # whether the template has rendered a small chat of this order


class _TurnKind(NamedTuple):
    """The properties of a turn on which the order of roles depends."""

    role: str
    content: ContentKind
    num_calls: int  # 2 stands for more
    reasons: bool


class TemplateForms:
    """The forms of one template.

    Args:
        knows_developer: whether the template's source mentions this role. If not, developer is another name of system.
    """

    def __init__(self, render: Render, knows_developer: bool) -> None:
        self._render = render
        self._knows_developer = knows_developer
        self._spellings: dict[Shape, Spelling] = {}
        self._short_ids: dict[bool, bool] = {}
        self._orders: dict[tuple[tuple[_TurnKind, ...], bool], tuple[Repair, ...] | None] = {}

    def ordered(self, messages: Sequence[Message], tools: bool) -> Ordered:
        """Returns the turns after the fewest repairs with which the template shows them."""
        turns: Turns = [Turn(index, message) for index, message in enumerate(messages)]
        if not self._knows_developer:
            turns = developers_as_systems(turns)
        order = _shortened([_kind(turn) for turn in turns]), tools
        if order not in self._orders:
            if len(self._orders) >= MAX_ORDERS:
                self._orders.clear()
            self._orders[order] = self._repairs(*order)
        repairs = self._orders[order]
        return Ordered(_repaired(turns, repairs or ()), repairs is not None)

    def spelled(self, turns: Turns, tools: bool) -> list[Message]:
        """Returns the messages in the forms of their shapes."""
        short = self._shortens(turns, tools)
        return [self._spelled(turn.message, tools, short, at) for at, turn in enumerate(turns)]

    def _shortens(self, turns: Turns, tools: bool) -> bool:
        return any(turn.calls for turn in turns) and self._needs_short_ids(tools)

    def others(self, messages: list[Message], ordered: Ordered, at: int | None, tools: bool) -> Iterator[list[Message]]:
        """Yields other forms of a chat that the template has refused.

        Args:
            messages: the refused form, made of ordered.turns.
            at: index of the message at which the template failed; None if it is not known or another form cannot help.
        """
        turns = ordered.turns
        if at is not None:
            message, short = turns[at].message, self._shortens(turns, tools)
            for content in CONTENT_FORMS[content_kind(message)]:
                for in_text in (False, True):
                    other = _in_form(message, content, in_text)
                    if short:
                        other = with_short_ids(other, at)
                    if other != messages[at]:
                        yield [*messages[:at], other, *messages[at + 1 :]]
        if not ordered.is_tried:
            yield self.spelled(_repaired(turns, STRICT), tools)

    def _spelled(self, message: Message, tools: bool, short: bool, at: int) -> Message:
        reasons = "reasoning_content" in message
        calls = message.get("tool_calls", ())
        content = content_kind(message)
        if not calls:
            result = with_content(message, self._spelling(Shape(message["role"], content, "", reasons, tools)).content)
        else:
            given = [arguments_of(call) for call in calls]
            shapes = [Shape(message["role"], content, _arguments_kind(each), reasons, tools) for each in given]
            spelled = [
                call if each is None else with_arguments(call, each, self._spelling(shape).arguments)
                for call, each, shape in zip(calls, given, shapes, strict=True)
            ]
            result = {**with_content(message, self._spelling(shapes[0]).content), "tool_calls": spelled}
        return with_short_ids(result, at) if short else result

    def _spelling(self, shape: Shape) -> Spelling:
        found = self._spellings.get(shape)
        if found is None:
            if len(self._spellings) >= MAX_ORDERS:  # a client may send any role
                self._spellings.clear()
            found = self._spellings[shape] = self._tried(shape)
        return found

    def _needs_short_ids(self, tools: bool) -> bool:
        if tools not in self._short_ids:
            self._short_ids[tools] = self._tried(Shape("assistant", "missing", "object", False, tools), (False, True)).short_ids
        return self._short_ids[tools]

    def _tried(self, shape: Shape, short_ids: Sequence[bool] | None = None) -> Spelling:
        """Returns the first spelling that the template shows, or the first that it renders, or the first of all."""
        ids = short_ids or ((self._needs_short_ids(shape.tools),) if shape.arguments else (False,))
        arguments: tuple[Any, ...] = ("text", "named") if shape.arguments == "text" else ("object", "text")
        ways = [
            Spelling(content, form, short)
            for short, form, content in product(ids, arguments if shape.arguments else ("object",), CONTENT_FORMS[shape.content])
        ]
        rendered: Spelling | None = None
        for before, behind in self._surroundings(shape):
            without = self._render([*before, *behind], shape.tools) or ""
            for way in ways:
                message = _probe(shape, way)
                chat = [*before, message, *behind]
                text = self._render([with_short_ids(m, 0) for m in chat] if way.short_ids else chat, shape.tools)
                if text is None or _prints_nothing_as(way, text, without):
                    continue
                if _is_shown(shape, text):
                    return way
                rendered = rendered or way
        return rendered or ways[0]

    def _surroundings(self, shape: Shape) -> Iterator[tuple[list[Message], list[Message]]]:
        """Yields lists of messages to put before and after a message of this shape, the usual ones first."""
        if shape.role == "user":
            yield [], []
        elif shape.role == "assistant":
            user = self._spelled(_USER, shape.tools, False, 0)
            if shape.arguments:
                yield [user], [{"role": "tool", "tool_call_id": _ID, "content": "There."}]
            yield [user], [user]
            yield [user], []
        elif shape.role in ("tool", "function"):
            call: Message = {"role": "assistant", "tool_calls": [_call({"what": "x"}, _ID)]}
            short = self._needs_short_ids(shape.tools)
            yield [self._spelled(each, shape.tools, short, 0) for each in (_USER, call)], []
            yield [self._spelled(each, shape.tools, False, 0) for each in (_USER, _ANSWER)], []
        else:
            user = self._spelled(_USER, shape.tools, False, 0)
            yield [], [user]
            yield [user], []

    def _repairs(self, order: tuple[_TurnKind, ...], tools: bool) -> tuple[Repair, ...] | None:
        """Returns the fewest repairs with which the template shows most texts of a small chat.

        Returns:
            None if the template refuses the small chat with every choice of repairs.
        """
        turns = _small_chat(order)
        marks = [_marks_of(turn) for turn in turns]
        wanted = sum(map(len, marks))
        able = [repair for repair in REPAIRS if _differs(repair(turns), turns)]
        if not able:
            return ()
        able = [repair for repair in REPAIRS if repair in able or repair in CONSEQUENT]
        best: tuple[Repair, ...] | None = None
        most = -1
        tried: set[str] = set()
        for chosen in _choices(able):
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


def _choices(able: Sequence[Repair]) -> Iterator[tuple[Repair, ...]]:
    """Yields every choice of repairs: first of at most two repairs, then from all repairs down to three."""
    counts = [0, 1, 2, *range(len(able), 2, -1)]
    for count in dict.fromkeys(count for count in counts if count <= len(able)):
        yield from combinations(able, count)


def _repaired(turns: Turns, repairs: Sequence[Repair]) -> Turns:
    for repair in repairs:
        turns = repair(turns)
    return turns


def _differs(first: Turns, second: Turns) -> bool:
    return [turn.message for turn in first] != [turn.message for turn in second]


def _kind(turn: Turn) -> _TurnKind:
    return _TurnKind(turn.role, content_kind(turn.message), min(len(turn.calls), 2), "reasoning_content" in turn.message)


def _shortened(kinds: Sequence[_TurnKind]) -> tuple[_TurnKind, ...]:
    """Returns the order with one exchange of each sort and at most two turns of a kind in a row."""
    exchanges: list[list[_TurnKind]] = [[]]
    for kind in kinds:
        last = exchanges[-1]
        if kind.role == "user" and last and last[-1].role != "user":
            exchanges.append([kind])
        elif last[-2:] != [kind, kind]:
            last.append(kind)
    seen = {tuple(exchange): exchange for exchange in reversed(exchanges[:-1])}
    found = [exchange for exchange in exchanges[:-1] if seen.get(tuple(exchange)) is exchange]
    return tuple(kind for exchange in [*found, exchanges[-1]] for kind in exchange)[:MAX_ORDER]


def _small_chat(order: Sequence[_TurnKind]) -> Turns:
    turns: list[Turn] = []
    waiting: list[str] = []  # ids of calls without a result
    for at, kind in enumerate(order):
        message: Message = {"role": kind.role}
        if kind.content != "missing":
            text = f"q{at}{_MARK}t"
            message["content"] = text if kind.content == "text" else [{"type": "text", "text": text}]
        if kind.reasons:
            message |= dict.fromkeys(("reasoning_content", "thinking"), "Hm.")
        if kind.num_calls:
            waiting = [f"{_ID[:-3]}{at:02}{number}" for number in range(kind.num_calls)]
            message["tool_calls"] = [_call({"what": f"q{at}{_MARK}{number}"}, name) for number, name in enumerate(waiting)]
        if kind.role == "tool" and waiting:
            message["tool_call_id"] = waiting.pop(0)
        turns.append(Turn(at, message))
    return turns


def _marks_of(turn: Turn) -> list[str]:
    """Returns the texts of a turn that a template must show. It may leave out the text of a turn with calls."""
    if turn.calls:
        return [call["function"]["arguments"]["what"] for call in turn.calls]
    return [f"q{turn.index}{_MARK}t"] if "content" in turn.message else []


def _call(arguments: Any, name: str) -> Message:
    return {"id": name, "type": "function", "function": {"name": "find", "arguments": arguments}}


def _arguments_kind(arguments: dict[str, Any] | str | None) -> str:
    return "none" if arguments is None else "text" if isinstance(arguments, str) else "object"


def _probe(shape: Shape, way: Spelling) -> Message:
    """Returns a message of this shape in this spelling."""
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
        message["tool_calls"] = [call if arguments is None else with_arguments(call, arguments, way.arguments)]
    return with_content(message, way.content)


def _prints_nothing_as(way: Spelling, text: str, without: str) -> bool:
    """Whether a template prints None, or the list of an empty part, for a message without text.

    Args:
        without: the rendered chat without the message.
    """
    sign = "None" if way.content == "null" else "'type': 'text', 'text': ''" if way.content == "part" else ""
    return bool(sign) and text.count(sign) > without.count(sign)


def _is_shown(shape: Shape, text: str) -> bool:
    """Whether a rendered chat contains the text of the probe, not written as a Python list or object."""
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
        in_text: whether arguments of calls become text; otherwise text that is not a JSON object becomes a named object.
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
