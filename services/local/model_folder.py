"""Finds the folder of a model that the user names by a folder or by a hub id. A model with a hub id is downloaded first.

A folder that cannot be served is refused before any process starts, with one message that has the remedy. This module checks
only files, their formats and sizes, because these checks need no model code. The worker checks everything else.
"""

from __future__ import annotations

import difflib
import errno
import getpass
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rootstock_llm.services.shared.hf_tokenizer import TOKENIZER_FILE, vocabulary_files
from rootstock_llm.services.shared.quantization_config import fault_of

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
COPIES = ["consolidated*.safetensors"]  # second copies of the weights for other loaders, which are not downloaded
LAYOUT = "a folder in Hugging Face layout (config.json, tokenizer.json, *.safetensors)"
EXAMPLE = "Qwen/Qwen3-0.6B"
LFS = b"version https://git-lfs"  # start of a Git LFS pointer, the placeholder of a file that was not pulled
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEADER = 8  # bytes at the start of a safetensors file that contain the length of its header


class NoModel(ValueError):
    """The model cannot be served. The message has the fault and the remedy."""


def model_folder(model: str, needs_weights: bool = True) -> Path:
    """Returns the model's folder. Downloads the model first if it is given by its hub id.

    Args:
        model: path of a folder, or a hub id.
        needs_weights: whether the workers read weights.

    Raises:
        NoModel: the model cannot be served.
    """
    path = Path(model).expanduser()
    try:
        folder = path if path.exists() else None
    except OSError as error:  # the user has no permission to read a parent folder
        raise NoModel(_unreadable(path, error)) from None
    if folder is None and not _may_be_hub_id(model):
        raise NoModel(f"{model}: this folder does not exist.{_near(path)} Give {LAYOUT}, or a hub id such as {EXAMPLE}.")
    if folder is None:
        folder = _download(model, path)
    elif not folder.is_dir():
        raise NoModel(_file_fault(path))
    try:
        _check(folder, needs_weights)
    except OSError as error:
        raise NoModel(_unreadable(folder, error)) from None
    return folder


def weight_bytes(folder: Path) -> int:
    """Returns the total size in bytes of the weight files that the worker reads. Missing files count as 0 bytes."""
    return sum(path.stat().st_size for path in _weights(folder) if path.is_file())


def _may_be_hub_id(model: str) -> bool:
    return model.count("/") == 1 and not model.startswith((".", "/", "~")) and not model.endswith(("/", ".gguf", ".safetensors"))


def _download(model: str, path: Path) -> Path:
    """Downloads a model, config.json first, so that the weights of an unsupported model are not downloaded."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model, allow_patterns=["config.json"]))
        _check_config(folder)
        return Path(snapshot_download(model, allow_patterns=PATTERNS, ignore_patterns=COPIES))
    except NoModel:
        raise
    except Exception as error:  # the library raises its own errors, and those of its HTTP client and of the system
        raise NoModel(_download_fault(model, path, error)) from None


def _download_fault(model: str, path: Path, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    os_errors = [each for each in _chain(error) if isinstance(each, OSError)]
    denied = next((each for each in os_errors if isinstance(each, PermissionError)), None)
    if any(each.errno in (errno.ENOSPC, errno.EDQUOT) for each in os_errors):
        return f"{model} could not be downloaded: the disk is full. Free space, or set HF_HOME to a folder on a larger disk."
    if denied is not None:
        return f"{model} could not be downloaded: {denied.filename} is not writable. Set HF_HOME to a writable folder."
    if isinstance(error, GatedRepoError):
        return (
            f"{model}: the publisher requires that you accept its terms. Accept them on the hub, then set HF_TOKEN to your token."
        )
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return (
            f"{model}: there is neither a folder nor a model on the hub with this name.{_near(path)} Correct the name."
            " A private model needs HF_TOKEN."
        )
    if isinstance(error, HfHubHTTPError):
        return f"{model}: the hub responded with {error.response.status_code}. Retry later, or give a folder with the model."
    return (
        f"{model}: this folder does not exist, and the hub is not reachable.{_near(path)} Check the network and HF_ENDPOINT,"
        " or copy the model from another machine and give its folder."
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _near(path: Path) -> str:
    """Returns a question that suggests a folder with a similar name; "" if there is no such folder."""
    try:
        names = [each.name for each in path.parent.iterdir() if each.is_dir()]
    except OSError:
        return ""
    found = difflib.get_close_matches(path.name, names, 1)
    return f" Did you mean {path.parent / found[0]}?" if found else ""


def _file_fault(path: Path) -> str:
    if path.suffix == ".gguf":
        return _gguf_fault(path)
    if path.suffix == ".safetensors" or path.name == "config.json":
        return f"{path} is one file of a model. Give its folder: {path.parent}."
    return f"{path} is a file. Give {LAYOUT}."


def _gguf_fault(path: Path) -> str:
    return (
        f"{path} is a GGUF file, a format that this server does not read. Give the folder of the original safetensors files, or"
        " the model's hub id."
    )


def _unreadable(path: Path, error: OSError) -> str:
    fault = os.strerror(error.errno).lower() if error.errno else str(error)
    named = error.filename or path
    return f"{named} cannot be read: {fault}. Give the user {getpass.getuser()} permission to read the model's files."


def _check(folder: Path, needs_weights: bool) -> None:
    """Checks the files of a folder. Raises NoModel, and OSError for an unreadable file."""
    names = {path.name for path in folder.iterdir()}
    if "config.json" not in names:
        raise NoModel(_without_config(folder, names))
    _check_config(folder)
    if TOKENIZER_FILE not in names and not vocabulary_files(folder):
        raise NoModel(f"{folder} has no tokenizer ({TOKENIZER_FILE}). Copy the tokenizer files of the model's publisher into it.")
    if needs_weights:
        _check_weights(folder)


def _without_config(folder: Path, names: set[str]) -> str:
    if not names:
        return f"{folder} is empty. Give {LAYOUT}."
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    if gguf:
        return _gguf_fault(folder / gguf[0])
    subfolders = sorted(folder.glob("*/config.json")) or sorted(folder.glob("snapshots/*/config.json"))
    if subfolders:
        return f"{folder} has no config.json, but a folder in it has one. Give {subfolders[0].parent}."
    if "adapter_config.json" in names:
        return f"{folder} has an adapter, not a model. Merge it into its base model, and give the folder of the result."
    if names.intersection(("params.json", "consolidated.safetensors")):
        return f"{folder} has the publisher's layout (params.json), not Hugging Face's. Give {LAYOUT}."
    return f"{folder} has no config.json. Give {LAYOUT}."


def _json(path: Path) -> Any:
    """Reads a JSON file. Raises NoModel if it is not JSON, and OSError if it is not readable."""
    text = path.read_bytes()
    if text.startswith(LFS):
        raise NoModel(f"{path} is a Git LFS pointer, not the file. Run `git lfs pull` in {path.parent}.")
    if not text.strip():
        raise NoModel(f"{path} is empty. Download it again.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoModel(f"{path} is not valid JSON ({error}). Correct it, or download it again.") from None


def _check_config(folder: Path) -> None:
    path = folder / "config.json"
    config = _json(path)
    if not isinstance(config, dict):
        raise NoModel(f"{path} is not a JSON object. Download it again.")
    if not config.get("model_type"):
        raise NoModel(f"{path} has no model_type, which names the kind of model. Use the config.json of the model's publisher.")
    if fault := fault_of(config, {path.name for path in folder.iterdir()}):
        raise NoModel(
            f"{folder} is quantized in a layout that is not supported: {fault}. Give the unquantized original of the model."
        )


def _weights(folder: Path) -> list[Path]:
    """Returns the paths of the weight files that the worker reads. The index may name files that are missing.

    Raises:
        NoModel: the index is not valid.
        OSError: the index is not readable.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() or not index.is_file():
        return [single] if single.is_file() else []
    content = _json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise NoModel(f"{index} has no weight_map of tensors to files. Download it again.")
    return [folder / name for name in dict.fromkeys(names.values())]


def _check_weights(folder: Path) -> None:
    files = _weights(folder)
    if not files:
        raise NoModel(_without_weights(folder))
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise NoModel(
            f"{folder} lacks {len(missing)} of {len(files)} weight files, for example {missing[0]}. Finish the download."
        )
    for path in files:
        _check_complete(path)


def _without_weights(folder: Path) -> str:
    pickled = next((path for pattern in PICKLES for path in sorted(folder.glob(pattern))), None)
    if pickled is not None:
        return (
            f"{folder} has weights only in {pickled.name}, a format that can run code when it is read. If you trust the file,"
            " load the model with transformers and call save_pretrained, which writes safetensors."
        )
    return f"{folder} has no weights (neither {SINGLE} nor {INDEX}). Download the model's *.safetensors files into it."


def _check_complete(path: Path) -> None:
    """Checks that a weight file has all bytes that its header states. After an interrupted download, it has fewer.

    Raises:
        NoModel: the file is incomplete, is a Git LFS pointer, or is not a safetensors file.
        OSError: the file is not readable.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(HEADER)
        if (begin + file.read(len(LFS))).startswith(LFS):
            raise NoModel(f"{path} is a Git LFS pointer, not the file. Run `git lfs pull` in {path.parent}.")
        length = int.from_bytes(begin, "little")
        if size < HEADER or length > size - HEADER:
            raise NoModel(f"{path} is not a complete safetensors file: it has {size} bytes. Download it again.")
        file.seek(HEADER)
        header = file.read(length)
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, RecursionError, AttributeError, TypeError, LookupError):
        raise NoModel(f"{path} is not a safetensors file: its header cannot be read. Download it again.") from None
    if size < (whole := HEADER + length + max(ends, default=0)):
        raise NoModel(f"{path} is cut off: it has {size} of {whole} bytes. Download it again.")
