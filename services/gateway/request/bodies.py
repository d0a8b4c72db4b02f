"""A request's body: as it arrives, as a type, and what it says an answer shows beside its text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Body(BaseModel):
    """Unknown fields are ignored, because clients send new ones, unless a subclass forbids them."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=(), frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, given: Any) -> Any:
        """JSON knows no integers: 5.0 is 5 to it, and some clients write that."""
        if not isinstance(given, dict):
            return given
        whole = {
            name: int(value)
            for name, value in given.items()
            if type(value) is float and value.is_integer() and abs(value) < _EXACT
        }
        integers = _integers(cls)
        return {**given, **{name: value for name, value in whole.items() if name in integers}} if whole else given


_EXACT = 1 << 53  # below it a double is the number that was written


@cache
def _integers(body: type[BaseModel]) -> frozenset[str]:
    """Names of its fields that are integers."""
    return frozenset(name for name, field in body.model_fields.items() if field.annotation in (int, int | None))


class AnswerBody(Body):
    """What an answer shows beside its text. Nothing of it reaches a worker; renderers read it as it stands in the body."""

    return_token_ids: bool | None = Field(
        default=None, description="Choices carry `token_ids`, and `prompt_token_ids` come once."
    )

    def shown(self) -> AnswerBody:
        """These fields of a larger body alone."""
        given = {name: value for name in _SHOWN if (value := getattr(self, name)) is not None}
        return AnswerBody(**given) if given else TEXT_ALONE


_SHOWN = tuple(AnswerBody.model_fields)
TEXT_ALONE = AnswerBody()


Hold = Callable[[int], Awaitable[None]]  # returns with so many more bytes held in the budget of bodies; raises ApiError


async def _unbounded(size: int) -> None:
    """Where there is no budget."""


class ReceivedBody:
    """Between its last byte and the moment in which it has become something else. Whoever takes its bytes is their one owner, so
    that they are gone as soon as they are parsed: they may be 64 MiB. hold: for what is fetched to go with it, until the request
    is prepared."""

    __slots__ = ("_content", "hold")

    def __init__(self, content: bytes | bytearray, hold: Hold = _unbounded) -> None:
        self._content: bytes | bytearray | None = content
        self.hold = hold

    @property
    def num_values(self) -> int:
        """At most so many JSON values are in it, before it is taken. Cheap: nothing is parsed."""
        content = self._content or b""
        return 1 + content.count(b",") + content.count(b"[") + content.count(b"{")

    def take(self) -> bytes | bytearray:
        """Once."""
        content, self._content = self._content, None
        assert content is not None, "a body is read once"
        return content
