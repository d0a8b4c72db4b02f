"""Tests of the settings file of --config: precedence, values, refusals, and each service as a process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from pydantic_settings import BaseSettings

from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.local.ports import HOST, free_ports
from rootstock_llm.services.local.reference import SERVICES
from rootstock_llm.services.local.settings import LocalSettings
from rootstock_llm.services.shared.settings import WRONG_SETTINGS, load
from rootstock_llm.services.worker.settings import WorkerSettings
from tests.services.test_processes import DEMO, wait_serving

ROOT = Path(__file__).resolve().parents[3]
SECRET = "sesame-4711"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


def by_file(cls: type[BaseSettings], file: Path, text: str, *flags: str) -> dict[str, object]:
    file.write_text(text)
    return load(cls, "test", ["--config", str(file), *flags]).model_dump()


def refusal(file: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the line that refuses a file, without the program and the path."""
    file.write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        load(GatewaySettings, "test", ["--config", str(file)])
    printed = capsys.readouterr().err
    assert caught.value.code == WRONG_SETTINGS and printed.count("\n") == 1 and printed.startswith("test: "), printed
    assert SECRET not in printed
    return printed.removeprefix("test: ").replace(f"--config {file}", "FILE").strip()


def test_settings_file_accepts_setting_names_with_hyphens_and_with_underscores(file: Path) -> None:
    values = by_file(GatewaySettings, file, "max-body-bytes: 7\nmax_concurrent_requests: 9\n")
    assert (values["max_body_bytes"], values["max_concurrent_requests"]) == (7, 9)


def test_environment_overrides_the_settings_file_and_flags_override_both(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOTSTOCK_ADMIN_PORT", "2")
    monkeypatch.setenv("ROOTSTOCK_PEER_PORT", "2")
    values = by_file(GatewaySettings, file, "metrics-port: 1\nadmin-port: 1\npeer-port: 1", "--peer-port", "3")
    assert (values["metrics_port"], values["admin_port"], values["peer_port"]) == (1, 2, 3)
    assert values["health_port"] == 7000, "the default"


def test_flag_with_the_default_value_overrides_the_settings_file(file: Path) -> None:
    assert by_file(GatewaySettings, file, "health-port: 1", "--health-port", "7000")["health_port"] == 7000


def test_path_of_the_settings_file_can_come_from_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("port: 81")
    monkeypatch.setenv("ROOTSTOCK_CONFIG", str(file))
    assert load(GatewaySettings, "test", []).port == 81
    file.write_text("workers: 3\nworker_flags: --enable-mixed-chunk")
    monkeypatch.setenv("ROOTSTOCK_LOCAL_CONFIG", str(file))
    assert load(LocalSettings, "test", []).workers == 3


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("workers: [a:1, b:2]", "workers", ("a:1", "b:2")),
        ("workers: a:1,b:2", "workers", ("a:1", "b:2")),
        ("control-token: 0123", "control_token", "0123"),
        ("control-token: no", "control_token", "no"),
        ("model-name: 1.10", "model_name", "1.10"),
        ("playground: yes", "playground", True),
        ("playground: 'false'", "playground", False),
        ("redis-url:", "redis_url", ""),
        ("redis-url: null", "redis_url", ""),
        ("routing-policy: random", "routing_policy", "random"),
        ("keep-alive-s: 80  # seconds", "keep_alive_s", 80),
        ("cors-allow-origins: []", "cors_allow_origins", ()),
    ],
    ids=["list", "commas", "zeros", "word", "decimal", "yes", "quoted", "empty", "null", "choice", "comment", "empty list"],
)
def test_values_in_the_settings_file_are_read_like_environment_variables(
    line: str, field: str, value: object, file: Path
) -> None:
    assert by_file(GatewaySettings, file, line)[field] == value


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "\ufeffport: 8000\n", "{}"], ids=["empty", "comment", "BOM", "braces"])
def test_defaults_apply_when_the_settings_file_is_empty(text: str, file: Path) -> None:
    assert by_file(GatewaySettings, file, text)["port"] == 8000


def test_example_on_the_configuration_page_is_a_valid_settings_file(file: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/reference/configuration.md").read_text(), re.DOTALL)
    assert by_file(GatewaySettings, file, example)["workers"] == ("10.0.0.5:7003", "10.0.0.6:7003")


def test_settings_file_sets_the_settings_of_a_worker(file: Path) -> None:
    text = "model: models/demo\nmax-running-requests: 4\nenable-mixed-chunk: true\nchunked_prefill_size: 64"
    values = by_file(WorkerSettings, file, text)
    names = ("model", "max_running_requests", "enable_mixed_chunk", "chunked_prefill_size")
    assert [values[name] for name in names] == ["models/demo", 4, True, 64]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "max-concurent-requests: 1",
            "FILE: max-concurent-requests is not a setting of this program; did you mean max-concurrent-requests?",
        ),
        (
            "max_concurent_requests: 1",
            "FILE: max_concurent_requests is not a setting of this program; did you mean max_concurrent_requests?",
        ),
        ("frobnicate: 1", "FILE: frobnicate is not a setting of this program; --help lists the settings."),
        ("config: other.yaml", "FILE: config is not a setting of this program; --help lists the settings."),
        ("gateway:\n  port: 1", "FILE: gateway is not a setting of this program; --help lists the settings."),
        ("redis:\n  url: a", "FILE: redis is not a setting of this program; did you mean redis_url?"),
        (f"port: {{a: {SECRET}}}", "FILE: port has nested values; write text, a number, true, false, or a list of texts."),
        ("workers: [[a:1]]", "FILE: workers has nested values; write text, a number, true, false, or a list of texts."),
        ("port: &a [*a]", "FILE: port has nested values; write text, a number, true, false, or a list of texts."),
        ("port: 1\nport: 2", "FILE has port twice; remove one."),
        ("max-body-bytes: 1\nmax_body_bytes: 1", "FILE has max_body_bytes twice; remove one."),
        ("? [a]\n: 1", "FILE has a key at line 1 that is not the name of a setting."),
        ("- port", "FILE is not a mapping; write `name: value`, one per line."),
        (SECRET, "FILE is not a mapping; write `name: value`, one per line."),
        ("port: 1\n---\nport: 2", "FILE is not YAML at line 2, column 1; quote values that begin with a special character."),
        (f"control-token: *{SECRET}", "FILE is not YAML at line 1, column 16; quote values that begin with a special character."),
        ("[" * 5000, "FILE is not YAML; quote values that begin with a special character."),
        (b"\xff\xfe\xfa", "FILE is not UTF-8 text."),
        (f"port: {SECRET}", "port in FILE: Input should be a valid integer, unable to parse string as an integer"),
        ("port: [1]", "port in FILE: Input should be a valid integer"),
        ("port: -1", "port in FILE: Input should be greater than or equal to 0"),
        ("playground: perhaps", "playground in FILE: Input should be a valid boolean, unable to interpret input"),
        ("port: !!python/object/apply:os.getpid []", "port in FILE: Input should be a valid integer"),
    ],
    ids=lambda value: None,
)
def test_invalid_settings_file_is_refused_in_one_sentence(
    content: str | bytes, sentence: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(file, content if isinstance(content, bytes) else content.encode(), capsys) == sentence


def test_folder_in_place_of_the_settings_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(GatewaySettings, "test", ["--config", str(tmp_path)])
    assert capsys.readouterr().err == f"test: --config {tmp_path} is not readable: is a directory.\n"


@pytest.mark.parametrize("name", SERVICES)
def test_settings_file_accepts_each_setting_as_a_key(name: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The value "x" is invalid for many settings. load() must then refuse the value and not the key."""
    for field in set(SERVICES[name].model_fields) - {"config"}:
        file.write_text(f"{field.replace('_', '-')}: x")
        try:
            load(SERVICES[name], "test", ["--config", str(file)])
        except SystemExit:
            assert "is not a setting" not in capsys.readouterr().err


@pytest.mark.parametrize(("service", "lines"), [("tokenizer", ""), ("detokenizer", ""), ("worker", "executor: fake\n")])
def test_service_listens_on_the_port_in_the_settings_file(service: str, lines: str, file: Path) -> None:
    port, metrics_port = free_ports(2)
    file.write_text(f"model: {DEMO}\nport: {port}\nmetrics-port: {metrics_port}\n{lines}")
    process = subprocess.Popen([sys.executable, "-m", f"rootstock_llm.services.{service}", "--config", str(file)], cwd=ROOT)
    try:
        with grpc.insecure_channel(f"{HOST}:{port}") as channel:
            wait_serving(health_pb2_grpc.HealthStub(channel), service)
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_gateway_does_not_log_the_control_token_in_the_settings_file(file: Path) -> None:
    port, health_port = free_ports(2)
    file.write_text(f"port: {port}\nhealth-port: {health_port}\ncontrol-token: {SECRET}\nlog-level: debug\n")
    argv = [sys.executable, "-m", "rootstock_llm.services.gateway", "--config", str(file)]
    process = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        with grpc.insecure_channel(f"{HOST}:{health_port}") as channel:
            grpc.channel_ready_future(channel).result(60)
    finally:
        process.terminate()
        output = "".join(process.communicate(timeout=60))
    assert process.returncode == 0 and str(file) in output and SECRET not in output


def test_local_system_does_not_start_when_the_settings_file_is_invalid(file: Path) -> None:
    file.write_text("workers: 0")
    argv = [sys.executable, "-m", "rootstock_llm.services.local", "--config", str(file)]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    refused = f"cannot serve: local refuses its settings: workers in --config {file}: Input should be greater than or equal to 1."
    assert ended.returncode == WRONG_SETTINGS and refused in ended.stderr
