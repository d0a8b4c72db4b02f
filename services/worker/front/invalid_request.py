"""A submit that can never run here, by the field that is at fault."""

from __future__ import annotations

from services.shared.field_refusal import worded


class InvalidRequest(ValueError):
    """field: as in rootstock.v1.Finish. why: for the client, without the field's name; nothing of the prompt. element: which
    value of a repeated field."""

    def __init__(self, field: str, why: str, element: int | None = None) -> None:
        super().__init__(worded(field, element, why))
        self.field = field
        self.why = why
        self.element = element
