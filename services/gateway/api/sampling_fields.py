"""Checks of sampling fields that a type cannot make, for every endpoint. Pure; each raises ApiError that names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rootstock.v1 import common_pb2 as pb
from services.gateway.api.request_body import SamplingBody
from services.gateway.request.errors import bad_request
from services.shared import sampling_parameters as table
from services.shared.sampling_parameters import SamplingParameter, spelled


def stop_strings(value: Any, name: str = table.STOP.wire) -> list[str]:
    """Returns the stop strings of a client's field with this name."""
    return _texts(value, table.STOP, name)


def stop_regexes(value: Any) -> list[str]:
    """Returns the patterns. Workers check whether they are valid."""
    return _texts(value, table.STOP_REGEX, table.STOP_REGEX.wire)


def _texts(value: Any, row: SamplingParameter, name: str) -> list[str]:
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and len(texts) > row.most:
        raise bad_request(name, f"'{name}' may have at most {row.most} strings.")
    if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
        raise bad_request(name, f"'{name}' must be a string or a list of strings.")
    if any(not 1 <= len(item) <= row.chars for item in texts):
        raise bad_request(name, f"A string of '{name}' must have 1 to {row.chars} characters.")
    return texts


def logit_bias(entries: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    row = table.LOGIT_BIAS
    bias: dict[int, float] = {}
    for key, value in entries.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad_request("logit_bias", "The keys of 'logit_bias' must be token ids.")
        if row.fault(value):
            raise bad_request("logit_bias", f"The values of 'logit_bias' must be {spelled(row.low, row.high)}.")
        bias[int(key)] = value
    check_token_ids(list(bias), vocab_size, "logit_bias")
    return bias


def dry(body: SamplingBody) -> pb.Dry | None:
    """Returns the DRY penalty, or None without one."""
    for breaker in body.dry_sequence_breakers or ():
        if not 1 <= len(breaker) <= table.DRY_SEQUENCE_BREAKERS.chars:
            message = f"A text of 'dry_sequence_breakers' must have 1 to {table.DRY_SEQUENCE_BREAKERS.chars} characters."
            raise bad_request("dry_sequence_breakers", message)
    if not body.dry_multiplier or body.dry_penalty_last_n == 0:
        return None
    last = body.dry_penalty_last_n
    return pb.Dry(
        multiplier=body.dry_multiplier,
        base=body.dry_base,
        allowed_length=body.dry_allowed_length,
        window=None if last == -1 else last,
        breakers=body.dry_sequence_breakers,
    )


def token_id_set(ids: Sequence[int] | None) -> list[int]:
    """Returns checked ids once each, in rising order."""
    return sorted(set(ids or ()))


def check_token_ids(ids: Sequence[Any], vocab_size: int, param: str) -> None:
    """Checks types and range without a Python loop, because prompts have up to millions of ids."""
    if not ids:
        return
    if set(map(type, ids)) != {int}:
        raise bad_request(param, f"'{param}' must hold integers only.")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise bad_request(param, f"'{param}' holds a token id outside the vocabulary (0 to {vocab_size - 1}).")
