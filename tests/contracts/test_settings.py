"""Settings are documented, and --help, environment and page say the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

from services.local.reference import SERVICES, render

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", SERVICES)
def test_every_field_has_a_help_text(name: str) -> None:
    for field, info in SERVICES[name].model_fields.items():
        assert info.description and info.description.endswith((".", ")")), f"{name}.{field}"


@pytest.mark.parametrize(("name", "cls"), SERVICES.items())
def test_settings_are_frozen_and_refuse_what_they_do_not_know(name: str, cls: type[BaseSettings]) -> None:
    assert cls.model_config.get("frozen") and cls.model_config.get("extra") == "forbid"


def test_the_configuration_page_is_what_the_classes_say() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == render(), "run `make docs`"


@pytest.mark.parametrize("name", SERVICES)
def test_help_names_every_flag(name: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", f"services.{name}", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    for field in SERVICES[name].model_fields:
        assert f"--{field.replace('_', '-')}" in result.stdout


@pytest.mark.parametrize("name", SERVICES)
def test_a_wrong_flag_is_one_line_and_status_2(name: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", f"services.{name}", "--port", "ninety"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "port" in result.stderr and "Traceback" not in result.stderr
