"""Every setting has a help text, `--help` and the configuration page list every setting, and wrong flags end with status 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic_settings import BaseSettings

from rootstock_llm.services.local import models_reference
from rootstock_llm.services.local.reference import SERVICES, render

ROOT = Path(__file__).resolve().parents[2]
LINES = ("--help", "--port ninety", "--log-levle info", "--config /no/such/file.yaml")
COMMAND_LINES = """
import contextlib, io, json, runpy, sys
names, lines = json.loads(sys.argv[1])
runs = {name: {} for name in names}
for name in names:
    for line in lines:
        out, err, sys.argv[1:] = io.StringIO(), io.StringIO(), line
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_module(f"rootstock_llm.services.{name}", run_name="__main__", alter_sys=True)
            except SystemExit as end:
                runs[name][" ".join(line)] = {"status": end.code or 0, "stdout": out.getvalue(), "stderr": err.getvalue()}
print(json.dumps(runs))
"""


@pytest.mark.by_day(one_in=2, seed=1)
@pytest.mark.parametrize("name", SERVICES)
def test_every_setting_has_a_help_text(name: str) -> None:
    for field, info in SERVICES[name].model_fields.items():
        assert info.description and info.description.endswith((".", ")")), f"{name}.{field}"


@pytest.mark.by_day(one_in=3, seed=21)
@pytest.mark.parametrize(("name", "cls"), SERVICES.items())
def test_settings_are_frozen_and_refuse_unknown_names(name: str, cls: type[BaseSettings]) -> None:
    assert cls.model_config.get("frozen") and cls.model_config.get("extra") == "forbid"


def test_configuration_page_is_up_to_date() -> None:
    assert (ROOT / "docs/reference/configuration.md").read_text() == render(), "run `make docs`"


@pytest.fixture(scope="module")
def command_outputs() -> dict[str, dict[str, Any]]:
    """Output of `python -m rootstock_llm.services.NAME`, by service and command line. One process runs all command lines."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND_LINES, json.dumps([list(SERVICES), [line.split() for line in LINES]])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return runs


@pytest.mark.parametrize("name", SERVICES)
def test_help_text_lists_every_flag(name: str, command_outputs: dict[str, dict[str, Any]]) -> None:
    result = command_outputs[name]["--help"]
    assert result["status"] == 0, result["stderr"]
    for field in SERVICES[name].model_fields:
        assert f"--{field.replace('_', '-')}" in result["stdout"]


@pytest.mark.by_day(one_in=2, seed=1)
@pytest.mark.parametrize("name", SERVICES)
def test_service_exits_with_status_2_for_a_wrong_flag(name: str, command_outputs: dict[str, dict[str, Any]]) -> None:
    result = command_outputs[name]["--port ninety"]
    assert result["status"] == 2
    assert "port" in result["stderr"] and "Traceback" not in result["stderr"]


@pytest.mark.parametrize("name", SERVICES)
def test_error_suggests_the_nearest_flag_when_a_flag_is_unknown(name: str, command_outputs: dict[str, dict[str, Any]]) -> None:
    result = command_outputs[name]["--log-levle info"]
    assert result["status"] == 2 and result["stderr"].count("\n") == 1
    assert "unknown flag --log-levle; did you mean --log-level?" in result["stderr"]


@pytest.mark.parametrize("name", SERVICES)
def test_error_names_the_configuration_file_when_the_file_is_missing(
    name: str, command_outputs: dict[str, dict[str, Any]]
) -> None:
    result = command_outputs[name]["--config /no/such/file.yaml"]
    assert result["status"] == 2 and result["stderr"].count("\n") == 1
    assert "--config /no/such/file.yaml is not readable: no such file or directory." in result["stderr"]


def test_models_page_is_up_to_date() -> None:
    page = models_reference.PAGE.read_text()
    assert "Qwen3ForCausalLM" in page and page == models_reference.render(page), "run `make docs`"
