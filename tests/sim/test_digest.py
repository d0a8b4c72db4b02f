"""Checks the digest of a simulated run.

The digest is equal in all processes and does not depend on the names of classes and attributes. Each changed scheduling decision
changes it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rootstock_llm.services.sim.core.__main__ import main
from rootstock_llm.services.sim.core.run.digest import NAMES, RunDigest, canonical
from rootstock_llm.services.sim.core.run.simulation import Simulation
from rootstock_llm.services.sim.core.run.time_models import PRESETS
from rootstock_llm.services.sim.core.trace.arrivals import ClosedLoop
from rootstock_llm.services.sim.core.trace.trace import read_trace
from rootstock_llm.services.worker.core.contracts.grammar import GrammarSpec
from rootstock_llm.services.worker.core.contracts.messages import ErrorCode, Finish, FinishReason, PeerOutput, Verified
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, ForwardMode, SamplingParams, SlotParams
from rootstock_llm.services.worker.core.contracts.reservations import KvReservation
from rootstock_llm.services.worker.core.contracts.transfers import Tier
from rootstock_llm.services.worker.core.planning import planner
from rootstock_llm.services.worker.core.requests.request import Request
from tests.core.plans import decode_plan
from tests.sim.deployed_worker import on_gpu

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("--concurrency", "12", "--num-pages", "96", "--context-len", "4096", "--schedule-conservativeness", "0.05")
DRAFTS = ("--max-drafts", "3")
# Attributes that the canonical form omits: texts, parts of a structural tag that a gateway has made, and experts, which a
# simulated model does not have.
LEFT_OUT = {
    BatchPlan: {"counts_experts", "routed_rows", "routed_offsets"},
    Finish: {"message"},
    GrammarSpec: {"parts"},
    PeerOutput: {"routed_experts"},
}
# Attributes that a function in NAMES reads. All others are read by their path.
READ_BY_FUNCTIONS = {
    BatchPlan: {
        "admitted",
        *(f"table_{name}" for name in ("slots", "firsts", "counts", "pages")),
        *(f"window_{name}" for name in ("slots", "firsts", "counts", "units")),
        *(f"state_{name}" for name in ("before", "after", "cuts", "at_cut", "starts")),
    }
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace whose outputs do not fit into the pool, so that requests are retracted."""
    path = tmp_path / "trace.jsonl"
    sizes = ("--requests", "24", "--input-len", "70", "--output", "60", "--factor", "2", "--begin", "0.2", "--end", "0.9")
    assert main(["generate", "storm", str(path), *sizes]) == 0
    return path


def digest_of(trace: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    capsys.readouterr()
    assert main([str(trace), *FLAGS, *flags, "--digest"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("flags", [(), ("--no-enable-overlap",), DRAFTS], ids=["overlap", "no overlap", "drafts"])
def test_digest_is_the_same_in_processes_with_other_hash_seeds(flags: tuple[str, ...], trace: Path) -> None:
    command = [sys.executable, "-m", "rootstock_llm.services.sim.core", str(trace), *FLAGS, *flags, "--digest"]
    printed = [
        subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("0", "4242")
    ]
    assert printed[0] == printed[1] and len(printed[0].decode().strip()) == hashlib.sha256().digest_size * 2


def test_digest_differs_between_modes_and_settings(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        (),
        ("--no-enable-overlap",),
        ("--page-size", "8"),
        ("--eviction-policy", "lfu", "--max-prefill-tokens", "80"),
        DRAFTS,
    ]
    assert len({digest_of(trace, capsys, *flags) for flags in runs}) == len(runs)


def test_digest_changes_when_retraction_picks_another_victim(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest_of(trace, capsys)
    order = planner.victim_order
    picked: list[int] = []

    def reversed_order(request: Request) -> tuple[int, ...]:
        picked.append(request.seq)
        return tuple(-value for value in order(request))

    monkeypatch.setattr(planner, "victim_order", reversed_order)
    assert digest_of(trace, capsys) != before
    assert picked, "the trace has retractions"
    monkeypatch.undo()
    assert digest_of(trace, capsys) == before


def test_canonical_form_ignores_the_names_of_classes_and_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Renamed:
        num_rows: int
        drafts: SimpleNamespace

    paths = {"rows": "num_rows", "drafted": "drafts.all", "accepted": "drafts.right", "predicted": "drafts.none"}
    monkeypatch.setitem(NAMES, Renamed, paths | {"accepted_predicted": lambda record: 0})
    assert canonical(Renamed(1, SimpleNamespace(all=3, right=2, none=0))) == canonical(Verified(1, 3, 2))


@pytest.mark.parametrize("column", ["state_before", "state_after", "state_cuts", "state_at_cut", "window_units"])
def test_canonical_form_of_a_plan_differs_when_a_cache_unit_differs(column: str) -> None:
    names = ("window_slots", "window_firsts", "window_counts", "window_units")
    states = ("state_before", "state_after", "state_cuts", "state_at_cut")
    plan = replace(decode_plan(1), **{name: np.ones(1, dtype=np.int32) for name in (*names, *states)})
    assert canonical(plan) != canonical(replace(plan, **{column: np.full(1, 2, dtype=np.int32)}))


def test_digest_is_the_hash_of_the_written_lines(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "lines"
    printed = digest_of(trace, capsys, "--digest-lines", str(lines))
    assert printed == hashlib.sha256(lines.read_bytes()).hexdigest() + "\n"
    kinds = {line.split(",")[0] for line in lines.read_text().splitlines()}
    assert kinds == {'["submit"', '["plan"', '["output"'}


def test_digest_does_not_change_the_run(trace: Path) -> None:
    requests = read_trace(trace)
    outcomes = []
    for digest in (None, RunDigest()):
        config = on_gpu(96, 4096, schedule_conservativeness=0.05)
        run = Simulation(config, requests, ClosedLoop(requests, 12), PRESETS["h200-like"], digest=digest)
        outcomes.append(run.run())
    assert outcomes[0].stats == outcomes[1].stats and outcomes[0].stats.retractions_total > 0
    assert (outcomes[0].requests.ended == outcomes[1].requests.ended).all()


def test_simulation_accepts_draft_tokens_up_to_the_first_wrong_one(trace: Path) -> None:
    requests = read_trace(trace)
    config = on_gpu(512, 4096, max_running_requests=4)
    run = Simulation(replace(config, max_drafts=3), requests, ClosedLoop(requests, 4), PRESETS["h200-like"])
    outcome = run.run()
    scripted = [min(request.output_len, request.max_new_tokens) for request in requests.requests]
    assert outcome.requests.finished.all() and (outcome.requests.output_tokens == scripted).all()
    stats = outcome.stats
    expected = (1 / 2 + 1 / 4 + 1 / 8) / 3  # each of 3 draft tokens is right with probability 1/2
    assert stats.accepted_tokens_total / stats.drafted_tokens_total == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("record", list(NAMES), ids=lambda record: record.__name__)
def test_canonical_names_cover_every_field_of_a_record(record: type) -> None:
    assert is_dataclass(record)
    named = {path for path in NAMES[record].values() if isinstance(path, str)}
    read = named | READ_BY_FUNCTIONS.get(record, set()) | LEFT_OUT.get(record, set())
    assert {path.partition(".")[0] for path in read} == {field.name for field in fields(record)}


def test_canonical_form_of_a_plan_ignores_the_order_of_updates_and_admissions() -> None:
    none, no_rows = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.bool_)

    def plan(order: list[int]) -> BatchPlan:
        slots, firsts, counts = np.array([[3, 1], [0, 2], [2, 1]], dtype=np.int32)[:, order]
        pages = np.concatenate([[[7, 9], [4]][update] for update in order])
        admitted = tuple(SlotParams(int(slot), 1, SamplingParams(1), (), none) for slot in slots)
        columns = (none, none, none, none, no_rows, none, none, none, none, admitted, slots, firsts, counts, pages)
        return BatchPlan(1, ForwardMode.EXTEND, 0, *columns)

    there, back = canonical(plan([0, 1])), canonical(plan([1, 0]))
    assert there == back and isinstance(there, dict)
    assert there["table_updates"] == [[1, 2, [4]], [3, 0, [7, 9]]] and [each["slot"] for each in there["admitted"]] == [1, 3]


def test_canonical_form_of_an_output_is_plain_data() -> None:
    finish = Finish(FinishReason.ABORT, 4, "r", error=ErrorCode.TIMEOUT, cached_from={Tier.HOST: 2, Tier.DEVICE: 1}, queue_s=0.1)
    form = canonical(PeerOutput(2, [4], [1], [8], [finish]))
    assert isinstance(form, dict)
    (ended,) = form["finishes"]
    assert ended["reason"] == 4 and ended["error"] == 4 and ended["queue_s"] == 0.1
    assert ended["cached_from"] == [["device", 1], ["host", 2]]
    assert "message" not in ended


def test_canonical_form_is_refused_for_a_type_without_names() -> None:
    with pytest.raises(TypeError, match="KvReservation has no canonical form"):
        canonical(KvReservation(1, 2, b"secret"))
