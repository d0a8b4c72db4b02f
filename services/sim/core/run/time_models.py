"""Named time models, and time models in files."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

from services.worker.exec.fake import TimeModel

# h200-like is an assumption and no measurement: an 8B model in bfloat16 on one H200. Weights of 16 GB at 4 TB/s and launches
# make the base, 16 GFLOP per token at 500 TFLOP/s the prefill, sampling and bookkeeping the row, 128 KiB of KV at 4 TB/s the
# token of context. h200-8b is the same with the data sheet's 4.8 TB/s, 800 of its 989 TFLOP/s, and 0.7 ms of launches: what
# kernels at their best would do. A step that no graph holds costs it the host's 297 - 116 us at 256 rows that device_host_cost
# measures, launches left out, in which 6,700 tokens of context could be read.
WHOLE = ("graph_rows", "graph_rereads")
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
    names = [field.name for field in fields(TimeModel)]
    if not isinstance(record, dict) or not record or not set(record) <= set(names):
        raise ValueError(f"{name_or_path}: a time model is a JSON object of {', '.join(names)}")
    for name, value in record.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            unit = "tokens" if name in WHOLE else "seconds"
            raise ValueError(f"{name_or_path}: {name} is a number of {unit}, not {value!r}")
    return TimeModel(
        base=float(record.get("base", 0)),
        per_prefill_token=float(record.get("per_prefill_token", 0)),
        per_row=float(record.get("per_row", 0)),
        per_context_token=float(record.get("per_context_token", 0)),
        eager_step=float(record.get("eager_step", 0)),
        graph_rows=int(record.get("graph_rows", 0)),
        graph_rereads=int(record.get("graph_rereads", 0)),
    )


def time_model_json(model: TimeModel) -> str:
    return json.dumps(asdict(model))
