"""Checks trace files: written traces are read back, and errors name the line and the fault."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from rootstock_llm.services.sim.core.trace.trace import Trace, TraceError, TraceRequest, read_trace, write_trace
from rootstock_llm.services.sim.core.trace.workloads import multi_turn, random_lengths, scores, shared_prefix, storm

FULL = TraceRequest(
    1.5, (3, (1 << 64) - 1), 100, 20, 200, priority=-2, salt="a", routing_key="k", lora="l", session="s", think_s=0.25
)


@pytest.mark.by_day(one_in=2, seed=51)
@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(Trace(64, (FULL,)), id="every field"),
        pytest.param(random_lengths(50, 300, 40, 0.5, 10.0, 1), id="random"),
        pytest.param(shared_prefix(4, 4, 256, 40, 30, 100.0, 2), id="shared prefix"),
        pytest.param(multi_turn(5, 4, 100, 50, 30, 0.5, 10.0, 3), id="multi-turn"),
        pytest.param(scores(4, 8, 128, 20, 10.0, 5), id="scores"),
        pytest.param(storm(50, 64, 20, 10, 0.3, 0.6, 100.0, 4), id="storm"),
    ],
)
def test_trace_is_read_back_from_its_file(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, trace)
    assert read_trace(path) == trace


def test_missing_fields_of_a_trace_request_follow_from_the_blocks_and_the_output_length(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 1, "blocks": [7, 8], "output_len": 5}\n\n')
    assert read_trace(path) == Trace(64, (TraceRequest(1.0, (7, 8), 128, 5, 5),))
    assert read_trace(path, block_size=16).requests[0].input_len == 32


def test_traces_in_the_mooncake_format_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1200, "output_length": 52, "hash_ids": [46, 47, 48]}\n'
        '{"timestamp": 3052, "input_length": 1024, "output_length": 0, "hash_ids": [46, 47]}\n'
    )
    assert read_trace(path) == Trace(
        512, (TraceRequest(0.0, (46, 47, 48), 1200, 52, 52), TraceRequest(3.052, (46, 47), 1024, 1, 1))
    )


@pytest.mark.by_day(one_in=2, seed=10)
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        pytest.param("{", "line 2", id="not JSON"),
        pytest.param("[1]", "JSON object", id="not an object"),
        pytest.param('{"arrival": 0, "blocks": []}', "output_len", id="a field is missing"),
        pytest.param('{"arrival": 0, "blocks": [1], "output_len": 1, "prio": 1}', "prio", id="an unknown field"),
        pytest.param('{"arrival": 0, "blocks": [], "output_len": 1}', "input_len", id="an empty prompt"),
        pytest.param('{"arrival": 0, "blocks": [1], "output_len": 3, "max_new_tokens": 0}', "both 0", id="output of no tokens"),
        pytest.param('{"arrival": -1, "blocks": [1], "output_len": 1}', "arrival", id="a time before the start"),
        pytest.param('{"arrival": 0, "blocks": [-1], "output_len": 1}', "block ids", id="a negative block"),
        pytest.param('{"arrival": 0, "blocks": [1.5], "output_len": 1}', "whole number", id="half a block"),
        pytest.param('{"arrival": 0, "blocks": [1], "output_len": -1}', "output_len", id="no output"),
    ],
)
def test_error_of_an_invalid_trace_names_the_line_and_the_fault(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"arrival": 0, "blocks": [1], "output_len": 1}) + "\n" + line + "\n")
    with pytest.raises(TraceError, match="line 2") as caught:
        read_trace(path)
    assert reason in str(caught.value)


def test_empty_trace_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    with pytest.raises(TraceError, match="no request"):
        read_trace(path)


def test_shared_prefix_trace_shares_blocks_only_within_a_group() -> None:
    trace = shared_prefix(groups=4, per_group=3, prefix=256, suffix=40, output=30, rate=0.0, seed=0)
    groups: dict[tuple[int, ...], int] = {}
    for request in trace.requests:
        groups[request.blocks] = groups.get(request.blocks, 0) + 1
        assert request.input_len == 296 and len(request.blocks) == 4
    assert sorted(groups.values()) == [3, 3, 3, 3]
    assert len({block for blocks in groups for block in blocks}) == 16
    assert trace.unique_block_tokens == 4 * 256 + 12 * 40


def test_multi_turn_trace_repeats_the_conversation_in_each_prompt() -> None:
    trace = multi_turn(sessions=2, turns=3, system=128, user=50, output=30, think_s=1.0, rate=0.0, seed=0)
    one = [request for request in trace.requests if request.session == "s0"]
    other = [request for request in trace.requests if request.session == "s1"]
    assert [request.input_len for request in one] == [178, 258, 338]
    assert [request.think_s for request in one] == [0.0, 1.0, 1.0]
    for before, after in itertools.pairwise(one):
        assert after.blocks[: len(before.blocks)] == before.blocks
    assert set(one[-1].blocks) & set(other[-1].blocks) == set(one[-1].blocks[:2]), "only the system prompt is shared"


def test_storm_trace_uses_the_whole_output_limit_only_during_the_storm() -> None:
    trace = storm(requests=100, input_len=64, output=20, factor=10, begin=0.3, end=0.5, rate=10.0, seed=0)
    assert {request.max_new_tokens for request in trace.requests} == {200}
    assert [index for index, request in enumerate(trace.requests) if request.output_len == 200] == list(range(30, 50))


def test_requests_of_random_lengths_arrive_at_the_given_rate() -> None:
    trace = random_lengths(5000, 64, 8, 0.0, 25.0, 0)
    times = [request.arrival for request in trace.requests]
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(25.0, rel=0.05)
