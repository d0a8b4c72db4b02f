"""Defines traces: the requests of clients and their times, read from and written to JSON lines.

A line is {"arrival": s, "blocks": [ids], "output_len": n} with these optional fields: "input_len", "max_new_tokens",
"priority", "salt", "routing_key", "lora", "session", "think_s", "forced". The reader also accepts lines of Mooncake's published
traces, {"timestamp": ms, "input_length", "output_length", "hash_ids"}, with blocks of 512 tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

BLOCK_SIZE = 64
MOONCAKE_BLOCK_SIZE = 512
MAX_BLOCK_ID = (1 << 64) - 1


class TraceError(ValueError):
    """A trace file has an invalid line, which the message names."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a client. Times are in seconds, lengths in tokens."""

    arrival: float
    # Ids of the blocks with which the context (prompt, then output) begins. Equal ids mean equal tokens. Tokens after the blocks
    # occur nowhere else in the trace. Blocks beyond input_len determine the output, so that a later turn whose prompt repeats the
    # output can use its KV.
    blocks: tuple[int, ...]
    input_len: int
    output_len: int  # tokens until the model ends by itself; 0 for a request that ends with its prompt, such as a score
    max_new_tokens: int  # limit of the output; the scheduler knows this limit, and not output_len
    priority: int = 0
    salt: str = ""
    routing_key: str = ""
    lora: str = ""
    session: str = ""  # requests of one session are sent in sequence; "": no session
    # Smallest time from the end of the session's previous turn to this request, which is never sent before `arrival`.
    think_s: float = 0.0
    # (first, count) of the runs of output tokens that the grammar forces, in order and without overlap; empty: no grammar.
    forced: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.input_len < 1 or self.output_len < 0 or self.max_new_tokens < 0:
            raise ValueError("input_len must be at least 1; output_len and max_new_tokens must be at least 0")
        if (self.output_len == 0) != (self.max_new_tokens == 0):
            raise ValueError("output_len and max_new_tokens must be both 0 (the request ends with its prompt) or both above 0")
        if not self.arrival >= 0 or not self.think_s >= 0:
            raise ValueError("arrival and think_s must not be negative")
        if self.blocks and not 0 <= min(self.blocks) <= max(self.blocks) <= MAX_BLOCK_ID:
            raise ValueError("block ids must be unsigned 64-bit numbers")
        ends = (0, *(first + count for first, count in self.forced))
        if any(first < end or count < 1 for (first, count), end in zip(self.forced, ends, strict=False)):
            raise ValueError("forced runs must have at least 1 token each, be in order and not overlap")


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace, in the order of their arrivals."""

    block_size: int  # tokens per block
    requests: tuple[TraceRequest, ...]

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError("block_size must be at least 1")

    @property
    def unique_block_tokens(self) -> int:
        """Prompt tokens with each shared block counted once, which is the size of a pool for the KV of all prompts."""
        seen: set[int] = set()
        loose = 0
        for request in self.requests:
            whole = request.blocks[: request.input_len // self.block_size]
            seen.update(whole)
            loose += request.input_len - len(whole) * self.block_size
        return len(seen) * self.block_size + loose


def read_trace(path: Path, block_size: int | None = None) -> Trace:
    """Reads a trace file.

    Args:
        path: the file.
        block_size: tokens per block, or None for the default of the first line's format.

    Raises:
        TraceError: a line is invalid, or there is no request.
        ValueError: `block_size` is below 1.
        OSError: the file cannot be read.
    """
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    requests: list[TraceRequest] = []
    mooncake = False
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("a line must be a JSON object")
                if not requests:
                    mooncake = "hash_ids" in record
                    block_size = block_size or (MOONCAKE_BLOCK_SIZE if mooncake else BLOCK_SIZE)
                requests.append(_from_mooncake(record) if mooncake else _from_record(record, block_size or BLOCK_SIZE))
            except (ValueError, TypeError, KeyError) as error:
                raise TraceError(f"{path}, line {number}: {_reason(error)}") from error
    if not requests:
        raise TraceError(f"{path} has no request")
    return Trace(block_size or BLOCK_SIZE, tuple(requests))


def write_trace(path: Path, trace: Trace) -> None:
    """Writes one JSON line per request, without fields that have their default value.

    The file does not contain the block size. If it is not BLOCK_SIZE, the caller of read_trace() must pass it.
    """
    with path.open("w", encoding="utf-8") as out:
        for request in trace.requests:
            out.write(json.dumps(_to_record(request, trace.block_size), separators=(",", ":")) + "\n")


def _reason(error: Exception) -> str:
    return f"the field {error} is missing" if isinstance(error, KeyError) else str(error)


_OPTIONAL = {field.name: field.default for field in fields(TraceRequest) if field.name not in ("arrival", "blocks")}


def _from_record(record: dict[str, Any], block_size: int) -> TraceRequest:
    if unknown := sorted(set(record) - {"arrival", "blocks", *_OPTIONAL}):
        raise ValueError(f"unknown fields: {', '.join(unknown)}")
    blocks, output_len = record["blocks"], record["output_len"]
    return TraceRequest(
        arrival=float(record["arrival"]),
        blocks=_ints(blocks),
        input_len=_int(record.get("input_len", len(blocks) * block_size)),
        output_len=_int(output_len),
        max_new_tokens=_int(record.get("max_new_tokens", output_len)),
        priority=_int(record.get("priority", 0)),
        salt=str(record.get("salt", "")),
        routing_key=str(record.get("routing_key", "")),
        lora=str(record.get("lora", "")),
        session=str(record.get("session", "")),
        think_s=float(record.get("think_s", 0.0)),
        forced=tuple([_run(run) for run in record.get("forced", ())]),
    )


def _to_record(request: TraceRequest, block_size: int) -> dict[str, Any]:
    record: dict[str, Any] = {"arrival": request.arrival, "blocks": request.blocks}
    implied = {**_OPTIONAL, "input_len": len(request.blocks) * block_size, "max_new_tokens": request.output_len}
    for name in _OPTIONAL:
        if (value := getattr(request, name)) != implied[name]:
            record[name] = value
    return record


def _from_mooncake(record: dict[str, Any]) -> TraceRequest:
    output_len = max(_int(record["output_length"]), 1)
    return TraceRequest(
        arrival=float(record["timestamp"]) / 1000,
        blocks=_ints(record["hash_ids"]),
        input_len=_int(record["input_length"]),
        output_len=output_len,
        max_new_tokens=output_len,
    )


def _int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _run(value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"a forced run must be [first token, number of tokens], not {value!r}")
    return _int(value[0]), _int(value[1])


def _ints(values: Iterable[object]) -> tuple[int, ...]:
    return tuple([_int(value) for value in values])
