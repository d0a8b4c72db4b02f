"""The JSON bodies of the admin API, with SGLang's names, and their translation into requests to the workers' control services."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal
from urllib.parse import parse_qs

from google.protobuf.message import Message
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rootstock_llm.protos import control_pb2 as pb
from rootstock_llm.services.gateway.api.request_body import joined_salt
from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request
from rootstock_llm.services.gateway.generation.origin import Caller
from rootstock_llm.services.shared.control_values import SELECTED, put_values
from rootstock_llm.services.shared.limits import MAX_CACHE_SALT_CHARS, MAX_KEY_NAME_CHARS, MAX_REQUEST_ID_CHARS

MAX_TIMEOUT_S = 3600.0  # largest `timeout_s` of a request, in seconds
MAX_WORKER_CHARS = 512  # characters of a worker's id or address
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Tag = Literal["kv_cache", "weights"]


class AdminBody(BaseModel):
    """The body of a request to the admin port. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    # Id or address of the worker that the request is for. None: all workers, unless the URL's query names a worker.
    worker: str | None = Field(None, min_length=1, max_length=MAX_WORKER_CHARS)


class ControlBody(AdminBody, ABC):
    """The body of a request that the workers' control services execute."""

    # Seconds for the operation on each worker, including waiting time. None: the value of the setting control_timeout_s.
    timeout_s: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)

    @abstractmethod
    def request(self) -> Message:
        """Returns the request message for the control service."""


class SelectedPages(ControlBody):
    """The body of a flush, which selects the cached pages of one cache salt, or all pages."""

    # Salts of the requests that computed the pages. "": pages without a salt. If cache_salt, extra_key and api_key are None, the
    # pages of all salts are flushed.
    cache_salt: str | None = Field(None, max_length=MAX_CACHE_SALT_CHARS)
    extra_key: str | None = Field(None, max_length=MAX_CACHE_SALT_CHARS)
    # Name of the API key whose requests computed the pages. Allowed only with --salt-cache-by-key.
    api_key: str | None = Field(None, min_length=1, max_length=MAX_KEY_NAME_CHARS)
    # Minimum age in seconds of a flushed page of the storage tier. None: any age.
    older_than_s: float | None = Field(None, ge=0, allow_inf_nan=False)

    def flush_request(self, tiers: Sequence[str]) -> Message:
        """Returns the message that flushes the selected pages in these tiers. If `tiers` is empty, the worker chooses them."""
        salt = self._salt()
        selects = [] if salt is None and self.older_than_s is None else [SELECTED]
        return pb.FlushCacheRequest(tiers=[*tiers, *selects], cache_salt=salt, older_than_s=self.older_than_s)

    def _salt(self) -> str | None:
        """Returns the cache salt in the form that workers use, or None for all salts."""
        if self.cache_salt is None and self.extra_key is None and self.api_key is None:
            return None
        return Caller(key=self.api_key or "", salts_cache=True).cache_salt_of(joined_salt(self.cache_salt, self.extra_key))


class FlushCache(SelectedPages):
    """Flushes cached pages of any tiers."""

    # Accepted from SGLang's clients without effect, because a worker never frees the memory of its page pool.
    empty_cache: bool | None = None
    # Tiers whose pages are flushed. Empty: the worker chooses them.
    tiers: list[Literal["device", "host", "storage"]] = Field(default_factory=list, max_length=3)

    def request(self) -> Message:
        return self.flush_request(self.tiers)


class ClearStorage(SelectedPages):
    """Flushes cached pages of the storage tier only. SGLang has a separate route for this flush."""

    def request(self) -> Message:
        return self.flush_request(["storage"])


class GetInternalState(ControlBody):
    def request(self) -> Message:
        return pb.GetInternalStateRequest()


class SetInternalState(ControlBody):
    server_args: dict[str, bool | Int64 | float | str] = Field(min_length=1)

    def request(self) -> Message:
        request = pb.SetInternalStateRequest()
        put_values(request.tunables, self.server_args)
        return request


class SlowDown(ControlBody):
    """Delays every step of the workers' schedulers."""

    forward_sleep_time: float | None = None  # seconds of delay after each step, or None for no delay

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


class StartExpertDistributionRecord(ControlBody):
    def request(self) -> Message:
        return pb.StartExpertDistributionRecordRequest()


class StopExpertDistributionRecord(ControlBody):
    def request(self) -> Message:
        return pb.StopExpertDistributionRecordRequest()


class DumpExpertDistributionRecord(ControlBody):
    def request(self) -> Message:
        return pb.DumpExpertDistributionRecordRequest()


class FreezeGc(ControlBody):
    def request(self) -> Message:
        return pb.FreezeGcRequest()


class ReleaseMemory(ControlBody):
    tags: list[Tag] | None = Field(None, fail_fast=True)

    def request(self) -> Message:
        return pb.ReleaseMemoryRequest(tags=_tags(self.tags))


class ResumeMemory(ControlBody):
    tags: list[Tag] | None = Field(None, fail_fast=True)

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
    """Returns the last load report of each worker."""


class Abort(AdminBody):
    """Aborts the requests with one request id, or all requests, of all API keys."""

    rid: str | None = Field(None, min_length=1, max_length=MAX_REQUEST_ID_CHARS)
    abort_all: bool | None = None

    @model_validator(mode="after")
    def _check_selection(self) -> Abort:
        if (self.rid is None) == (not self.abort_all):
            raise ValueError("send either 'rid' or 'abort_all'")
        return self


def _tags(tags: list[Tag] | None) -> list[pb.MemoryTag]:
    return [pb.MemoryTag.Value(f"MEMORY_TAG_{tag.upper()}") for tag in tags or ()]


def parse(kind: type[AdminBody], content: bytes | bytearray, query: bytes) -> AdminBody:
    """Parses the body of a request to the admin port.

    Args:
        content: A JSON object. Empty content means an object without fields.
        query: Query string of the URL, which may have the parameter `worker`.

    Raises:
        ApiError: The body or the query is invalid (400). The error names the field.
    """
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
    """Returns the parameter `worker` of the query string, or None. Raises ApiError for any other parameter."""
    given = parse_qs(query.decode("latin-1"), keep_blank_values=True)
    unknown = sorted(given.keys() - {"worker"})
    if unknown:
        raise bad_request(unknown[0], f"'{unknown[0]}' is not a parameter of this URL. The only parameter is 'worker'.")
    if len(given.get("worker", ())) > 1:
        raise bad_request(
            "worker", "The URL has the parameter 'worker' more than once. Send it once, or not at all for all workers."
        )
    return given["worker"][0] if given else None


def _wrong(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or None
    return bad_request(field, f"{field or 'The body'}: {first['msg']}.")
