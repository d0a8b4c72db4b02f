"""Checks time models: fits recover the coefficients of the timings, and files are validated."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from rootstock_llm.services.sim.core import __main__ as cli
from rootstock_llm.services.sim.core.run.time_models import (
    PRESETS,
    MeasureShape,
    StepTiming,
    fit_time_model,
    load_time_model,
    measure,
    nonnegative_least_squares,
    read_timings,
    time_model_json,
    write_timings,
)
from rootstock_llm.services.worker.exec.fake import FakeExecutor, TimeModel
from tests.core.deployed_config import deployed_config

TRUE = TimeModel(base=3e-3, per_prefill_token=4e-5, per_row=2e-5, per_context_token=5e-8)


def timings_of(model: TimeModel, noise: float = 0.0) -> list[StepTiming]:
    rng = np.random.default_rng(0)
    out = []
    for rows, prefill, context in itertools.product((1, 4, 16, 64), (0, 32, 512), (100, 1000, 5000)):
        exact = model.base + model.per_prefill_token * prefill + model.per_row * rows + model.per_context_token * context * rows
        out.append(StepTiming(prefill, rows, context * rows, exact * (1 + noise * rng.standard_normal())))
    return out


def coefficients(model: TimeModel) -> list[float]:
    return [model.base, model.per_prefill_token, model.per_row, model.per_context_token]


def test_fit_recovers_coefficients_of_exact_timings() -> None:
    fit = fit_time_model(timings_of(TRUE))
    assert coefficients(fit.model) == pytest.approx(coefficients(TRUE), rel=1e-6)
    assert fit.r2 == pytest.approx(1.0) and fit.residual_p99 < 1e-6 and fit.steps == 36


def test_fit_tolerates_noise_of_three_percent() -> None:
    fit = fit_time_model(timings_of(TRUE, noise=0.03))
    assert coefficients(fit.model) == pytest.approx(coefficients(TRUE), rel=0.15)
    assert 0.005 < fit.residual_p50 < 0.05 and fit.r2 > 0.95


def test_fit_gives_a_coefficient_near_zero_for_work_that_takes_no_time() -> None:
    free = TimeModel(base=3e-3, per_prefill_token=4e-5, per_row=0.0, per_context_token=5e-8)
    fit = fit_time_model(timings_of(free, noise=0.02))
    assert min(coefficients(fit.model)) >= 0
    assert fit.model.per_row < 2e-6


def test_nonnegative_least_squares_returns_zero_when_free_solution_is_negative() -> None:
    a = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    b = np.array([3.0, 2.0, 1.0])
    assert np.linalg.lstsq(a, b, rcond=None)[0][1] < 0
    assert nonnegative_least_squares(a, b).tolist() == pytest.approx([2.0, 0.0])


def test_fit_rejects_too_few_timings() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit_time_model(timings_of(TRUE)[:3])


def test_timings_are_read_back_from_a_file_and_an_error_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "timings.jsonl"
    write_timings(path, timings_of(TRUE))
    assert read_timings(path) == timings_of(TRUE)
    path.write_text('{"rows": 1}\n')
    with pytest.raises(ValueError, match="line 1"):
        read_timings(path)


def test_every_field_of_a_time_model_is_read_back_from_its_file(tmp_path: Path) -> None:
    values = {name: kind(2 + number) for number, (name, kind) in enumerate(get_type_hints(TimeModel).items())}
    assert values.keys() == {field.name for field in fields(TimeModel)}
    path = tmp_path / "model.json"
    path.write_text(json.dumps(values))
    model = load_time_model(str(path))
    assert [(name, type(value), value) for name, value in asdict(model).items()] == [
        (name, type(value), value) for name, value in values.items()
    ]
    path.write_text(time_model_json(model))
    assert load_time_model(str(path)) == model


def test_name_of_a_preset_loads_the_preset_time_model() -> None:
    assert load_time_model("zero") == PRESETS["zero"] == TimeModel()


@pytest.mark.by_day(one_in=5, seed=4)
@pytest.mark.parametrize("text", ['{"slope": 1}', "[]", '{"base": -1}', '{"base": "1"}', "nonsense"])
def test_invalid_time_model_files_are_rejected(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(text) if text == "nonsense" else text)
    with pytest.raises(ValueError, match="model"):
        load_time_model(str(path))


def test_measured_timings_cover_prefill_and_batch_sizes_and_context_lengths() -> None:
    config = deployed_config(
        num_pages=512,
        page_size=4,
        context_len=256,
        vocab_size=1000,
        max_running_requests=8,
        chunked_prefill_size=32,
        max_extend_steps=0,
    )
    executor = FakeExecutor(512, 4, 8, config.max_pages_per_request, 1000)
    timings = measure(executor, config, MeasureShape(batches=(1, 8), prompts=(16, 100), output=6), lambda: 0.0)
    assert all(timing.seconds > 0 for timing in timings)
    assert {1, 8} <= {timing.rows for timing in timings if not timing.prefill_tokens}
    assert max(timing.prefill_tokens for timing in timings) == 32
    assert max(timing.context_tokens for timing in timings) == 8 * 105
    assert len(timings) > 20


def test_fit_command_measures_and_fits_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.exec.tiny_models import MODELS  # imports torch, which only this test needs

    MODELS["qwen3"].build(tmp_path)
    sizes = ["--batches", "1,4", "--prompts", "16,64", "--output", "8", "--num-threads", "1", "--dtype", "float32"]
    kept = tmp_path / "timings.jsonl"
    assert cli.main(["fit", str(tmp_path), *sizes, "--save-timings", str(kept)]) == 0
    printed = capsys.readouterr()
    model = json.loads(printed.out)
    assert min(model.values()) >= 0 < sum(model.values())
    assert len(read_timings(kept)) == json.loads(printed.err.splitlines()[-1])["steps"] > 20


def test_measurement_rejects_sizes_that_do_not_fit_into_the_pool() -> None:
    config = deployed_config(num_pages=8, page_size=4, context_len=32, vocab_size=1000, max_running_requests=8)
    executor = FakeExecutor(8, 4, 8, config.max_pages_per_request, 1000)
    with pytest.raises(ValueError, match="fit"):
        measure(executor, config, MeasureShape(batches=(4,), prompts=(64,)), lambda: 0.0)
