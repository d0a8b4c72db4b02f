"""The pooling of an embedding model, from the files that sentence-transformers writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.worker.exec.pools.embedding_pool import PoolingConfig, PoolingKind
from services.worker.exec.weights.checkpoint import CheckpointError, UnsupportedModel, read_json, read_json_list

MODULES = "modules.json"
KINDS = {"cls": PoolingKind.CLS, "mean": PoolingKind.MEAN, "lasttoken": PoolingKind.LAST}
LEGACY = {  # switches of older files
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


def read_pooling(folder: Path, default: PoolingConfig) -> PoolingConfig:
    """Returns the pooling of modules.json, or the default without that file.

    Raises:
        CheckpointError: a file is malformed.
        UnsupportedModel: the folder has modules or a pooling that this worker lacks.
    """
    if not (folder / MODULES).is_file():
        return default
    modules = [_module(folder, entry) for entry in read_json_list(folder / MODULES)]
    others = sorted({kind for kind, _ in modules} - {"Transformer", "Pooling", "Normalize"})
    if others:
        raise UnsupportedModel(f"{MODULES} has {', '.join(others)}; supported are Transformer, Pooling and Normalize")
    poolings = [path for kind, path in modules if kind == "Pooling"]
    if len(poolings) != 1:
        raise UnsupportedModel(f"{MODULES} has {len(poolings)} Pooling modules, one is supported")
    kind = _kind(read_json(poolings[0] / "config.json"))
    return PoolingConfig(kind, any(kind == "Normalize" for kind, _ in modules))


def _module(folder: Path, entry: Any) -> tuple[str, Path]:
    """Returns the class name and the folder of a module. Raises CheckpointError."""
    kind, path = (entry.get("type"), entry.get("path", "")) if isinstance(entry, dict) else (None, "")
    if not isinstance(kind, str) or not isinstance(path, str) or path == ".." or Path(path).name != path:
        raise CheckpointError(f"{folder / MODULES} has an entry without a type or with a path outside its folder")
    return kind.rsplit(".", 1)[-1], folder / path


def _kind(config: dict[str, Any]) -> PoolingKind:
    """Returns the pooling of a Pooling module. Raises UnsupportedModel for an unknown pooling, or for several."""
    named = config.get("pooling_mode", [mode for switch, mode in LEGACY.items() if config.get(switch)] or "mean")
    modes = [named] if isinstance(named, str) else list(named)
    if len(modes) != 1 or modes[0] not in KINDS:
        raise UnsupportedModel(f"pooling {' and '.join(map(str, modes))} is not supported; supported: {', '.join(KINDS)}")
    return KINDS[modes[0]]
