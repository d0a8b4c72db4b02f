"""The turns of a chat, and repairs for templates that refuse an order of roles. Standard library only; no I/O.

A repair changes the order, the roles or the number of turns. It changes no text, but may join texts with an empty line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

Message = dict[str, Any]

_SYSTEMS = ("system", "developer")
_TOOLS = ("tool", "function")
_JOINT = "\n\n"


@dataclass(frozen=True, slots=True)
class Turn:
    """A chat message. Its form for the template is not chosen yet."""

    index: int  # index of the message in the request; for joined messages, the index of the first
    message: Message

    @property
    def role(self) -> str:
        role: str = self.message["role"]
        return role

    @property
    def calls(self) -> Sequence[Any]:
        calls: Sequence[Any] = self.message.get("tool_calls", ())
        return calls


Turns = Sequence[Turn]
Repair = Callable[[Turns], Turns]


def text_of(message: Message) -> str:
    """Returns the content of a message, or its parts joined by a space. Returns an empty text for a message without content."""
    content = message.get("content", "")
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)


def developers_as_systems(turns: Turns) -> Turns:
    """Renames the role developer to system. Joins a developer message in second position to a leading system message."""
    named = [Turn(turn.index, {**turn.message, "role": "system"}) if turn.role == "developer" else turn for turn in turns]
    is_joined = len(turns) > 1 and turns[1].role == "developer" and turns[0].role in _SYSTEMS
    return [_joined(named[0], named[1]), *named[2:]] if is_joined else named


def functions_as_tools(turns: Turns) -> Turns:
    return [Turn(turn.index, {**turn.message, "role": "tool"}) if turn.role == "function" else turn for turn in turns]


def leading_systems_joined(turns: Turns) -> Turns:
    count = _num_leading(turns)
    return [reduce(_joined, turns[:count]), *turns[count:]] if count > 1 else turns


def later_systems_as_users(turns: Turns) -> Turns:
    """Joins each later system message to the user turn that follows it. If no user turn follows, the message becomes a user turn.

    A system message between a call and its results becomes a user turn after the results.
    """
    count = _num_leading(turns)
    found, waiting = list(turns[:count]), None
    for turn in turns[count:]:
        if turn.role in _SYSTEMS:
            waiting = _as_user(turn) if waiting is None else _joined(waiting, _as_user(turn))
        elif waiting is None or turn.role in _TOOLS:
            found.append(turn)
        else:
            found += [_joined(waiting, turn)] if turn.role == "user" else [waiting, turn]
            waiting = None
    return found if waiting is None else [*found, waiting]


def systems_as_users(turns: Turns) -> Turns:
    """Joins the leading system messages to the user turn that follows them, or makes them a user turn."""
    count = _num_leading(turns)
    if not count:
        return turns
    joined, rest = reduce(_joined, map(_as_user, turns[:count])), turns[count:]
    return [_joined(joined, rest[0]), *rest[1:]] if rest and rest[0].role == "user" else [joined, *rest]


def results_behind_calls(turns: Turns) -> Turns:
    """Moves the results of tools directly after the turn with the calls, before user and system messages that were in between."""
    found: list[Turn] = []
    position = 0  # index after the last call and its results; 0 if the last assistant turn has no call
    for turn in turns:
        if turn.role in _TOOLS and position:
            found.insert(position, turn)
            position += 1
            continue
        found.append(turn)
        if turn.role == "assistant":
            position = len(found) if turn.calls else 0
    return found


def results_as_users(turns: Turns) -> Turns:
    return [_as_user(turn) if turn.role in _TOOLS else turn for turn in turns]


def without_empty(turns: Turns) -> Turns:
    """Removes assistant turns that have neither text nor calls."""
    return [turn for turn in turns if turn.role != "assistant" or turn.calls or text_of(turn.message)]


def same_roles_joined(turns: Turns) -> Turns:
    """Joins consecutive user turns, and consecutive assistant turns."""
    found: list[Turn] = []
    for turn in turns:
        if found and turn.role in ("user", "assistant") and turn.role == found[-1].role:
            found[-1] = _joined(found[-1], turn)
        else:
            found.append(turn)
    return found


def opened_by_a_user(turns: Turns) -> Turns:
    """Puts an empty user turn after the leading system messages, unless the next turn is a user turn."""
    count = _num_leading(turns)
    if len(turns) > count and turns[count].role == "user":
        return turns
    return [*turns[:count], Turn(turns[min(count, len(turns) - 1)].index, {"role": "user", "content": ""}), *turns[count:]]


def results_answered(turns: Turns) -> Turns:
    """Puts an empty assistant turn before each user turn that follows a call or the results of a call."""
    found: list[Turn] = []
    for turn in turns:
        if turn.role == "user" and found and (found[-1].role in _TOOLS or found[-1].calls):
            found.append(Turn(turn.index, {"role": "assistant", "content": ""}))
        found.append(turn)
    return found


def calls_apart_from_text(turns: Turns) -> Turns:
    """Splits an assistant turn with text and calls into a turn with the text and a turn with the calls."""
    found: list[Turn] = []
    for turn in turns:
        if turn.calls and text_of(turn.message):
            found.append(Turn(turn.index, {name: value for name, value in turn.message.items() if name != "tool_calls"}))
            found.append(Turn(turn.index, {"role": turn.role, "tool_calls": turn.calls}))
        else:
            found.append(turn)
    return found


def calls_apart(turns: Turns) -> Turns:
    """Splits an assistant turn with several calls into one turn for each call, followed by the result of that call.

    A result belongs to the call with its id. Other results belong to the remaining calls, in order.
    """
    found: list[Turn] = []
    at = 0
    while at < len(turns):
        turn = turns[at]
        at += 1
        if len(turn.calls) < 2:
            found.append(turn)
            continue
        begin = at
        while at < len(turns) and turns[at].role in _TOOLS:
            at += 1
        results = _by_call(turn.calls, turns[begin:at])
        for number, call in enumerate(turn.calls):
            message = turn.message if number == 0 else {"role": turn.role}
            found += [Turn(turn.index, {**message, "tool_calls": [call]}), *results[number]]
    return found


# All repairs of a chat, in the order in which they are applied.
REPAIRS: tuple[Repair, ...] = (
    developers_as_systems,
    functions_as_tools,
    leading_systems_joined,
    later_systems_as_users,
    results_behind_calls,
    opened_by_a_user,
    without_empty,
    results_as_users,
    systems_as_users,
    same_roles_joined,
    results_answered,
    calls_apart_from_text,
    calls_apart,
)
STRICT = tuple(repair for repair in REPAIRS if repair is not results_answered)  # for templates that need alternating roles
CONSEQUENT = (same_roles_joined, results_answered)  # repairs that another repair may make necessary


def _num_leading(turns: Turns) -> int:
    return next((at for at, turn in enumerate(turns) if turn.role not in _SYSTEMS), len(turns))


def _as_user(turn: Turn) -> Turn:
    return Turn(turn.index, {"role": "user", "content": text_of(turn.message)})


def _joined(first: Turn, second: Turn) -> Turn:
    """Returns the first turn with the texts, reasoning and calls of both."""
    message = {**first.message, "content": _both(text_of(first.message), text_of(second.message))}
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in second.message:
            message[name] = _both(message.get(name, ""), second.message[name])
    if second.calls:
        message["tool_calls"] = [*first.calls, *second.calls]
    return Turn(first.index, message)


def _both(first: Any, second: Any) -> str:
    return _JOINT.join(str(text) for text in (first, second) if text)


def _by_call(calls: Sequence[Any], results: Turns) -> list[list[Turn]]:
    found: list[list[Turn]] = [[] for _ in calls]
    ids = [call.get("id") for call in calls]
    unassigned = []
    for result in results:
        given = result.message.get("tool_call_id")
        if given is not None and given in ids:
            found[ids.index(given)].append(result)
        else:
            unassigned.append(result)
    for result in unassigned:
        next((each for each in found if not each), found[-1]).append(result)
    return found
