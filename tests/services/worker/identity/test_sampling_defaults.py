"""Tests of sampling defaults: the operator's value, otherwise the model's, otherwise the API's."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.services.shared.sampling_parameters import API_DEFAULTS, SamplingDefaults
from rootstock_llm.services.shared.settings import load
from rootstock_llm.services.worker.front.wire import ModelLimits, sampling_from_pb
from rootstock_llm.services.worker.identity.sampling_defaults import FILE, sampling_defaults
from rootstock_llm.services.worker.settings import WorkerSettings

QWEN = {"do_sample": True, "max_new_tokens": 99, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [2]}


def folder(tmp_path: Path, content: Any) -> Path:
    (tmp_path / FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def test_operators_defaults_override_the_models_and_the_models_override_the_apis(tmp_path: Path) -> None:
    model = folder(tmp_path, QWEN)
    assert sampling_defaults(model, True, "") == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    preferred = '{"temperature": 0.2, "min_p": 0.1}'
    assert sampling_defaults(model, True, preferred) == SamplingDefaults(0.2, 0.95, 20, 0.1)
    assert sampling_defaults(model, False, preferred) == SamplingDefaults(temperature=0.2, min_p=0.1)
    assert sampling_defaults(model, False, "") == API_DEFAULTS
    assert sampling_defaults(tmp_path / "none", True, "") == API_DEFAULTS


@pytest.mark.parametrize("temperature", [None, 0.6, -1])
def test_default_temperature_is_0_when_the_model_disables_sampling(tmp_path: Path, temperature: Any) -> None:
    model = folder(tmp_path, {"do_sample": False, "temperature": temperature, "top_k": 50})
    assert sampling_defaults(model, True, "") == SamplingDefaults(temperature=0.0, top_k=50)
    assert sampling_defaults(model, True, '{"temperature": 0.3}') == SamplingDefaults(temperature=0.3, top_k=50)
    assert sampling_defaults(model, False, "") == API_DEFAULTS


@pytest.mark.parametrize("do_sample", [True, None, 0, "false"])
def test_default_temperature_is_the_value_of_the_file_when_do_sample_is_not_false(tmp_path: Path, do_sample: Any) -> None:
    model = folder(tmp_path, {"do_sample": do_sample, "temperature": 0.6})
    assert sampling_defaults(model, True, "") == SamplingDefaults(temperature=0.6)


def test_demo_model_is_greedy_when_no_temperature_is_set() -> None:
    assert sampling_defaults(Path("models/demo"), True, "").temperature == 0


def test_invalid_values_of_the_model_are_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = {"top_p": -0.5, "top_k": True, "min_p": "0.1", "repetition_penalty": 1.25, "temperature": 10**400}
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults(folder(tmp_path, content), True, "") == SamplingDefaults(repetition_penalty=1.25)
    assert {record.fields["name"] for record in caplog.records} == {"top_p", "top_k", "min_p", "temperature"}  # type: ignore[attr-defined]
    assert sampling_defaults(folder(tmp_path, {"top_k": 0, "min_p": None}), True, "") == API_DEFAULTS


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000], ids=["cut off", "a list", "nested"])
def test_error_names_a_malformed_generation_config_file(tmp_path: Path, content: str) -> None:
    with pytest.raises(ValueError, match=FILE):
        sampling_defaults(folder(tmp_path, content), True, "")


@pytest.mark.parametrize(
    "text", ["{", "5", '{"max_new_tokens": 5}', '{"top_p": 2}', '{"top_k": 2.0}', '{"temperature": NaN}', '{"min_p": null}']
)
def test_invalid_operator_value_ends_the_process_with_status_2(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load(WorkerSettings, "rootstock-worker", ["--preferred-sampling-params", text])
    assert end.value.code == 2 and "preferred_sampling_params" in capsys.readouterr().err


def test_worker_applies_the_defaults_when_a_request_has_no_values() -> None:
    defaults = SamplingDefaults(0.5, 0.75, 20, 0.25, 1.25)
    model = ModelLimits(100, 1000, False, defaults=defaults, stream_interval=8)

    def params_of(**values: Any) -> Any:
        return sampling_from_pb(pb.SamplingParams(**values), 3, False, model, 1)

    params = params_of()
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (
        0.5,
        0.75,
        20,
        0.25,
        1.25,
    )
    assert params.stream_interval == 8
    own = params_of(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, stream_interval=1)
    assert (own.temperature, own.top_p, own.top_k, own.min_p, own.repetition_penalty) == (0, 1, -1, 0, 1)
    assert own.stream_interval == 1
