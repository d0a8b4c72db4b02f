"""What one session has said so far, in the form that its endpoint takes.

ask() adds the user's turn and returns the part of the request body that holds the prompt; hear() adds the server's answer. Both
mutate the dialogue; a returned body is valid until the next call. One owner: the coroutine that plays the session.
"""

from __future__ import annotations

from typing import Any, Protocol

from services.cli.bench.workload import Content, Session


class Dialogue(Protocol):
    def ask(self, content: Content) -> dict[str, Any]: ...

    def hear(self, answer: str) -> None: ...


class Messages:
    """For /v1/chat/completions."""

    def __init__(self, system: str | None) -> None:
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, content: Content) -> dict[str, Any]:
        assert isinstance(content, str), "chat messages hold text"
        self._messages.append({"role": "user", "content": content})
        return {"messages": self._messages}

    def hear(self, answer: str) -> None:
        self._messages.append({"role": "assistant", "content": answer})


class RunningText:
    """For /v1/completions with a text prompt; parts are parted by a line end so that the text before keeps its tokens."""

    def __init__(self, system: str | None) -> None:
        self._text = "" if system is None else system + "\n"

    def ask(self, content: Content) -> dict[str, Any]:
        assert isinstance(content, str)
        self._text += content
        return {"prompt": self._text}

    def hear(self, answer: str) -> None:
        self._text += answer + "\n"


class TokenIds:
    """For /v1/completions with the prompt as token ids. One turn only: the answer's ids are not in the stream."""

    def __init__(self, system: tuple[int, ...] | None) -> None:
        self._ids = () if system is None else system

    def ask(self, content: Content) -> dict[str, Any]:
        assert isinstance(content, tuple)
        return {"prompt": self._ids + content}

    def hear(self, answer: str) -> None:
        return None


def open_dialogue(session: Session, chat: bool) -> Dialogue:
    if isinstance(session.turns[0].content, tuple):
        assert not chat and not isinstance(session.system, str), "token ids go to /v1/completions"
        return TokenIds(session.system)
    assert not isinstance(session.system, tuple)
    return Messages(session.system) if chat else RunningText(session.system)
