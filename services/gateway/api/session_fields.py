"""A turn of a session, for every endpoint that generates text. Pure."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from rootstock.v1 import worker_pb2
from services.gateway.request.errors import bad_request
from services.shared import limits

_UINT32_MAX = (1 << 32) - 1


class SessionParams(BaseModel):
    """The session of a request, and the turn that it continues."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), frozen=True)

    id: str | None = Field(None, min_length=1, max_length=limits.MAX_SESSION_ID_CHARS)
    rid: str | None = Field(
        None, max_length=limits.MAX_REQUEST_ID_CHARS, description="Turn that this one continues. Null: the latest."
    )
    offset: int | None = Field(
        None, ge=-1, le=_UINT32_MAX, description="Number of tokens of that turn's context that stay. Null: all."
    )
    replace: bool | None = Field(None, description="Whether later turns are deleted.")
    drop_previous_output: bool | None = Field(None, description="Whether the output of that turn is left out of the context.")


def session_turn(given: SessionParams | None) -> worker_pb2.SessionTurn | None:
    if given is None or given.id is None:
        return None
    return worker_pb2.SessionTurn(
        session_id=given.id,
        parent_request_id=given.rid or "",
        offset=None if given.offset in (None, -1) else given.offset,
        replace=bool(given.replace),
        drop_previous_output=bool(given.drop_previous_output),
    )


def begins(given: SessionParams | None) -> bool:
    """Returns whether a prompt starts a context. A turn that names its parent continues a context, so no token marks its
    beginning.
    """
    return given is None or not given.rid or given.offset == 0


def check_turn(alone: bool, prompt_logprobs: str | None) -> None:
    """Checks a turn of a session. Raises ApiError.

    Args:
        alone: Whether the request has one prompt and one output.
        prompt_logprobs: Client's field that asks for log probabilities of the prompt, or None.
    """
    if not alone:
        raise bad_request("session_params", "A turn of a session has one prompt and one answer.")
    if prompt_logprobs is not None:
        raise bad_request(prompt_logprobs, "Log probabilities of the prompt are not given in a session.")
