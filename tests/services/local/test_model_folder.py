"""Tests that a model that cannot be served is refused before the start, in a sentence with the fault and the remedy."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rootstock_llm.services.local.model_folder import NoModel, model_folder, weight_bytes
from tests.e2e.system import DEMO, ROOT

UNPRIVILEGED_UID = 65534
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 1\n"
Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a copy of the demo model that a test may change."""
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def config_with(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def without(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink() for name in names]


def with_file(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def only_empty_files(*names: str) -> Change:
    """Returns a change that deletes all files of a folder and makes empty files with these names."""

    def change(folder: Path) -> None:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")

    return change


def sharded(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    names = {f"w{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


FAULTS: dict[str, tuple[Change, str, str]] = {  # change, fault, remedy
    "empty folder": (only_empty_files(), "is empty", "Give a folder in Hugging Face layout"),
    "no config": (without("config.json"), "has no config.json", "Give a folder in Hugging Face layout"),
    "gguf inside": (only_empty_files("a.Q4_K_M.gguf"), "a.Q4_K_M.gguf is a GGUF file", "original safetensors files"),
    "folder above": (only_empty_files("sub/config.json"), "but a folder in it has one", "Give "),
    "hub cache": (only_empty_files("snapshots/0a/config.json"), "but a folder in it has one", "snapshots/0a"),
    "adapter": (only_empty_files("adapter_config.json"), "has an adapter, not a model", "Merge it into its base model"),
    "other layout": (only_empty_files("params.json"), "the publisher's layout", "Give a folder in Hugging Face layout"),
    "cut config": (with_file("config.json", '{"a": 1,'), "config.json is not valid JSON", "download it again"),
    "empty config": (with_file("config.json", ""), "config.json is empty", "Download it again"),
    "binary config": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "is not valid JSON", "download it again"),
    "list as config": (with_file("config.json", "[]"), "is not a JSON object", "Download it again"),
    "config without model_type": (with_file("config.json", "{}"), "has no model_type", "config.json of the model's publisher"),
    "pointer as config": (with_file("config.json", LFS), "is a Git LFS pointer", "git lfs pull"),
    "quantized": (
        lambda f: config_with(f, quantization_config={"quant_method": "hqq"}),
        "is quantized",
        "Give the unquantized original",
    ),
    "quantized by a tool": (with_file("hf_quant_config.json", "{}"), "is quantized", "Give the unquantized original"),
    "no tokenizer": (without("tokenizer.json"), "has no tokenizer (tokenizer.json)", "Copy the tokenizer"),
    "no weights": (without("model.safetensors"), "has no weights", "Download the model's *.safetensors"),
    "pickled weights": (pickled, "has weights only in pytorch_model.bin", "save_pretrained"),
    "missing shards": (sharded, "lacks 2 of 2 weight files, for example model-00001-of-00002", "Finish the download"),
    "index without files": (
        lambda f: (sharded(f), (f / "model.safetensors.index.json").write_text('{"weight_map": []}')),
        "has no weight_map of tensors to files",
        "Download it again",
    ),
    "cut weights": (cut_off, "model.safetensors is cut off: it has ", "Download it again"),
    "short weights": (
        with_file("model.safetensors", "abc"),
        "is not a complete safetensors file: it has 3 bytes",
        "Download it again",
    ),
    "page as weights": (
        with_file("model.safetensors", "\x02\0\0\0\0\0\0\0no page of this name"),
        "is not a safetensors file: its header cannot be read",
        "Download it again",
    ),
    "pointer as weights": (with_file("model.safetensors", LFS), "is a Git LFS pointer", "git lfs pull"),
}


def refusal(model: str | Path) -> str:
    with pytest.raises(NoModel) as caught:
        model_folder(str(model))
    assert caught.value.__suppress_context__ or caught.value.__context__ is None, "the traceback has no second error"
    return str(caught.value)


@pytest.mark.parametrize("name", FAULTS)
def test_damaged_model_folder_is_refused(name: str, folder: Path) -> None:
    change, fault, remedy = FAULTS[name]
    change(folder)
    message = refusal(folder)
    assert str(folder) in message and fault in message and remedy in message, message


def test_complete_model_folder_is_accepted(folder: Path) -> None:
    assert model_folder(str(folder)) == folder
    assert weight_bytes(folder) == (folder / "model.safetensors").stat().st_size
    (folder / "model.safetensors").unlink()
    assert model_folder(str(folder), needs_weights=False) == folder


@pytest.mark.parametrize(
    ("name", "fault", "remedy"),
    [
        ("model.gguf", "is a GGUF file", "original safetensors files"),
        ("model.safetensors", "is one file of a model", "Give its folder: "),
        ("config.json", "is one file of a model", "Give its folder: "),
        ("model.zip", "is a file", "Give a folder in Hugging Face layout"),
    ],
)
def test_file_in_place_of_a_model_folder_is_refused(name: str, fault: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    message = refusal(tmp_path / name)
    assert str(tmp_path / name) in message and fault in message and remedy in message, message


def test_similar_folder_is_suggested_when_the_path_is_misspelt(folder: Path) -> None:
    message = refusal(folder.with_name("modle"))
    assert f"{folder.with_name('modle')}: this folder does not exist. Did you mean {folder}?" in message
    assert "or a hub id such as Qwen/Qwen3-0.6B." in message


@pytest.mark.parametrize("locked", ["model", "model/config.json", "model/model.safetensors"])
def test_error_names_the_path_when_a_permission_is_missing(locked: str, folder: Path, tmp_path: Path) -> None:
    """Root may read everything, so a test that runs as root changes its user first."""
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and os.geteuid() == 0 and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    (tmp_path / locked).chmod(0)
    code = "import os\nfrom rootstock_llm.services.local.model_folder import *\n"
    code += f"if os.geteuid() == 0: os.setgroups([]); os.setegid({UNPRIVILEGED_UID}); os.seteuid({UNPRIVILEGED_UID})\n"
    code += f"try: model_folder({str(folder)!r})\nexcept NoModel as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert f"{tmp_path / locked} cannot be read: permission denied. Give the user " in done.stdout, done


class Hub(BaseHTTPRequestHandler):
    """Answers every request with the status and the headers of its HubServer."""

    server: HubServer

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.send_header("content-length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


class HubServer(ThreadingHTTPServer):
    status, headers = 404, dict[str, str]()


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def refusal_of_the_hub(url: str, cache: Path, model: str = "somebody/some-model", setup: str = "") -> str:
    """Returns the refusal that a new process prints. The hub's library reads the environment only when a process imports it."""
    code = f"from rootstock_llm.services.local.model_folder import *\n{setup}\n"
    code += f"try: model_folder({model!r})\nexcept NoModel as error: print(error)"
    env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("\n") == 1, (done.stdout, done.stderr)
    return done.stdout


def test_error_says_that_the_hub_is_unreachable(tmp_path: Path) -> None:
    message = refusal_of_the_hub("http://127.0.0.1:9", tmp_path)
    assert "somebody/some-model: this folder does not exist, and the hub is not reachable." in message
    assert "Check the network and HF_ENDPOINT, or copy the model from another machine and give its folder." in message


@pytest.mark.parametrize(
    ("status", "code", "fault", "remedy"),
    [
        (404, "RepoNotFound", "neither a folder nor a model on the hub with this name", "Correct the name"),
        (401, "RepoNotFound", "neither a folder nor a model on the hub with this name", "A private model needs HF_TOKEN"),
        (403, "GatedRepo", "requires that you accept its terms", "HF_TOKEN to your token"),
    ],
    ids=["unknown", "private", "gated"],
)
def test_error_has_the_hubs_reason_when_the_hub_refuses_the_model(
    status: int, code: str, fault: str, remedy: str, hub: HubServer, tmp_path: Path
) -> None:
    hub.status, hub.headers = status, {"x-error-code": code}
    message = refusal_of_the_hub(f"http://127.0.0.1:{hub.server_port}", tmp_path)
    assert fault in message and remedy in message, message


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (f"OSError({errno.ENOSPC}, 'No space left on device')", "the disk is full. Free space, or set HF_HOME"),
        (f"PermissionError({errno.EACCES}, 'Permission denied', '/cache')", "/cache is not writable. Set HF_HOME"),
    ],
    ids=["full", "denied"],
)
def test_error_suggests_hf_home_when_a_download_cannot_be_written(error: str, fault: str, tmp_path: Path) -> None:
    setup = f"import huggingface_hub\ndef fail(*a, **k): raise {error}\nhuggingface_hub.snapshot_download = fail"
    assert f"somebody/some-model could not be downloaded: {fault}" in refusal_of_the_hub(
        "http://127.0.0.1:9", tmp_path, setup=setup
    )


def test_model_that_cannot_be_a_hub_id_causes_no_request_to_the_hub(tmp_path: Path) -> None:
    for model in ("./a", "~/a", "/a/b", "a/b/c", "a", "a/b.gguf", "a/"):
        assert ": this folder does not exist." in refusal(model)
