"""Where a model's files are: a folder as it is, or a hub id whose files are fetched first."""

from __future__ import annotations

from pathlib import Path

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
COPIES = ["consolidated*.safetensors"]  # of the same weights, for other loaders


def model_folder(model: str) -> str:
    """The folder's path. Raises ValueError if it is neither a model folder nor a hub id that can be had."""
    if (Path(model) / "config.json").is_file():
        return model
    if Path(model).exists() or model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ValueError(f"{model} holds no config.json")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return str(snapshot_download(model, allow_patterns=PATTERNS, ignore_patterns=COPIES))
    except (RepositoryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"{model} is no folder here, and could not be fetched from the hub: {type(error).__name__}") from error
