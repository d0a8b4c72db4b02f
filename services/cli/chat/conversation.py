"""The messages of a chat, in memory until they are saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Conversation:
    """Owns the messages of a chat. A turn is a user message with its complete or partial answer; failed turns are not added."""

    def __init__(self, model: str, system: str | None, fields: dict[str, Any]) -> None:
        self.model = model
        self.system = system
        self._fields = fields
        self._turns: list[dict[str, str]] = []

    @property
    def num_turns(self) -> int:
        return len(self._turns) // 2

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self._turns]

    def body(self, text: str) -> dict[str, Any]:
        """Returns the body of a request with `text` as the next user message."""
        return {"model": self.model, "messages": [*self.messages, {"role": "user", "content": text}], **self._fields}

    def add(self, text: str, answer: str) -> None:
        self._turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Removes all turns but not the system prompt."""
        self._turns.clear()

    def save(self, path: Path) -> None:
        """Writes model and messages as JSON, in the form of a request body. Raises OSError."""
        content = json.dumps({"model": self.model, "messages": self.messages}, indent=2, ensure_ascii=False)
        path.write_text(content + "\n", encoding="utf-8")
