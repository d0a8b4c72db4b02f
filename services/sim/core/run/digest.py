"""Hashes the decisions of a simulated scheduler, so that two checkouts can be compared on the same trace.

The canonical form is a text of JSON lines, and the digest is its SHA-256. Each line is `[KIND, VALUE]`, in the order of the run:

| kind | value |
| --- | --- |
| `submit` | index in the trace of a request that reaches the scheduler |
| `plan` | the plan of a launched step |
| `output` | the message of a step for one gateway |

A record is an object with the canonical names of NAMES, sorted. Names of classes, modules and attributes do not occur. The other
types have these forms:

| type | form |
| --- | --- |
| array, list, tuple | list |
| mapping | sorted list of pairs |
| enumeration | its value |
| bytes | hexadecimal digits |
| float | the shortest text that gives the same value |

Orders without a meaning are removed: parameters of admitted slots are sorted by slot, and updates of page tables by slot and
page. Message texts are left out, because their wording is no decision. Columns of experts are left out, because a simulated model
has no experts.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, TextIO

import numpy as np

from rootstock_llm.services.worker.core.contracts.grammar import GrammarSpec
from rootstock_llm.services.worker.core.contracts.messages import Finish, PeerOutput, Verified
from rootstock_llm.services.worker.core.contracts.plan import I32, BatchPlan, SamplingParams, SlotParams


def _sorted_admitted(plan: BatchPlan) -> list[SlotParams]:
    return sorted(plan.admitted, key=lambda admitted: admitted.slot)


def _table_updates(plan: BatchPlan) -> list[tuple[int, int, list[int]]] | dict[str, object]:
    """Returns [slot, first logical page, page ids] of each update of the page tables, sorted.

    With cache groups, returns an object with this list, the list of the window tables, and the columns of state units. For a
    plan without cache groups, returns the plain list, so that digests recorded before cache groups existed stay valid.
    """
    pages = _sorted_updates(plan.table_slots, plan.table_firsts, plan.table_counts, plan.table_pages)
    if not len(plan.window_slots) and not len(plan.state_after):
        return pages
    windows = _sorted_updates(plan.window_slots, plan.window_firsts, plan.window_counts, plan.window_units)
    states = [plan.state_before, plan.state_after, plan.state_cuts, plan.state_at_cut]
    states += [plan.state_starts] if len(plan.drafts) else []  # without draft tokens, state_starts equals `starts`
    return {"pages": pages, "windows": windows, "states": states}


def _sorted_updates(slots: I32, firsts: I32, counts: I32, entries: I32) -> list[tuple[int, int, list[int]]]:
    columns = (slots.tolist(), firsts.tolist(), counts.tolist(), np.cumsum(counts).tolist())
    values = entries.tolist()
    return sorted((slot, first, values[end - count : end]) for slot, first, count, end in zip(*columns, strict=True))


# Each record has its canonical names with the attribute path or the function that reads the value. If an attribute is
# renamed, its path changes and its canonical name stays. A renamed canonical name changes every digest.
NAMES: dict[type, dict[str, str | Callable[[Any], object]]] = {
    BatchPlan: {
        "step": "step_id",
        "mode": "mode",
        "num_extend": "num_extend",
        "slots": "slots",
        "starts": "starts",
        "num_tokens": "num_tokens",
        "input_ids": "input_ids",
        "sample": "sample",
        "mask_rows": "mask_rows",
        "prompt_logprob_rows": "prompt_logprob_rows",
        "prompt_logprob_offsets": "prompt_logprob_offsets",
        "prompt_logprob_nexts": "prompt_logprob_nexts",
        "admitted": _sorted_admitted,
        "table_updates": _table_updates,
        "drafts": "drafts",
        "operations": "operations",
    },
    SlotParams: {
        "slot": "slot",
        "num_prompt_tokens": "num_prompt_tokens",
        "params": "params",
        "stop_token_ids": "stop_token_ids",
        "history": "history",
        "prediction": "prediction",
        "drafted_for": "drafted_for",
    },
    SamplingParams: {
        "max_new_tokens": "max_new_tokens",
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "top_n_sigma": "top_n_sigma",
        "frequency_penalty": "frequency_penalty",
        "presence_penalty": "presence_penalty",
        "repetition_penalty": "repetition_penalty",
        "logit_bias": "logit_bias",
        "allowed_token_ids": "allowed_token_ids",
        "banned_token_ids": "banned_token_ids",
        "dry": "dry",
        "min_new_tokens": "min_new_tokens",
        "ignore_eos": "ignore_eos",
        "stop_token_ids": "stop_token_ids",
        "stop": "stop",
        "stop_regex": "stop_regex",
        "seed": "seed",
        "top_logprobs": "top_logprobs",
        "logprob_token_ids": "logprob_token_ids",
        "prompt_logprobs_from": "prompt_logprobs_from",
        "grammar": "grammar",
        "embedding": "embedding",
        "score": "score",
        "stream_interval": "stream_interval",
        "skip_special_tokens": "skip_special_tokens",
        "speculative": "speculative",
    },
    GrammarSpec: {"kind": "kind", "source": "source"},
    PeerOutput: {
        "gateway": "peer",
        "handles": "handles",
        "counts": "counts",
        "tokens": "tokens",
        "finishes": "finishes",
        "logprobs": "logprobs",
        "prompt_logprobs": "prompt_logprobs",
        "predicted": "predicted",
        "ready": "ready",
    },
    Finish: {
        "handle": "handle",
        "request_id": "request_id",
        "reason": "reason",
        "matched_stop": "matched_stop",
        "matched_token": "matched_token",
        "error": "error",
        "prompt_tokens": "prompt_tokens",
        "cached_tokens": "cached_tokens",
        "cached_from": "cached_from",
        "completion_tokens": "completion_tokens",
        "queue_s": "queue_s",
        "retractions": "retractions",
        "verified": "verified",
        "embedding": "embedding",
        "label_logprobs": "label_logprobs",
        "field": "field",
        "element": "element",
        "kv_reservation": "reservation",
        "kv_reservation_pages": "reserved_pages",
    },
    Verified: {
        "rows": "rows",
        "drafted": "drafted",
        "accepted": "accepted",
        "predicted": "predicted",
        "accepted_predicted": "right_predicted",
    },
}


class RunDigest:
    """The SHA-256 of one simulation's canonical lines so far. Later changes of a record that was added have no effect."""

    def __init__(self, lines: TextIO | None = None) -> None:
        """Starts an empty digest. If `lines` is given, the file receives a copy of the canonical lines."""
        self._hash = hashlib.sha256()
        self._lines = lines

    def add(self, kind: str, value: object) -> None:
        """Adds a line to the digest. Raises TypeError if the value has no canonical form."""
        line = json.dumps([kind, canonical(value)], separators=(",", ":"), sort_keys=True, allow_nan=False) + "\n"
        self._hash.update(line.encode())
        if self._lines is not None:
            self._lines.write(line)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def canonical(value: object) -> object:
    """Returns the value in plain JSON types. Raises TypeError if its type has no canonical form."""
    if isinstance(value, enum.Enum):
        return canonical(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [canonical(each) for each in value]
    if isinstance(value, Mapping):
        return sorted([canonical(name), canonical(each)] for name, each in value.items())
    names = NAMES.get(type(value))
    if names is None:
        raise TypeError(f"{type(value).__name__} has no canonical form. Add its names to NAMES.")
    return {name: canonical(attrgetter(path)(value) if isinstance(path, str) else path(value)) for name, path in names.items()}
