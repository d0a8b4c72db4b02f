"""Reads a Hugging Face model folder: config.json and the safetensors files. Downloads nothing, and runs no code of the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rootstock_llm.services.shared import served_config

QUANTIZED_FLOATS = ("F8_", "F6_", "F4")  # beginnings of the dtypes of floats below 16 bits in files
QUANTIZED_WEIGHTS = ("I8", "U8", "I4", "U4")  # dtypes of other quantized weights in files
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # dtype names in files
STORED = FLOATS | {  # dtype names in files, of elements and of codes
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
NAMED_AT_MOST = 8  # largest number of tensor names in an error message
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CheckpointError(ValueError):
    """Raised if the folder cannot be loaded. The message names the file or the tensor."""


class UnsupportedModel(ValueError):
    """Raised if this worker does not support the model. The message names the unsupported property."""


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises CheckpointError if the file is unreadable or is no JSON object."""
    content = _parsed(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def read_json_list(path: Path) -> list[Any]:
    """Reads a JSON array. Raises CheckpointError if the file is unreadable or is no JSON array."""
    content = _parsed(path)
    if not isinstance(content, list):
        raise CheckpointError(f"{path} is not a JSON array")
    return content


def read_config(folder: Path) -> Any:
    """Returns the transformers config. Raises CheckpointError if it is missing or unreadable."""
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
    return config


def eos_token_ids(config: Any) -> tuple[int, ...]:
    """Returns the end-of-sequence ids of the config.

    Without such ids in config.json, the defaults of the config's class apply.
    """
    named = getattr(config, "eos_token_id", None)
    ids = named if isinstance(named, list) else [] if named is None else [named]
    return tuple(dict.fromkeys(int(token) for token in ids))


def architecture_of(config: Any) -> str:
    """Returns the first architecture that the config names."""
    return str((config.architectures or ["(none)"])[0])


def named(tensors: list[str]) -> str:
    """Returns the number of tensors and the first NAMED_AT_MOST names, for an error message."""
    listed = ", ".join(tensors[:NAMED_AT_MOST]) + (", ..." if len(tensors) > NAMED_AT_MOST else "")
    return f"{len(tensors)} tensors: {listed}"


def _other_weights(folder: Path) -> str:
    """Returns the remedy for a folder whose weights are pickled or in GGUF, or an empty string."""
    if any(folder.glob("*.gguf")):
        return ". GGUF is not supported. Use the folder of safetensors from which the GGUF file was made"
    if not any(folder.glob("pytorch_model*.bin")):
        return ""
    return (
        ". Reading its pytorch_model.bin could run code of the file. If you trust it, convert it with `from_pretrained` and"
        " `save_pretrained` of transformers, or with torch.load and safetensors.torch.save_file"
    )


class Checkpoint:
    """The safetensors files of a folder: one file, or several with an index. Files stay open until close()."""

    def __init__(self, folder: Path, has_codes: bool = False) -> None:
        """Opens the files.

        Args:
            has_codes: whether weights may have codes, which a Layout reads.

        Raises:
            CheckpointError: a file or the index is missing or broken, or a weight has codes although has_codes is False.
        """
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._file_of = self._locate()
        self._misnamed = self._remove_misnamed()
        if not has_codes:
            self._check_types()

    def _locate(self) -> dict[str, str]:
        index, single = self._folder / "model.safetensors.index.json", "model.safetensors"
        if index.is_file() and not (self._folder / single).is_file():
            weight_map: dict[str, str] = read_json(index).get("weight_map", {})
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise CheckpointError(f"{index} has no weight_map from tensor names to file names")
            if any(Path(file).name != file for file in weight_map.values()):
                raise CheckpointError(f"{index} has a file name outside of its folder")
            return weight_map
        if not (self._folder / single).is_file():
            raise CheckpointError(
                f"{self._folder} has neither {single} nor {index.name}; only safetensors are loaded{_other_weights(self._folder)}"
            )
        names: list[str] = list(self._file(single).keys())
        return dict.fromkeys(names, single)

    def _remove_misnamed(self) -> dict[str, str]:
        """Removes from the index the tensors that are not in the file that the index names for them.

        Tensors of missing files stay in the index. require() and tensor() report such a tensor if a model needs it.

        Returns:
            The file that the index names for each removed tensor.
        """
        files = [file for file in dict.fromkeys(self._file_of.values()) if (self._folder / file).is_file()]
        there = {file: set(self._file(file).keys()) for file in files}
        misnamed = {name: file for name, file in self._file_of.items() if file in there and name not in there[file]}
        self._file_of = {name: file for name, file in self._file_of.items() if name not in misnamed}
        return misnamed

    def _check_types(self) -> None:
        """Checks that no tensor is quantized, because it would be wrong without its scales. Raises CheckpointError if one is."""
        for name, file in self._file_of.items():
            if not (self._folder / file).is_file():
                continue
            found = self._dtype(name, file)
            if found.startswith(QUANTIZED_FLOATS) or (found in QUANTIZED_WEIGHTS and name.endswith("weight")):
                raise CheckpointError(f"{self._folder} is quantized: {name} is {found}; supported: {', '.join(FLOATS)}")

    def _dtype(self, name: str, file: str) -> str:
        try:
            return str(self._file(file).get_slice(name).get_dtype())
        except CheckpointError:
            raise
        except Exception as error:  # an error of a type that differs between versions of safetensors
            raise CheckpointError(f"{self._folder / file} has no tensor {name}: {error}") from error

    def _file(self, file: str) -> Any:
        if file not in self._open:
            path = self._folder / file
            try:
                self._open[file] = safe_open(str(path), framework="pt", device="cpu")
            except Exception as error:  # an error of a type that differs between versions of safetensors
                raise CheckpointError(f"cannot open {path}: {error}") from error
        return self._open[file]

    def has(self, name: str) -> bool:
        return name in self._file_of

    def has_module(self, name: str) -> bool:
        """Whether the checkpoint has any tensor of a module, such as its weight or the codes of its weight."""
        return bool(self.starting_with(f"{name}."))

    def starting_with(self, prefix: str) -> list[str]:
        """Returns the names of all tensors that begin with the prefix."""
        return [name for name in self._file_of if name.startswith(prefix)]

    def path_of(self, name: str) -> Path:
        """Returns the file of the tensor. Raises CheckpointError if the checkpoint lacks the tensor."""
        self.require([name])
        return self._folder / self._file_of[name]

    def require(self, names: list[str]) -> None:
        """Checks that the checkpoint has the tensors. Raises CheckpointError with the names of missing ones."""
        missing = [name for name in names if name not in self._file_of]
        if missing and (file := self._misnamed.get(missing[0])):
            raise CheckpointError(f"{self._folder / file} has no tensor {missing[0]}, although the index names this file for it")
        if missing:
            raise CheckpointError(f"{self._folder} lacks {named(missing)}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor. Raises CheckpointError if the checkpoint lacks the tensor."""
        self.require([name])
        self._dtype(name, self._file_of[name])
        return tuple(self._file(self._file_of[name]).get_slice(name).get_shape())

    def first_dtype(self) -> torch.dtype:
        """Returns the dtype of the first floating-point tensor. Raises CheckpointError if all tensors are integers."""
        for name, file in self._file_of.items():
            found = FLOATS.get(self._dtype(name, file))
            if found is not None:
                return found
        raise CheckpointError(f"{self._folder} has no floating-point tensor, which would determine dtype auto. Set the dtype.")

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, exact: bool = False) -> Tensor:
        """Returns the tensor, converted to the dtype.

        Args:
            exact: whether the tensor must have the dtype in the file.

        Raises:
            CheckpointError: the tensor is missing, or has another shape or dtype.
        """
        self.require([name])
        try:
            found: Tensor = self._file(self._file_of[name]).get_tensor(name)
        except Exception as error:
            raise CheckpointError(f"cannot read {name} of {self._folder}: {error}") from error
        if tuple(found.shape) != shape:
            raise CheckpointError(f"{name} of {self._folder} has shape {tuple(found.shape)}; the config requires {shape}")
        if not exact and dtype.is_floating_point and found.dtype not in FLOATS.values():
            kind = str(found.dtype).removeprefix("torch.")
            reason = ", and its scales are missing" if found.dtype.itemsize == 1 else f"; supported: {', '.join(FLOATS)}"
            raise CheckpointError(f"{name} of {self._folder} has dtype {kind}{reason}")
        if exact and found.dtype != dtype:
            kinds = f"{found.dtype}; the config requires {dtype}".replace("torch.", "")
            raise CheckpointError(f"{name} of {self._folder} has dtype {kinds}")
        return found.to(dtype)

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns the tensor, converted to int64. Raises CheckpointError as tensor() does."""
        return self.tensor(name, shape, torch.int64)

    def close(self) -> None:
        self._open.clear()


def resolve_dtype(name: str, config: Any, checkpoint: Checkpoint) -> torch.dtype:
    """Returns the dtype to which weights are converted. Raises CheckpointError if it is not supported.

    Args:
        name: a key of DTYPES, or "auto". "auto" means the config's dtype, or the dtype of the first floating-point tensor if
            the config has none.
    """
    if name == "auto":
        named = getattr(config, "dtype", None) or checkpoint.first_dtype()
        name = str(named).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name} is not supported; supported: auto, {', '.join(DTYPES)}")
    return DTYPES[name]
