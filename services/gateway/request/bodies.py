"""The body of a request: its bytes, the base class of its types, and the fields that select parts of the response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Body(BaseModel):
    """The base of all request bodies. Ignores unknown fields, because clients send new ones, unless a subclass forbids them."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=(), frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, given: Any) -> Any:
        """Converts 5.0 to 5 in integer fields, because JSON has no integers and some clients write 5.0."""
        if not isinstance(given, dict):
            return given
        whole = {
            name: int(value)
            for name, value in given.items()
            if type(value) is float and value.is_integer() and abs(value) < _EXACT
        }
        integers = _integers(cls)
        return {**given, **{name: value for name, value in whole.items() if name in integers}} if whole else given


_EXACT = 1 << 53  # smaller integers are exact as doubles


@cache
def _integers(body: type[BaseModel]) -> frozenset[str]:
    """Returns the names of the integer fields of a body."""
    return frozenset(name for name, field in body.model_fields.items() if field.annotation in (int, int | None))


class AnswerBody(Body):
    """Optional fields of the response. No worker receives them; a renderer reads them as the client has sent them."""

    return_token_ids: bool | None = Field(
        default=None, description="Choices carry `token_ids`, and `prompt_token_ids` come once."
    )

    def shown(self) -> AnswerBody:
        """Returns only these fields of a larger body."""
        given = {name: value for name in _SHOWN if (value := getattr(self, name)) is not None}
        return AnswerBody(**given) if given else TEXT_ALONE


_SHOWN = tuple(AnswerBody.model_fields)
TEXT_ALONE = AnswerBody()


Hold = Callable[[int], Awaitable[None]]  # waits for this many bytes of the body budget, and takes them; raises ApiError


async def _unbounded(size: int) -> None:
    """Takes no bytes, for a body without a budget."""


class ReceivedBody:
    """A complete body until it is parsed. take() gives the bytes away, so that up to 64 MiB are freed once they are parsed."""

    __slots__ = ("_content", "hold")

    def __init__(self, content: bytes | bytearray, hold: Hold = _unbounded) -> None:
        """Takes the bytes. `hold` reserves memory for data that is fetched for the body, until the request is prepared."""
        self._content: bytes | bytearray | None = content
        self.hold = hold

    @property
    def num_values(self) -> int:
        """Upper bound of the JSON values in the body, counted without parsing. Read before take()."""
        content = self._content or b""
        return 1 + content.count(b",") + content.count(b"[") + content.count(b"{")

    def take(self) -> bytes | bytearray:
        """Gives the bytes away. Called once."""
        content, self._content = self._content, None
        assert content is not None, "a body is read once"
        return content
