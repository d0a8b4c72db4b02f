"""The error for a request that can never run on this worker."""

from __future__ import annotations

from services.shared.field_refusal import worded


class InvalidRequest(ValueError):
    """A field of a request is invalid. The client gets the message."""

    def __init__(self, field: str, why: str, element: int | None = None) -> None:
        """Builds the message for the client.

        Args:
            field: the invalid field, as in rootstock.v1.Finish.
            why: reason for the client, without the field's name and without text of the prompt.
            element: index of the invalid value if the field is repeated.
        """
        super().__init__(worded(field, element, why))
        self.field = field
        self.why = why
        self.element = element
