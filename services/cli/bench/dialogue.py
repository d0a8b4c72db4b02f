"""The conversation of one session, in the form that the session's endpoint takes."""

from __future__ import annotations

from typing import Any, Protocol

from services.cli.bench.workload import Content, Session


class Dialogue(Protocol):
    """Owned by the coroutine that plays the session."""

    def ask(self, content: Content) -> dict[str, Any]:
        """Adds the user's turn and returns the prompt's part of the request body, which is valid until the next call."""

    def add_completion(self, text: str) -> None:
        """Adds the server's completion of the last turn."""


class Messages:
    """Messages for /v1/chat/completions."""

    def __init__(self, system: str | None) -> None:
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, content: Content) -> dict[str, Any]:
        assert isinstance(content, str), "chat messages hold text"
        self._messages.append({"role": "user", "content": content})
        return {"messages": self._messages}

    def add_completion(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})


class RunningText:
    """A text prompt for /v1/completions. Parts are separated by a line end, so that the tokens of earlier parts stay the same."""

    def __init__(self, system: str | None) -> None:
        self._text = "" if system is None else system + "\n"

    def ask(self, content: Content) -> dict[str, Any]:
        assert isinstance(content, str)
        self._text += content
        return {"prompt": self._text}

    def add_completion(self, text: str) -> None:
        self._text += text + "\n"


class TokenIds:
    """A prompt of token ids for /v1/completions. It has one turn, because the stream does not contain the completion's ids."""

    def __init__(self, system: tuple[int, ...] | None) -> None:
        self._ids = () if system is None else system

    def ask(self, content: Content) -> dict[str, Any]:
        assert isinstance(content, tuple)
        return {"prompt": self._ids + content}

    def add_completion(self, text: str) -> None:
        return None


def open_dialogue(session: Session, chat: bool) -> Dialogue:
    if isinstance(session.turns[0].content, tuple):
        assert not chat and not isinstance(session.system, str), "token ids go to /v1/completions"
        return TokenIds(session.system)
    assert not isinstance(session.system, tuple)
    return Messages(session.system) if chat else RunningText(session.system)
