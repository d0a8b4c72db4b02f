"""A Hugging Face model folder on disk: config.json and the safetensors files. This downloads nothing and runs no code of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rootstock_llm.services.shared import served_config

QUANTISED_WEIGHTS = ("I8", "U8", "I4", "U4")  # file dtypes; floats with fewer than 16 bits count as quantised, too
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by the dtype's name in the files
NAMED_AT_MOST = 8  # largest number of tensors that an error message lists
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CheckpointError(ValueError):
    """The folder cannot be loaded. The message names the file or the tensor."""


class UnsupportedModel(ValueError):
    """The model needs something that this worker does not support. The message names it."""


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises CheckpointError if the file is unreadable or has another value."""
    content = _parsed(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content


def read_json_list(path: Path) -> list[Any]:
    """Reads a JSON array. Raises CheckpointError if the file is unreadable or has another value."""
    content = _parsed(path)
    if not isinstance(content, list):
        raise CheckpointError(f"{path} does not hold a JSON array")
    return content


def read_config(folder: Path) -> Any:
    """Returns the transformers config. Raises CheckpointError if it is missing, unreadable or of a quantised model."""
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json")
    kind = read_json(folder / "config.json").get("model_type")
    if isinstance(kind, str) and kind not in CONFIG_MAPPING:
        raise CheckpointError(served_config.unknown_model_type(str(folder), kind, __version__))
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        if hasattr(config, "standardize_rope_params"):  # the models' code does the same
            config.standardize_rope_params()
    except Exception as error:  # transformers raises errors of many types
        raise CheckpointError(f"cannot read the config of {folder}: {error}") from error
    is_quantised = any(getattr(config, name, None) for name in served_config.QUANTISED)
    if is_quantised or (folder / served_config.QUANTISED_FILE).is_file():
        raise CheckpointError(served_config.quantised(str(folder)))
    return config


def eos_token_ids(config: Any) -> tuple[int, ...]:
    """Returns the end-of-sequence ids of the config. Includes its class's defaults, which config.json may omit."""
    named = getattr(config, "eos_token_id", None)
    ids = named if isinstance(named, list) else [] if named is None else [named]
    return tuple(dict.fromkeys(int(token) for token in ids))


def architecture_of(config: Any) -> str:
    """Returns the first architecture that the config names."""
    return str((config.architectures or ["(none)"])[0])


def named(tensors: list[str]) -> str:
    """Returns the number of tensors and the first names, for an error message."""
    listed = ", ".join(tensors[:NAMED_AT_MOST]) + (", ..." if len(tensors) > NAMED_AT_MOST else "")
    return f"{len(tensors)} tensors: {listed}"


def _pickled(folder: Path) -> str:
    """Returns the remedy for a folder whose weights are pickled, or an empty string."""
    if not any(folder.glob("pytorch_model*.bin")):
        return ""
    return (
        ". Its pytorch_model.bin may run code when it is read. If you trust it, convert it with `from_pretrained` and"
        " `save_pretrained` of transformers, or with torch.load and safetensors.torch.save_file"
    )


class Checkpoint:
    """The safetensors files of a folder, single or sharded. Keeps files open until close()."""

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
        """Removes the tensors that the index assigns to a file which lacks them.

        Entries of missing files stay, because no tensor of them may be needed.

        Returns:
            The file of each removed tensor.
        """
        files = [file for file in dict.fromkeys(self._file_of.values()) if (self._folder / file).is_file()]
        there = {file: set(self._file(file).keys()) for file in files}
        misnamed = {name: file for name, file in self._file_of.items() if file in there and name not in there[file]}
        self._file_of = {name: file for name, file in self._file_of.items() if name not in misnamed}
        return misnamed

    def _check_types(self) -> None:
        """Refuses quantised tensors: their scales are separate tensors, so a plain conversion would give wrong weights."""
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
        except Exception as error:  # the type differs between versions of safetensors
            raise CheckpointError(f"{self._folder / file} does not hold {name}: {error}") from error

    def _file(self, file: str) -> Any:
        if file not in self._open:
            path = self._folder / file
            try:
                self._open[file] = safe_open(str(path), framework="pt", device="cpu")
            except Exception as error:  # the type differs between versions of safetensors
                raise CheckpointError(f"cannot open {path}: {error}") from error
        return self._open[file]

    def holds(self, name: str) -> bool:
        return name in self._file_of

    def path_of(self, name: str) -> Path:
        """Returns the file of the tensor. Raises CheckpointError if the checkpoint lacks the tensor."""
        self.require([name])
        return self._folder / self._file_of[name]

    def require(self, names: list[str]) -> None:
        """Checks that the checkpoint has the tensors. Raises CheckpointError with the names of missing ones."""
        missing = [name for name in names if name not in self._file_of]
        if missing and (file := self._misnamed.get(missing[0])):
            raise CheckpointError(f"{self._folder / file} does not hold {missing[0]}")
        if missing:
            raise CheckpointError(f"{self._folder} lacks {named(missing)}")

    def first_dtype(self) -> torch.dtype:
        """Returns the dtype of the first floating-point tensor. Raises CheckpointError if all tensors are integers."""
        for name, file in self._file_of.items():
            found = FLOATS.get(self._dtype(name, file))
            if found is not None:
                return found
        raise CheckpointError(f"{self._folder} holds no floating-point tensor")

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the tensor, converted. Raises CheckpointError if it is missing or has another shape."""
        self.require([name])
        try:
            found: Tensor = self._file(self._file_of[name]).get_tensor(name)
        except Exception as error:
            raise CheckpointError(f"cannot read {name} of {self._folder}: {error}") from error
        if tuple(found.shape) != shape:
            raise CheckpointError(f"{name} of {self._folder} has shape {tuple(found.shape)}, the config asks for {shape}")
        return found.to(dtype)

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns the tensor as int64. Raises CheckpointError, see tensor()."""
        return self.tensor(name, shape, torch.int64)

    def close(self) -> None:
        self._open.clear()


def resolve_dtype(name: str, config: Any, checkpoint: Checkpoint) -> torch.dtype:
    """Returns the dtype to load with. Raises CheckpointError.

    Args:
        name: a key of DTYPES, or "auto" for the config's dtype, or for that of the first tensor if the config has none.
    """
    if name == "auto":
        named = getattr(config, "dtype", None) or checkpoint.first_dtype()
        name = str(named).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name} is not supported; supported: auto, {', '.join(DTYPES)}")
    return DTYPES[name]
