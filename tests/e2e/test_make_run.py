"""`make run`: its output, and the results of the commands that it prints."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor

from rootstock_llm.services.local.ports import free_ports
from tests.certificates import Authority
from tests.e2e.launcher import Launcher, paste
from tests.e2e.system import DEMO, ROOT, make_run, processes_with
from tests.exec.tiny_models import TinyModel, greedy_answers
from tests.services.redis_server import EITHER_SERVER
from tests.services.tokenizer.model_folders import sentencepiece_model

OUTPUT = Path(__file__).with_name("make_run_output.txt")
LAST = "Ctrl-C stops everything."
KEY = "a-key-of-this-test"
TOKEN = "a-token-of-this-test"
BY_TIME = re.compile(r"^  \S+ +\d+ s  .*\n", re.MULTILINE)  # a progress line; printed only if a phase takes seconds
MASKS = {  # parts of the output that differ between runs
    r"after +[\d.]+ s": "after TIME s",
    r"processes in [\d.]+ s": "processes in TIME s",
    r"pid \d+": "pid NUMBER",
    r"(?<=127\.0\.0\.1:)\d+": "PORT",
    r"(?<=FOLDER/run/)\d+": "PORT",
    r"holds \d+ tokens of all requests together \([\d.]+ GB\)": "holds NUMBER tokens of all requests together (SIZE GB)",
}


def read_until(process: subprocess.Popen[str], text: str) -> str:
    seen = ""
    assert process.stdout is not None
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"the process ended without printing {text!r}:\n{seen}")


def masked(output: str, folder: Path) -> str:
    text = BY_TIME.sub("", output).replace(str(folder), "FOLDER")
    for pattern, word in MASKS.items():
        text = re.sub(pattern, word, text)
    return text


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("redis", EITHER_SERVER)
def test_make_run_serves_and_ctrl_c_ends_all_processes(redis: str) -> None:
    (port,) = free_ports(1)
    marker = uuid.uuid4().hex
    env = {"ROOTSTOCK_TEST_MARKER": marker, "ROOTSTOCK_LOCAL_NUM_THREADS": "1", "ROOTSTOCK_LOCAL_REDIS_SERVER": redis}
    process = make_run(env, f"PORT={port}")
    try:
        text = read_until(process, LAST)
        assert "What is 17 + 25?\n  17 + 25 = 42." in text
        second = make_run(env, f"PORT={port}")
        assert f"port {port} is taken" in second.communicate(timeout=60)[0]
        assert second.returncode != 0
    finally:
        os.killpg(process.pid, signal.SIGINT)  # the signal that a terminal sends at Ctrl-C
        process.communicate(timeout=60)
    assert not processes_with(f"ROOTSTOCK_TEST_MARKER={marker}")


def test_output_of_make_run_equals_the_recorded_file(tmp_path: Path) -> None:
    """With ROOTSTOCK_WRITE_OUTPUT=1, the test writes make_run_output.txt instead of comparing it."""
    with Launcher(tmp_path, "--admin-port", str(free_ports(1)[0])) as launcher:
        launcher.read_until(LAST)
    output = masked(launcher.output, tmp_path)
    if os.environ.get("ROOTSTOCK_WRITE_OUTPUT"):
        OUTPUT.write_text(output)
    assert output == OUTPUT.read_text()


def vectors_of(folder: Path) -> None:
    """Writes the demo model's files into `folder` as a Qwen3Model.

    This architecture has no LM head, so the model only gives embeddings.
    """
    tensors = load_file(DEMO / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((DEMO / "config.json").read_text()) | {"architectures": ["Qwen3Model"]}
    (folder / "config.json").write_text(json.dumps(config))


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def keys_file(folder: Path) -> Path:
    path = folder / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": "one", "key": KEY}]}))
    return path


def tls_flags(folder: Path, *names: str) -> list[str]:
    """Returns TLS flags with a new certificate for these names. The folder's name has a space, which tests the quoting."""
    made = folder / "my files"
    made.mkdir()
    signed = Authority(folder / "authority").signed(*names)
    (made / "tls.crt").write_bytes(signed.certificate)
    (made / "tls.key").write_bytes(signed.key)
    return ["--gateway-flags", f"--tls-cert-file '{made}/tls.crt' --tls-key-file '{made}/tls.key'"]


def answer_of(launcher: Launcher, env: Mapping[str, str] | None = None) -> dict[str, object]:
    """Runs the curl command that the launcher has printed, and returns the response."""
    answer = json.loads(paste(launcher.curl(), env))
    assert "error" not in answer, answer
    return dict(answer)


def status_of(url: str) -> int:
    with urllib.request.urlopen(url, timeout=60) as response:
        return int(response.status)


def test_printed_commands_succeed_with_another_model_name_and_other_ports_and_two_gateways(tmp_path: Path) -> None:
    admin_port = free_ports(1)[0]
    flags = ("--served-model-name", "it's a name", "--gateways", "2", "--admin-port", str(admin_port))
    with Launcher(tmp_path, *flags) as launcher:
        text = launcher.read_until(LAST)
        assert "  17 + 25 = 42.\n" in text
        answer = answer_of(launcher)
        assert answer["model"] == "it's a name" and "3, 4, 5, 6, 7, 8, 9" in str(answer["choices"])
        assert f"  admin API    http://127.0.0.1:{admin_port}/get_load\n" in text
        urls = [url for url in launcher.urls() if not url.endswith(("/v1", "/v1/chat/completions"))]
        assert len(urls) == 8 and {status_of(url) for url in urls} == {200}, (
            "all printed URLs must respond: two pages, the admin API and five metrics endpoints"
        )
        bases = [url for url in launcher.urls() if url.endswith("/v1")]
        assert len(bases) == 2 and {status_of(f"{url}/models") for url in bases} == {200}
        assert (
            paste(f"ls {next(line.split()[-1] for line in text.splitlines() if line.startswith('  logs '))}").count(".log") >= 8
        )


@pytest.mark.parametrize("key", [KEY, ""], ids=["with a key", "without a key"])
def test_printed_commands_send_the_api_key_and_the_control_token(key: str, tmp_path: Path) -> None:
    token = tmp_path / "the token"
    token.write_text(TOKEN)
    flags = f"--api-keys-file {keys_file(tmp_path)} --control-token-file '{token}'"
    worker = f"--control-token-file '{token}'"
    with Launcher(
        tmp_path,
        *("--gateway-flags", flags, "--worker-flags", worker, "--admin-port", str(free_ports(1)[0])),
        env={"ROOTSTOCK_API_KEY": key},
    ) as launcher:
        text = launcher.read_until(LAST)
        if key:
            assert "  17 + 25 = 42.\n" in text
        else:
            assert "(no first request: the gateway requires an API key. Set ROOTSTOCK_API_KEY to a key.)" in text
        assert f"# with ROOTSTOCK_API_KEY set to an API key of {tmp_path}/keys.json" in text
        assert "3, 4, 5, 6, 7, 8, 9" in str(answer_of(launcher, {"ROOTSTOCK_API_KEY": KEY}))
        admin = next(line.removeprefix("  admin API ").strip() for line in text.splitlines() if line.startswith("  admin API "))
        assert "worker-0" in paste(admin)
        assert KEY not in text and TOKEN not in text, "the output must contain neither the API key nor the token"


@pytest.mark.needs("openssl")
@pytest.mark.parametrize(("name", "trust"), [("", "--cacert"), ("elsewhere.example", "--insecure")], ids=["this host", "another"])
def test_printed_command_trusts_the_certificate_when_the_gateway_has_tls(name: str, trust: str, tmp_path: Path) -> None:
    flags = tls_flags(tmp_path, name) if name else own_certificate(tmp_path)
    with Launcher(tmp_path, *flags) as launcher:
        text = launcher.read_until(LAST)
        assert "  17 + 25 = 42.\n" in text and f"  API          https://127.0.0.1:{launcher.port}/v1" in text
        assert trust in launcher.curl()
        assert "3, 4, 5, 6, 7, 8, 9" in str(answer_of(launcher))


def own_certificate(folder: Path) -> list[str]:
    """Returns TLS flags with a self-signed certificate for 127.0.0.1, created by the command that users type."""
    files = (
        "-keyout",
        f"{folder}/tls.key",
        "-out",
        f"{folder}/tls.crt",
        "-subj",
        "/CN=me",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    )
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files], check=True, capture_output=True, timeout=60
    )
    return ["--gateway-flags", f"--tls-cert-file {folder}/tls.crt --tls-key-file {folder}/tls.key"]


def test_printed_command_requests_an_embedding_when_the_model_has_no_lm_head(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "vectors"))
    vectors_of(folder)
    with Launcher(tmp_path, "--model", str(folder)) as launcher:
        assert "  an embedding of 256 numbers\n" in launcher.read_until(LAST)
        assert len(answer_of(launcher)["data"][0]["embedding"]) == 256  # type: ignore[index]


def test_printed_command_requests_a_completion_when_the_model_has_no_chat_template(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "base"))
    without_template(folder)
    with Launcher(tmp_path, "--model", str(folder)) as launcher:
        assert "  The capital of France is\n" in launcher.read_until(LAST)
        assert answer_of(launcher)["object"] == "text_completion"


def test_make_run_converts_and_serves_a_llama_with_only_tokenizer_model(tmp_path: Path) -> None:
    folder = sentencepiece_model(tmp_path / "tokenizer.model").rename(tmp_path.with_name(f"{tmp_path.name}-llama"))
    pieces = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    sizes = {"vocab_size": pieces.vocab_size(), "bos_token_id": pieces.bos_id(), "eos_token_id": pieces.eos_id()}
    model = TinyModel("Llama", sizes).build(folder)
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    prompt = [pieces.bos_id(), *pieces.encode("Hello, world!")]
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    tmp_path.mkdir()
    try:
        with Launcher(tmp_path, "--model", str(folder), "--dtype", "float32") as launcher:
            text = launcher.read_until(LAST)
            body = {"text": "Hello, world!", "sampling_params": sampling}
            answer = httpx.post(f"http://127.0.0.1:{launcher.port}/generate", json=body, timeout=60).json()
    finally:
        for made in (ROOT / "build" / "models").glob(f"{folder.name}-*"):
            shutil.rmtree(made)
    assert f"converting the tokenizer of {folder} (tokenizer.model)" in text
    assert answer["meta_info"]["prompt_tokens"] == len(prompt)
    assert [answer["output_ids"]] == greedy_answers(model, [prompt], 8)


def test_start_fails_with_one_sentence_when_the_model_does_not_fit_into_memory(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "large"))
    size = 1 << 43  # bytes of a sparse file
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    with Launcher(tmp_path, "--model", str(folder)) as launcher:
        text = launcher.read_all()
    assert launcher.process.returncode == 1 and text.count("\n") == 1
    assert text.startswith(f"cannot serve: {folder}: the weights take 8796.09 GB for each of 1 workers, and ")


def test_output_reports_the_slowdown_and_the_missing_package_when_no_compiler_is_installed(tmp_path: Path) -> None:
    """Runs a checkout without compiled kernels on a PATH without a compiler."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for path in ROOT.iterdir():
        if path.name != "build":
            (checkout / path.name).symlink_to(path)
    env = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with Launcher(tmp_path, "--workers", "2", env=env, checkout=checkout) as launcher:
        text = launcher.read_until(LAST)
    (line,) = [line for line in text.splitlines() if "compiler" in line]
    assert line.endswith(
        "the model runs on torch's own kernels, 2 to 7 times slower than on C++ kernels: no C++ compiler (g++, c++, clang++) is"
        " installed; on Debian or Ubuntu install build-essential"
    )
    assert "  17 + 25 = 42.\n" in text


@pytest.mark.parametrize("setting", ["log-dir", "state-dir"])
def test_start_fails_with_one_sentence_when_a_folder_cannot_be_created(setting: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Launcher(tmp_path, after=(f"--{setting}", str(tmp_path / "file"))) as launcher:
        text = launcher.read_all()
    assert launcher.process.returncode == 1
    assert text == (
        f"cannot serve: --{setting} {tmp_path}/file/{launcher.port} cannot be created: not a directory; choose another folder\n"
    )
