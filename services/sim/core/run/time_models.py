"""Named time models, and time models in files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_type_hints

from services.worker.exec.fake import TimeModel

TYPES = get_type_hints(TimeModel)  # float or int, by field

# h200-like is an assumption and no measurement: an 8B model in bfloat16 on one H200. Weights of 16 GB at 4 TB/s and launches
# make the base, 16 GFLOP per token at 500 TFLOP/s the prefill, sampling and bookkeeping the row, 128 KiB of KV at 4 TB/s the
# token of context. h200-8b is the same with the data sheet's 4.8 TB/s, 800 of its 989 TFLOP/s, and 0.7 ms of launches: what
# kernels at their best would do. A step that no graph holds costs it the host's 297 - 116 us at 256 rows that device_host_cost
# measures, launches left out, in which 6,700 tokens of context could be read.
PRESETS = {
    "h200-like": TimeModel(base=5e-3, per_prefill_token=32e-6, per_row=10e-6, per_context_token=33e-9),
    "h200-8b": TimeModel(
        base=4e-3,
        per_prefill_token=20e-6,
        per_row=10e-6,
        per_context_token=27e-9,
        eager_step=181e-6,
        graph_rows=256,
        graph_rereads=6700,
    ),
    "zero": TimeModel(),
}


def load_time_model(name_or_path: str) -> TimeModel:
    """A preset by name, else a JSON file with any of TimeModel's fields. Raises ValueError, OSError."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    record = json.loads(Path(name_or_path).read_text(encoding="utf-8"))
    if not isinstance(record, dict) or not record or not record.keys() <= TYPES.keys():
        raise ValueError(f"{name_or_path}: a time model is a JSON object of {', '.join(TYPES)}")
    for name, value in record.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            unit = "tokens" if TYPES[name] is int else "seconds"
            raise ValueError(f"{name_or_path}: {name} is a number of {unit}, not {value!r}")
    values: dict[str, Any] = {name: TYPES[name](value) for name, value in record.items()}
    return replace(TimeModel(), **values)


def time_model_json(model: TimeModel) -> str:
    return json.dumps(asdict(model))
