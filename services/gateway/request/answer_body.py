"""What an answer shows beside its text, as its request's body says it; and what all bodies are."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    """Unknown fields are ignored, because clients send new ones, unless a subclass forbids them."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=(), frozen=True)


class AnswerBody(Body):
    """What an answer shows beside its text. Nothing of it reaches a worker; renderers read it as it stands in the body."""

    return_token_ids: bool | None = Field(
        default=None, description="Choices carry `token_ids`, and `prompt_token_ids` come once."
    )

    def shown(self) -> AnswerBody:
        """These fields of a larger body alone."""
        return AnswerBody(**{name: getattr(self, name) for name in _SHOWN})


_SHOWN = tuple(AnswerBody.model_fields)
TEXT_ALONE = AnswerBody()
