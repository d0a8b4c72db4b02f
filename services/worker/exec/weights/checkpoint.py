"""A Hugging Face model folder on disk: config.json, generation_config.json and safetensors, nothing else. No downloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from services.shared import served_config

QUANTISED_WEIGHTS = ("I8", "U8", "I4", "U4")  # types of the files; the small floats are quantised wherever they are
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by their names in the files
NAMED_AT_MOST = 8  # missing tensors that an error message lists


class CheckpointError(ValueError):
    """The folder cannot be loaded; the message names the file or tensor."""


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError if the file is unreadable or holds no object."""
    content = _parsed(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content


def read_json_list(path: Path) -> list[Any]:
    """Raises CheckpointError if the file is unreadable or holds no array."""
    content = _parsed(path)
    if not isinstance(content, list):
        raise CheckpointError(f"{path} does not hold a JSON array")
    return content


def read_config(folder: Path) -> Any:
    """The transformers config of the folder. Raises CheckpointError if there is none or it is quantised."""
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json")
    kind = read_json(folder / "config.json").get("model_type")
    if isinstance(kind, str) and kind not in CONFIG_MAPPING:
        raise CheckpointError(served_config.unknown_model_type(str(folder), kind, __version__))
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        if hasattr(config, "standardize_rope_params"):  # as each model's code does again: what the config says by itself counts
            config.standardize_rope_params()
    except Exception as error:  # the library raises what its validators and the file's types make of it
        raise CheckpointError(f"cannot read the config of {folder}: {error}") from error
    said = any(getattr(config, name, None) for name in served_config.QUANTISED)
    if said or (folder / served_config.QUANTISED_FILE).is_file():
        raise CheckpointError(served_config.quantised(str(folder)))
    return config


def eos_token_ids(config: Any) -> tuple[int, ...]:
    """Returns the end-of-sequence ids of the config, its class's default included: files leave out what equals that."""
    named = getattr(config, "eos_token_id", None)
    ids = named if isinstance(named, list) else [] if named is None else [named]
    return tuple(dict.fromkeys(int(token) for token in ids))


def named(tensors: list[str]) -> str:
    """How many they are, and the first of their names."""
    listed = ", ".join(tensors[:NAMED_AT_MOST]) + (", ..." if len(tensors) > NAMED_AT_MOST else "")
    return f"{len(tensors)} tensors: {listed}"


def _pickled(folder: Path) -> str:
    """What to do where the folder has weights in a format that can run code."""
    if not any(folder.glob("pytorch_model*.bin")):
        return ""
    return (
        ". Its pytorch_model.bin may run code when it is read: where you trust it, `from_pretrained` and `save_pretrained` of"
        " transformers, or torch.load and safetensors.torch.save_file, make one of the other"
    )


class Checkpoint:
    """The safetensors of a folder, single or sharded. Owns the open files; close() lets them go."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._file_of = self._locate()
        self._misnamed = self._take_out_misnamed()
        self._check_types()

    def _locate(self) -> dict[str, str]:
        index, single = self._folder / "model.safetensors.index.json", "model.safetensors"
        if index.is_file() and not (self._folder / single).is_file():
            weight_map: dict[str, str] = read_json(index).get("weight_map", {})
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise CheckpointError(f"{index} has no weight_map of names to files")
            if any(Path(file).name != file for file in weight_map.values()):
                raise CheckpointError(f"{index} names a file outside its folder")
            return weight_map
        if not (self._folder / single).is_file():
            raise CheckpointError(
                f"{self._folder} has neither {single} nor {index.name}; only safetensors are loaded{_pickled(self._folder)}"
            )
        names: list[str] = list(self._file(single).keys())
        return dict.fromkeys(names, single)

    def _take_out_misnamed(self) -> dict[str, str]:
        """What an index names and its file lacks, by name its file: it is not there. A file that is not there itself may not be
        asked for."""
        files = [file for file in dict.fromkeys(self._file_of.values()) if (self._folder / file).is_file()]
        there = {file: set(self._file(file).keys()) for file in files}
        misnamed = {name: file for name, file in self._file_of.items() if file in there and name not in there[file]}
        self._file_of = {name: file for name, file in self._file_of.items() if name not in misnamed}
        return misnamed

    def _check_types(self) -> None:
        """Scales of what is quantised are tensors of their own: converted as it stands, it would be another model."""
        for name, file in self._file_of.items():
            if not (self._folder / file).is_file():
                continue
            found = self._dtype(name, file)
            if found.startswith(("F8", "F6", "F4")) or (found in QUANTISED_WEIGHTS and name.endswith("weight")):
                raise CheckpointError(f"{self._folder} is quantised: {name} is {found}; supported: {', '.join(FLOATS)}")

    def _dtype(self, name: str, file: str) -> str:
        try:
            return str(self._file(file).get_slice(name).get_dtype())
        except CheckpointError:
            raise
        except Exception as error:  # as of the reader, above
            raise CheckpointError(f"{self._folder / file} does not hold {name}: {error}") from error

    def _file(self, file: str) -> Any:
        if file not in self._open:
            path = self._folder / file
            try:
                self._open[file] = safe_open(str(path), framework="pt", device="cpu")
            except Exception as error:  # the reader's own exception type differs between versions
                raise CheckpointError(f"cannot open {path}: {error}") from error
        return self._open[file]

    def holds(self, name: str) -> bool:
        return name in self._file_of

    def path_of(self, name: str) -> Path:
        """The file that the tensor should be in. Raises CheckpointError if none is named for it."""
        self.require([name])
        return self._folder / self._file_of[name]

    def require(self, names: list[str]) -> None:
        """Raises CheckpointError naming the tensors that are not there."""
        missing = [name for name in names if name not in self._file_of]
        if missing and (file := self._misnamed.get(missing[0])):
            raise CheckpointError(f"{self._folder / file} does not hold {missing[0]}")
        if missing:
            raise CheckpointError(f"{self._folder} lacks {named(missing)}")

    def first_dtype(self) -> torch.dtype:
        """That of the first floating-point tensor. Raises CheckpointError if there is none."""
        for name, file in self._file_of.items():
            found = FLOATS.get(self._dtype(name, file))
            if found is not None:
                return found
        raise CheckpointError(f"{self._folder} holds no floating-point tensor")

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The named tensor, converted. Raises CheckpointError if it is missing or has another shape."""
        self.require([name])
        try:
            found: Tensor = self._file(self._file_of[name]).get_tensor(name)
        except Exception as error:
            raise CheckpointError(f"cannot read {name} of {self._folder}: {error}") from error
        if tuple(found.shape) != shape:
            raise CheckpointError(f"{name} of {self._folder} has shape {tuple(found.shape)}, the config asks for {shape}")
        return found.to(dtype)

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """int64. Raises as tensor()."""
        return self.tensor(name, shape, torch.int64)

    def close(self) -> None:
        self._open.clear()
