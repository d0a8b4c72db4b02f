"""Converts the arguments of `rootstock control` to a request, calls the operation, and converts the response to JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import orjson
from google.protobuf.message import Message

from rootstock_llm.protos import control_pb2 as pb
from rootstock_llm.protos import control_pb2_grpc
from rootstock_llm.services.shared.control_values import SELECTED, Scalar, as_json, put_values
from rootstock_llm.services.shared.rpc.control_token import authorization
from rootstock_llm.services.shared.rpc.dialer import Dialer
from rootstock_llm.services.shared.rpc.token_check import METADATA_KEY
from rootstock_llm.services.shared.tls.roles import Role
from rootstock_llm.services.worker.control.flush import SALT_TIERS


class InvalidArguments(ValueError):
    """The operation does not accept these arguments. The message is printed after the operation's name: "takes no arguments"."""


def _without_arguments(build: Callable[[], Message]) -> Callable[[Sequence[str]], Message]:
    """Returns a parser that accepts no arguments and builds the operation's empty request."""

    def parse(words: Sequence[str]) -> Message:
        if words:
            raise InvalidArguments("takes no arguments")
        return build()

    return parse


def _at_most_one(words: Sequence[str], default: str) -> str:
    if len(words) > 1:
        raise InvalidArguments("takes at most one argument")
    return words[0] if words else default


def _changes(words: Sequence[str]) -> Message:
    pairs = [word.partition("=") for word in words]
    if not pairs or not all(name and equals for name, equals, _ in pairs):
        raise InvalidArguments("takes one or more arguments of the form NAME=VALUE")
    request = pb.SetInternalStateRequest()
    put_values(request.tunables, {name: _scalar(value) for name, _, value in pairs})
    return request


def _scalar(word: str) -> Scalar:
    """Returns the value of a word that is a JSON number or boolean, otherwise the word itself."""
    try:
        value = orjson.loads(word)
    except orjson.JSONDecodeError:
        return word
    return value if isinstance(value, (bool, int, float)) else word


def _slow_down(words: Sequence[str]) -> Message:
    return pb.SlowDownRequest(step_delay_s=_seconds(_at_most_one(words, "0")))


def _enum(enum: Any, prefix: str, word: str) -> int:
    try:
        return int(enum.Value(f"{prefix}{word.upper()}"))
    except ValueError:
        known = ", ".join(name.removeprefix(prefix).lower() for name, number in enum.items() if number)
        raise InvalidArguments(f"takes one of {known}, not {word}") from None


def _tags(words: Sequence[str]) -> list[Any]:
    return [_enum(pb.MemoryTag, "MEMORY_TAG_", word) for word in words]


def _flush(words: Sequence[str]) -> Message:
    """Parses the tiers, the cache salt and the age of a flush. `cache_salt=` without a value selects KV without a salt."""
    request = pb.FlushCacheRequest()
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name == "cache_salt":
            request.cache_salt = value
        elif equals and name == "older_than_s":
            request.older_than_s = _seconds(value)
        elif word in SALT_TIERS:
            request.tiers.append(word)
        else:
            raise InvalidArguments(f"takes {', '.join(SALT_TIERS)}, cache_salt=SALT and older_than_s=SECONDS, not {word}")
    if request.HasField("cache_salt") or request.HasField("older_than_s"):
        request.tiers.append(SELECTED)
    return request


def _seconds(word: str) -> float:
    try:
        return float(word)
    except ValueError as error:
        raise InvalidArguments(f"takes a number of seconds: {error}") from None


PARSERS: Mapping[str, Callable[[Sequence[str]], Message]] = {
    "FlushCache": _flush,
    "GetInternalState": _without_arguments(pb.GetInternalStateRequest),
    "SetInternalState": _changes,
    "SlowDown": _slow_down,
    "Pause": lambda words: pb.PauseRequest(mode=_enum(pb.PauseMode, "PAUSE_MODE_", _at_most_one(words, "abort"))),  # type: ignore[arg-type]
    "Continue": _without_arguments(pb.ContinueRequest),
    "StartProfile": lambda words: pb.StartProfileRequest(name=_at_most_one(words, "")),
    "StopProfile": _without_arguments(pb.StopProfileRequest),
    "StartExpertDistributionRecord": _without_arguments(pb.StartExpertDistributionRecordRequest),
    "StopExpertDistributionRecord": _without_arguments(pb.StopExpertDistributionRecordRequest),
    "DumpExpertDistributionRecord": _without_arguments(pb.DumpExpertDistributionRecordRequest),
    "FreezeGc": _without_arguments(pb.FreezeGcRequest),
    "ReleaseMemory": lambda words: pb.ReleaseMemoryRequest(tags=_tags(words)),
    "ResumeMemory": lambda words: pb.ResumeMemoryRequest(tags=_tags(words)),
    "SetLogLevel": lambda words: pb.SetLogLevelRequest(level=_at_most_one(words, "info")),
    "TraceRequest": lambda words: pb.TraceRequestRequest(request_id=_at_most_one(words, "")),
}


async def call(dialer: Dialer, address: str, token: str, operation: str, request: Message, timeout_s: float) -> bytes:
    """Calls an operation and returns its response as indented JSON. Raises grpc.aio.AioRpcError if the call fails."""
    metadata = ((METADATA_KEY, authorization(token)),) if token else ()
    async with dialer.channel(address, Role.WORKER) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        response = await getattr(stub, operation)(request, timeout=timeout_s, metadata=metadata)
    return orjson.dumps(as_json(response), option=orjson.OPT_INDENT_2)


def failure(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
