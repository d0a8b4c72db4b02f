"""Each GPU benchmark at toy size on a CPU: it runs, counts its tokens, and names the figures that targets ask for."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.gpu.profile import Event, profile_of, short_name
from tests.benchmarks.gpu.workloads import nano, shared_prefix
from tests.gpu.parts import BENCHMARK, all_parts
from tests.gpu.report import _tables
from tests.gpu.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    part.name: part.command[1] for part in all_parts(ROOT) if part.kind == BENCHMARK and part.command[1].startswith("tests.")
}
NOT_IN_TOYS = ("qwen3-8b", "prompts")  # shapes and workloads that a toy run leaves out; throughput has its own


def toy(name: str, out: Path) -> dict[str, Any]:
    module = importlib.import_module(MODULES[name])
    assert module.main(["--device", "cpu", "--toy", "--out", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("name", MODULES)
def test_it_runs(name: str, tmp_path: Path) -> None:
    outcome = toy(name, tmp_path / "out.json")
    assert outcome["how"] and outcome["figures"]
    for table in _tables(outcome):
        assert table["rows"] and all(len(row) == len(table["columns"]) for row in table["rows"]), table["title"]
    assert all(figure["value"] >= 0 for figure in outcome["figures"].values())
    targets = [target for target in TARGETS if target.part == name]
    for target in targets:
        known = name == "bench-throughput" or not target.figure.startswith(NOT_IN_TOYS)
        assert not known or target.figure in outcome["figures"], target.figure
    for profile in outcome["profiles"].values():
        assert 0 <= profile["idle_share"] < 1 and profile["kernels"] and profile["events"] > 0
    assert not targets or outcome["profiles"], "a target that is missed needs a profile"


def test_idle_time_is_told_apart() -> None:
    """Two streams; the second launch has two kernels with a gap inside."""
    events = [
        Event("a", 0.0, 10.0, 1),
        Event("copy", 4.0, 12.0, 2),
        Event("b", 15.0, 20.0, 3),
        Event("b", 21.0, 30.0, 3),
        Event("a", 30.0, 40.0, 4),
    ]
    profile = profile_of(events)
    assert (profile.span_us, profile.busy_us) == (40.0, 36.0)
    assert profile.idle_share == pytest.approx(3 / 40)
    assert profile.idle_in_graphs_share == pytest.approx(1 / 40)
    assert (profile.launches, profile.events, profile.gaps_us) == (4, 5, [3.0])
    assert profile.kernels[0] == ("a", pytest.approx(20 / 42))
    with pytest.raises(RuntimeError, match="no event"):
        profile_of([])


def test_kernel_names_are_cut() -> None:
    assert short_name("void at::native::vectorized<4, Foo>(int, float)") == "at::native::vectorized"
    assert short_name("_decode_kernel") == "_decode_kernel"
    assert len(short_name("k" * 300)) == 80


def test_workloads_are_what_they_say() -> None:
    first, again = nano(256, 100, 1024, 151_000), nano(256, 100, 1024, 151_000)
    assert [p.tolist() for p in first.prompts] == [p.tolist() for p in again.prompts]
    lengths = [len(prompt) for prompt in first.prompts] + list(first.new_tokens)
    assert min(lengths) >= 100 and max(lengths) <= 1024 and len(set(lengths)) > 100
    one, other = shared_prefix(2, 30, 4, 1, 500, seed=1), shared_prefix(2, 30, 4, 1, 500, seed=1, ending=1)
    assert one.prompts[0][:30].tolist() == one.prompts[1][:30].tolist() == other.prompts[0][:30].tolist()
    assert one.prompts[0].tolist() != other.prompts[0].tolist() != other.prompts[1].tolist()
