"""The GPU benchmarks at toy size on a CPU: each runs and reports the figures that its targets need."""

from __future__ import annotations

import gzip
import importlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.night import NIGHTLY

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the import of triton, which reads it

from tests.benchmarks.gpu.attention_batches import (
    EAGER_KINDS,
    StepBatch,
    distance,
    flashinfer_work,
    tensors_of,
    torch_work,
    triton_work,
)
from tests.benchmarks.gpu.attention_kernels import measure_batch
from tests.benchmarks.gpu.command import Setting
from tests.benchmarks.gpu.gemms import reduced_precision
from tests.benchmarks.gpu.journal import Journal
from tests.benchmarks.gpu.models import Wanted, serving_of
from tests.benchmarks.gpu.profile import Event, profile_of, short_name
from tests.benchmarks.gpu.serving import Timing
from tests.benchmarks.gpu.versus_transformers import workloads
from tests.benchmarks.gpu.workloads import fixed, nano, shared_prefix
from tests.exec.flashinfer_double import Library
from tests.gpu.parts import BENCHMARK, all_parts
from tests.gpu.report import _tables
from tests.gpu.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    part.name: part.command[1] for part in all_parts(ROOT) if part.kind == BENCHMARK and part.command[1].startswith("tests.")
}
BY_NIGHT = ("bench-versus-transformers", "bench-overlap", "bench-graphs")  # benchmarks that take seconds, so run only by night
NOT_IN_TOYS = ("qwen3-8b", "prompts")  # toy runs lack figures whose names begin so; bench-throughput lacks none


def toy(name: str, out: Path) -> dict[str, Any]:
    module = importlib.import_module(MODULES[name])
    assert module.main(["--device", "cpu", "--toy", "--out", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.by_day(one_in=4, seed=10)
@pytest.mark.parametrize("name", [name for name in MODULES if NIGHTLY or name not in BY_NIGHT])
def test_benchmark_reports_figures_and_profiles(name: str, tmp_path: Path) -> None:
    outcome = toy(name, tmp_path / "out.json")
    assert outcome["how"] and outcome["figures"] and not outcome["failed"]
    for table in _tables(outcome):
        assert table["rows"] and all(len(row) == len(table["columns"]) for row in table["rows"]), table["title"]
    assert all(figure["value"] >= 0 for figure in outcome["figures"].values())
    targets = [target for target in TARGETS if target.part == name]
    for target in targets:
        known = name == "bench-throughput" or not target.figure.startswith(NOT_IN_TOYS)
        assert not known or target.figure in outcome["figures"], target.figure
    for profile in outcome["profiles"].values():
        assert 0 <= profile["idle_share"] < 1 and profile["kernels"] and profile["events"] > 0
    traces = sorted(tmp_path.glob("out.*.trace.json.gz"))
    assert len(traces) == len(outcome["profiles"])
    for trace in traces:
        assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert not targets or outcome["profiles"], "a benchmark with targets must store profiles"


def test_timing_separates_prefill_and_decode() -> None:
    """Prefill takes three steps, because the third request gets its first token in the third step."""
    timing = Timing(
        seconds=10.0, last_first_s=4.0, marks=[(1.0, 1), (2.0, 2), (4.0, 3), (4.5, 6), (5.0, 9), (7.0, 12), (10.0, 15)]
    )
    assert timing.decode_step_s(2) == (0.5, 2.5)
    setting = Setting("cpu", toy=True)
    with serving_of(Wanted("qwen3-8b", 2, 40), setting) as model:
        config = model.serving.core.config
        assert config.adaptive_chunk_rows == config.adaptive_chunk_s == 0, "chunks must not depend on decode rows or time"
        taken = model.serving.run(fixed(2, 10, 4, model.vocab, seed=0))
    tokens_then = next(count for at, count in taken.marks if at == taken.last_first_s)
    assert 0 < taken.last_first_s < taken.seconds and 2 <= tokens_then < 8


def test_workloads_against_transformers_are_sorted_by_output_length() -> None:
    """Short workloads run first, so that they are measured if the benchmark exceeds its time limit."""
    tokens = [workload.output_tokens for workload in workloads(Setting("cpu", toy=False), 100, seed=0).values()]
    assert tokens == sorted(tokens) and len(tokens) == 3


def test_attention_kernels_give_equal_results(tmp_path: Path) -> None:
    """Runs the double of FlashInfer, and Triton in its interpreter."""
    library, setting = Library(torch.device("cpu")), Setting("cpu", toy=True)
    ours = (triton_work, partial(triton_work, splits=2))
    for heads, starts, count, kinds in (
        (4, (8, 30, 2), 1, [*EAGER_KINDS, "flashinfer fa2, graph"]),
        (2, (8, 30, 2), 1, ["flashinfer decode, graph"]),
        (4, (0, 9), 5, list(EAGER_KINDS)),
    ):
        batch = StepBatch("toy", heads, 1, 64, 4, starts, count)
        made = dict(zip(("triton", "triton, 2 splits"), ours[: 3 - min(count, 2)], strict=False))
        made |= {kind: partial(flashinfer_work, kind=kind, module=library) for kind in kinds}
        expected = tensors_of(batch, torch.device("cpu"), torch.float16)
        torch_work(expected)()
        for name, make in made.items():
            with library.ledger:
                step = tensors_of(batch, torch.device("cpu"), torch.float16)
                make(step)()
            assert distance(step.out, expected.out) < 0.01, name
    journal = Journal("as it is", tmp_path / "out.json")
    wrong = {"right": torch_work, "wrong": lambda step: lambda: step.out.fill_(9.0)}
    measure_batch(StepBatch("toy", 2, 1, 64, 4, (3,)), wrong, setting, journal)
    assert list(journal.figures) == ["toy, page 4, right"] and "outputs differ" in journal.notes[0]


def test_reduced_precision_setting_is_restored_after_use() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    for allowed in (True, False):
        with reduced_precision(allowed):
            assert matmul.allow_bf16_reduced_precision_reduction is allowed
        assert matmul.allow_bf16_reduced_precision_reduction == before


def test_profile_separates_idle_time_inside_and_between_launches() -> None:
    """The trace has events of two streams. Launch 3 has two kernels with a gap between them."""
    events = [
        Event("a", 0.0, 10.0, 1),
        Event("copy", 4.0, 12.0, 2),
        Event("b", 15.0, 20.0, 3),
        Event("b", 21.0, 30.0, 3),
        Event("a", 30.0, 40.0, 4),
    ]
    profile = profile_of(events, steps=2)
    assert (profile.span_us, profile.busy_us) == (40.0, 36.0)
    assert profile.idle_share == pytest.approx(3 / 40)
    assert profile.idle_in_graphs_share == pytest.approx(1 / 40)
    assert (profile.launches, profile.events, profile.gaps_us) == (4, 5, [3.0])
    assert profile.kernels[0] == ("a", pytest.approx(20 / 42), 1.0, 10.0)
    with pytest.raises(RuntimeError, match="no device events"):
        profile_of([], steps=1)


def test_names_of_kernels_are_shortened() -> None:
    assert short_name("void at::native::vectorized<4, Foo>(int, float)") == "at::native::vectorized"
    assert short_name("_decode_kernel") == "_decode_kernel"
    assert len(short_name("k" * 300)) == 80


def test_workloads_have_the_stated_lengths_and_prefixes() -> None:
    first, again = nano(256, 100, 1024, 151_000), nano(256, 100, 1024, 151_000)
    assert [p.tolist() for p in first.prompts] == [p.tolist() for p in again.prompts]
    lengths = [len(prompt) for prompt in first.prompts] + list(first.new_tokens)
    assert min(lengths) >= 100 and max(lengths) <= 1024 and len(set(lengths)) > 100
    one, other = shared_prefix(2, 30, 4, 1, 500, seed=1), shared_prefix(2, 30, 4, 1, 500, seed=1, ending=1)
    assert one.prompts[0][:30].tolist() == one.prompts[1][:30].tolist() == other.prompts[0][:30].tolist()
    assert one.prompts[0].tolist() != other.prompts[0].tolist() != other.prompts[1].tolist()
