"""The JSON bodies of the admin API, under SGLang's names, and the control requests that they mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Literal
from urllib.parse import parse_qs

from google.protobuf.message import Message
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rootstock.v1 import control_pb2 as pb
from services.gateway.request.errors import ApiError, bad_request
from services.shared.control_values import put_values
from services.shared.limits import MAX_REQUEST_ID_CHARS

MAX_TIMEOUT_S = 3600.0
MAX_WORKER_CHARS = 512  # of an id or an address
Whole = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Tag = Literal["kv_cache", "weights"]


class AdminBody(BaseModel):
    """worker: id or address of the one that is meant; by default all are. In the body, or as a parameter of the URL."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    worker: str | None = Field(None, min_length=1, max_length=MAX_WORKER_CHARS)


class ControlBody(AdminBody, ABC):
    """timeout_s: how long the operation may take on each worker, waiting included; by default the gateway's setting."""

    timeout_s: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)

    @abstractmethod
    def request(self) -> Message:
        """What the control service is asked."""


class FlushCache(ControlBody):
    """empty_cache: accepted and not used; the memory of flushed pages stays with the pool. tiers: none for device and host."""

    empty_cache: bool | None = None
    tiers: list[Literal["device", "host", "storage"]] = Field(default_factory=list, max_length=3)

    def request(self) -> Message:
        return pb.FlushCacheRequest(tiers=self.tiers)


class ClearStorage(ControlBody):
    """SGLang's name for the same of the storage alone."""

    def request(self) -> Message:
        return pb.FlushCacheRequest(tiers=["storage"])


class GetInternalState(ControlBody):
    def request(self) -> Message:
        return pb.GetInternalStateRequest()


class SetInternalState(ControlBody):
    server_args: dict[str, bool | Whole | float | str] = Field(min_length=1)

    def request(self) -> Message:
        request = pb.SetInternalStateRequest()
        put_values(request.tunables, self.server_args)
        return request


class SlowDown(ControlBody):
    """forward_sleep_time: seconds after each step; null for full speed."""

    forward_sleep_time: float | None = None

    def request(self) -> Message:
        return pb.SlowDownRequest(step_delay_s=self.forward_sleep_time or 0.0)


class Pause(ControlBody):
    mode: Literal["abort", "retract", "in_place"] = "abort"

    def request(self) -> Message:
        return pb.PauseRequest(mode=pb.PauseMode.Value(f"PAUSE_MODE_{self.mode.upper()}"))


class Continue(ControlBody):
    def request(self) -> Message:
        return pb.ContinueRequest()


class StartProfile(ControlBody):
    name: str = ""

    def request(self) -> Message:
        return pb.StartProfileRequest(name=self.name)


class StopProfile(ControlBody):
    def request(self) -> Message:
        return pb.StopProfileRequest()


class FreezeGc(ControlBody):
    def request(self) -> Message:
        return pb.FreezeGcRequest()


class ReleaseMemory(ControlBody):
    tags: list[Tag] | None = None

    def request(self) -> Message:
        return pb.ReleaseMemoryRequest(tags=_tags(self.tags))


class ResumeMemory(ControlBody):
    tags: list[Tag] | None = None

    def request(self) -> Message:
        return pb.ResumeMemoryRequest(tags=_tags(self.tags))


class SetLogLevel(ControlBody):
    log_level: Literal["debug", "info", "warning", "error"]

    def request(self) -> Message:
        return pb.SetLogLevelRequest(level=self.log_level)


class TraceRequest(ControlBody):
    request_id: str = Field(min_length=1, max_length=MAX_REQUEST_ID_CHARS)

    def request(self) -> Message:
        return pb.TraceRequestRequest(request_id=self.request_id)


class Load(AdminBody):
    """Of every worker."""


class Abort(AdminBody):
    """Of anybody's requests: those that are called `rid`, or all."""

    rid: str | None = Field(None, min_length=1, max_length=MAX_REQUEST_ID_CHARS)
    abort_all: bool | None = None

    @model_validator(mode="after")
    def _says_which(self) -> Abort:
        if (self.rid is None) == (not self.abort_all):
            raise ValueError("either 'rid' or 'abort_all' must be given")
        return self


def _tags(tags: list[Tag] | None) -> list[pb.MemoryTag]:
    return [pb.MemoryTag.Value(f"MEMORY_TAG_{tag.upper()}") for tag in tags or ()]


def parse(kind: type[AdminBody], content: bytes | bytearray, query: bytes) -> AdminBody:
    """content: JSON, or nothing for an object without fields. query: the URL's, which may name the worker. Raises ApiError 400
    naming the field."""
    worker = _worker(query)
    try:
        body = kind.model_validate_json(content or b"{}")
        if worker is None:
            return body
        if body.worker is not None and body.worker != worker:
            raise bad_request("worker", "The URL and the body name different workers.")
        return kind.model_validate({**body.model_dump(), "worker": worker})
    except ValidationError as error:
        raise _wrong(error) from None


def _worker(query: bytes) -> str | None:
    given = parse_qs(query.decode("latin-1"), keep_blank_values=True)
    unknown = sorted(given.keys() - {"worker"})
    if unknown:
        raise bad_request(unknown[0], f"{unknown[0]}: There is no such parameter; the URL may name a 'worker'.")
    if len(given.get("worker", ())) > 1:
        raise bad_request("worker", "worker: One worker at most can be named.")
    return given["worker"][0] if given else None


def _wrong(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or None
    return bad_request(field, f"{field or 'The body'}: {first['msg']}.")
