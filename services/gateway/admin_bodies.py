"""The JSON bodies of the admin API, under SGLang's names, and the control requests that they mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Literal

from google.protobuf.message import Message
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rootstock.v1 import control_pb2 as pb
from services.gateway.errors import ApiError, bad_request
from services.shared.control_values import put_values
from services.shared.limits import MAX_REQUEST_ID_CHARS

MAX_TIMEOUT_S = 3600.0
Whole = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Tag = Literal["kv_cache", "weights"]


class AdminBody(BaseModel, ABC):
    """timeout_s: how long the operation may take on each worker, waiting included; by default the gateway's setting."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    timeout_s: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)

    @abstractmethod
    def request(self) -> Message:
        """What the control service is asked."""


class FlushCache(AdminBody):
    """empty_cache: accepted and not used; the memory of flushed pages stays with the pool."""

    empty_cache: bool | None = None

    def request(self) -> Message:
        return pb.FlushCacheRequest()


class GetInternalState(AdminBody):
    def request(self) -> Message:
        return pb.GetInternalStateRequest()


class SetInternalState(AdminBody):
    server_args: dict[str, bool | Whole | float | str] = Field(min_length=1)

    def request(self) -> Message:
        request = pb.SetInternalStateRequest()
        put_values(request.tunables, self.server_args)
        return request


class SlowDown(AdminBody):
    """forward_sleep_time: seconds after each step; null for full speed."""

    forward_sleep_time: float | None = None

    def request(self) -> Message:
        return pb.SlowDownRequest(step_delay_s=self.forward_sleep_time or 0.0)


class Pause(AdminBody):
    mode: Literal["abort", "retract", "in_place"] = "abort"

    def request(self) -> Message:
        return pb.PauseRequest(mode=pb.PauseMode.Value(f"PAUSE_MODE_{self.mode.upper()}"))


class Continue(AdminBody):
    def request(self) -> Message:
        return pb.ContinueRequest()


class StartProfile(AdminBody):
    name: str = ""

    def request(self) -> Message:
        return pb.StartProfileRequest(name=self.name)


class StopProfile(AdminBody):
    def request(self) -> Message:
        return pb.StopProfileRequest()


class FreezeGc(AdminBody):
    def request(self) -> Message:
        return pb.FreezeGcRequest()


class ReleaseMemory(AdminBody):
    tags: list[Tag] | None = None

    def request(self) -> Message:
        return pb.ReleaseMemoryRequest(tags=_tags(self.tags))


class ResumeMemory(AdminBody):
    tags: list[Tag] | None = None

    def request(self) -> Message:
        return pb.ResumeMemoryRequest(tags=_tags(self.tags))


class SetLogLevel(AdminBody):
    log_level: Literal["debug", "info", "warning", "error"]

    def request(self) -> Message:
        return pb.SetLogLevelRequest(level=self.log_level)


class TraceRequest(AdminBody):
    request_id: str = Field(min_length=1, max_length=MAX_REQUEST_ID_CHARS)

    def request(self) -> Message:
        return pb.TraceRequestRequest(request_id=self.request_id)


def _tags(tags: list[Tag] | None) -> list[pb.MemoryTag]:
    return [pb.MemoryTag.Value(f"MEMORY_TAG_{tag.upper()}") for tag in tags or ()]


def parse(kind: type[AdminBody], content: bytes) -> AdminBody:
    """content: JSON, or nothing for an object without fields. Raises ApiError 400 naming the field."""
    try:
        return kind.model_validate_json(content or b"{}")
    except ValidationError as error:
        raise _wrong(error) from None


def _wrong(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or None
    return bad_request(field, f"{field or 'The body'}: {first['msg']}.")
