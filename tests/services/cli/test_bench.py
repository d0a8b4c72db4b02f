"""Tests of the load generator with a small OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from rootstock_llm.services.cli.bench import report
from rootstock_llm.services.cli.bench.client import Outcome, StreamError, StreamMeter
from rootstock_llm.services.cli.bench.load import closed_loop, poisson_arrivals
from rootstock_llm.services.cli.bench.spec import WORKLOADS, Spec
from rootstock_llm.services.cli.bench.workload import Content, Session, Turn, make_sessions, make_warmup
from rootstock_llm.services.cli.program import main
from rootstock_llm.services.cli.shared.exits import Exit
from tests.services.cli.fake_server import FakeServer

SPECS = [Spec(name, range_ratio=0.5, num_requests=30) for name in WORKLOADS]


def bench(server: FakeServer, path: Path, *flags: str) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Runs the load generator. Returns its exit status, and the summary and the request lines of its results file."""
    argv = [
        "bench",
        "--url",
        server.url,
        "--warmup",
        "0",
        "--output-len",
        "4",
        "--output-file",
        str(path),
        "--output-details",
        *flags,
    ]
    status = main(argv)
    summary, *requests = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    return status, summary["results"], requests


def contents(sessions: list[Session]) -> set[Content]:
    return {turn.content for s in sessions for turn in s.turns} | {s.system for s in sessions if s.system is not None}


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_workload_depends_only_on_the_seed(spec: Spec) -> None:
    assert make_sessions(spec) == make_sessions(spec)
    assert make_sessions(spec) != make_sessions(replace(spec, seed=1))
    assert sum(len(s.turns) for s in make_sessions(spec)) == 30


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_warmup_prompts_share_no_content_with_the_measured_prompts(spec: Spec) -> None:
    warmup = make_warmup(spec, 5)
    assert sum(len(s.turns) for s in warmup) == 5
    assert contents(make_sessions(spec)).isdisjoint(contents(warmup))


def test_workload_keeps_prompts_when_the_output_length_changes() -> None:
    short, long = (make_sessions(replace(SPECS[0], output_len=n)) for n in (8, 800))
    assert [s.turns[0].content for s in short] == [s.turns[0].content for s in long]


def test_workload_draws_lengths_within_the_range() -> None:
    fixed = make_sessions(Spec("random", input_len=40, num_requests=50, token_ids=True))
    assert {len(s.turns[0].content) for s in fixed} == {40}
    ranged = make_sessions(Spec("random", input_len=40, output_len=20, range_ratio=0.5, num_requests=400, token_ids=True))
    lengths = [len(s.turns[0].content) for s in ranged]
    assert (min(lengths), max(lengths)) == (20, 40)
    assert {s.turns[0].max_tokens for s in ranged} == set(range(10, 21))


def test_shared_prefix_workload_has_one_system_prompt_per_group() -> None:
    sessions = make_sessions(Spec("generated-shared-prefix", groups=3, prompts_per_group=4, system_len=50, question_len=5))
    assert sorted(s.group for s in sessions) == [0] * 4 + [1] * 4 + [2] * 4
    assert [s.group for s in sessions] != sorted(s.group for s in sessions)
    assert len({(s.group, s.system) for s in sessions}) == 3 == len({s.system for s in sessions})
    assert len({s.turns[0].content for s in sessions}) == 12


@pytest.mark.parametrize(
    "spec",
    [
        Spec("multi-turn", token_ids=True),
        Spec("random", range_ratio=1.5),
        Spec("random", id_min=9, id_max=9),
        Spec("random", input_len=0),
        Spec("multi-turn", conversations=2, turns=2, num_requests=5),
    ],
    ids=["multi-turn-token-ids", "ratio-above-1", "no-ids", "empty-prompt", "too-few-requests"],
)
def test_workload_refuses_an_impossible_spec(spec: Spec) -> None:
    with pytest.raises(ValueError):
        make_sessions(spec)


def test_poisson_arrivals_have_exponential_gaps_at_the_rate() -> None:
    arrivals = poisson_arrivals(rate=20.0, count=20_000, seed=3)
    gaps = np.diff(arrivals)
    assert arrivals == poisson_arrivals(20.0, 20_000, 3) != poisson_arrivals(20.0, 20_000, 4)
    assert gaps.mean() == pytest.approx(0.05, rel=0.03)
    assert gaps.std() == pytest.approx(0.05, rel=0.05)


def test_closed_loop_keeps_a_constant_number_of_sessions_in_flight() -> None:
    flying: list[int] = [0]
    most: list[int] = []

    async def play(session: Session, at: float | None) -> None:
        flying[0] += 1
        most.append(flying[0])
        await asyncio.sleep(0)
        flying[0] -= 1

    asyncio.run(closed_loop([Session(i, None, (Turn("a", 1),)) for i in range(20)], 3, play))
    assert (len(most), max(most), most.count(3)) == (20, 3, 18)


def outcome(ttft: float, itl: list[float], tokens: int) -> Outcome:
    done = Outcome(scheduled_at=0.0, sent_at=0.5, ttft_s=ttft, itl_s=itl, e2e_s=ttft + sum(itl))
    done.prompt_tokens, done.completion_tokens, done.cached_tokens, done.has_usage = 10, tokens, 2, True
    return done


def test_summary_has_the_expected_statistics_for_known_outcomes() -> None:
    two_tokens_a_chunk = outcome(ttft=0.1, itl=[0.2, 0.2], tokens=5)
    one_token = outcome(ttft=0.3, itl=[], tokens=1)
    failed = replace(outcome(9.0, [9.0], 9), error="timeout")
    s = report.summarize([two_tokens_a_chunk, one_token, failed], planned=4, duration_s=2.0)
    assert (s.successful_requests, s.failed_requests, s.unsent_requests, s.errors) == (2, 1, 1, {"timeout": 1})
    assert (s.input_tokens, s.generated_tokens, s.cached_tokens) == (20, 6, 4)
    assert (s.request_throughput, s.input_throughput, s.output_throughput) == (1.0, 10.0, 3.0)
    assert (s.ttft_ms.mean, s.ttft_ms.median) == pytest.approx((200.0, 200.0))
    assert (s.ttft_ms.p90, s.ttft_ms.p99) == pytest.approx((280.0, 298.0))
    assert (s.itl_ms.mean, s.itl_ms.count) == pytest.approx((200.0, 2))
    assert (s.tpot_ms.mean, s.tpot_ms.count) == pytest.approx((100.0, 1))
    assert (s.e2e_ms.mean, s.max_send_lag_ms) == pytest.approx((400.0, 500.0))


def event(**choice: Any) -> bytes:
    return b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n"


def test_stream_meter_measures_times_between_chunks() -> None:
    """An event with only a role, a finish reason or the usage is no chunk. Any other event without text is a chunk."""
    seen = Outcome(scheduled_at=10.0, sent_at=10.0)
    meter = StreamMeter(seen)
    meter.feed(event(delta={"role": "assistant", "content": ""}), 11.0)
    meter.feed(event(delta={"content": "ab"}), 12.0)
    meter.feed(event(delta={}), 12.5)
    meter.feed(event(delta={"content": "c"}), 14.0)
    meter.feed(event(delta={}, finish_reason="stop"), 14.25)
    meter.feed(b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 6}}\n\ndata: [DONE]\n\n', 15.0)
    meter.finish()
    assert (seen.ttft_s, seen.itl_s, seen.e2e_s) == (2.0, [0.5, 1.5], 4.25)
    assert (seen.text, seen.prompt_tokens, seen.completion_tokens, seen.cached_tokens) == ("abc", 7, 6, 0)


def test_stream_meter_counts_chunks_as_tokens_when_the_stream_reports_no_usage() -> None:
    seen = Outcome(0.0, 0.0)
    meter = StreamMeter(seen)
    meter.feed(event(text="a") + event(text="b", finish_reason="length"), 1.0)
    meter.finish()
    assert (seen.completion_tokens, seen.has_usage) == (2, False)


def test_stream_meter_raises_stream_error_when_an_event_is_not_json() -> None:
    with pytest.raises(StreamError) as caught:
        StreamMeter(Outcome(0.0, 0.0)).feed(b"data: {\n", 1.0)
    assert caught.value.kind == "malformed event"


@pytest.mark.by_day(one_in=2, seed=5)
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("shape", [("--concurrency", "4"), ("--request-rate", "500")], ids=["closed", "open"])
def test_bench_counts_tokens_and_cached_tokens(server: FakeServer, tmp_path: Path, endpoint: str, shape: tuple[str, str]) -> None:
    flags = ("--endpoint", endpoint, "--num-requests", "12", "--ignore-eos", "--extra-body", '{"top_k": 1}', *shape)
    status, results, requests = bench(server, tmp_path / "r.jsonl", *flags)
    assert (status, results["successful_requests"], len(requests)) == (0, 12, 12)
    assert (results["input_tokens"], results["generated_tokens"], results["cached_tokens"]) == (120, 48, 48)
    assert results["itl_ms"]["count"] == 36
    assert all(b["ignore_eos"] and b["top_k"] == 1 and b["model"] == "fake" for b in server.bodies)
    assert all(r["ttft_ms"] <= r["e2e_ms"] and r["finish_reason"] == "length" for r in requests)


def test_bench_counts_one_itl_per_chunk_when_chunks_have_several_tokens(tmp_path: Path) -> None:
    with FakeServer(tokens_per_chunk=3) as server:
        _, results, _ = bench(server, tmp_path / "r.jsonl", "--num-requests", "2", "--output-len", "8")
    assert (results["generated_tokens"], results["itl_ms"]["count"]) == (16, 4)


def test_bench_sends_prompts_as_token_ids(server: FakeServer, tmp_path: Path) -> None:
    flags = ("--token-ids", "--num-requests", "3", "--input-len", "9", "--id-min", "5", "--id-max", "7")
    bench(server, tmp_path / "r.jsonl", *flags)
    assert [len(b["prompt"]) for b in server.bodies] == [9, 9, 9]
    assert {i for b in server.bodies for i in b["prompt"]} == {5, 6}


def test_bench_counts_errors_by_class(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.behaviours = ["ok", "503", "503", "truncated", "stream error"]
    flags = ("--num-requests", "6", "--concurrency", "1")
    status, results, requests = bench(server, tmp_path / "r.jsonl", *flags)
    assert (status, results["successful_requests"], results["failed_requests"]) == (1, 2, 4)
    assert results["errors"] == {"HTTP 503": 2, "truncated stream": 1, "stream: worker_lost": 1}
    assert [r["error"] for r in requests][:2] == [None, "HTTP 503"]
    assert "Errors by class" in capsys.readouterr().out


def test_bench_counts_a_malformed_response_as_one_failed_request(server: FakeServer, tmp_path: Path) -> None:
    server.behaviours = ["not text", "no object"]
    status, results, _ = bench(server, tmp_path / "r.jsonl", "--num-requests", "3", "--concurrency", "1")
    assert (status, results["successful_requests"]) == (Exit.FAILED, 1)
    assert results["errors"] == {"HTTP 502": 1, "malformed event": 1}


@pytest.mark.parametrize("models", [[], {"data": []}, {"data": [None]}, 5], ids=["list", "no model", "null", "number"])
def test_bench_exits_with_failure_when_the_server_lists_no_model(
    server: FakeServer, capsys: pytest.CaptureFixture[str], models: Any
) -> None:
    server.models = models
    assert main(["bench"]) == Exit.FAILED
    assert capsys.readouterr().err == f"rootstock: {server.url}/v1/models lists no model; set --model.\n"


def test_bench_sends_nothing_when_the_output_file_is_not_writable(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "r.jsonl"):
        assert main(["bench", "--output-file", str(path)]) == Exit.FAILED
        assert capsys.readouterr().err.startswith(f"rootstock: {path} cannot be written (")
    assert server.bodies == []


def test_bench_exits_with_0_when_errors_are_allowed(server: FakeServer, tmp_path: Path) -> None:
    server.behaviours = ["429"]
    status, results, _ = bench(server, tmp_path / "r.jsonl", "--num-requests", "2", "--allow-errors")
    assert (status, results["errors"]) == (0, {"HTTP 429": 1})


def test_bench_reports_an_unreachable_server(server: FakeServer, tmp_path: Path) -> None:
    server.url = "http://127.0.0.1:1"
    status, results, _ = bench(server, tmp_path / "r.jsonl", "--num-requests", "2", "--model", "m")
    assert (status, results["errors"]) == (Exit.UNREACHABLE, {"connect": 2})


def test_bench_prompt_of_a_chat_turn_has_all_earlier_turns_and_completions(server: FakeServer, tmp_path: Path) -> None:
    flags = ("--workload", "multi-turn", "--conversations", "1", "--turns", "3", "--endpoint", "chat")
    _, results, _ = bench(server, tmp_path / "r.jsonl", *flags)
    assert results["successful_requests"] == 3
    messages = server.bodies[2]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert [m["content"] for m in messages[1::2]] == [" a0 a1 a2 a3"] * 2
    assert [b["messages"] for b in server.bodies[:2]] == [messages[:1], messages[:3]]


def test_bench_prompt_of_a_text_turn_begins_with_the_previous_prompt_and_completion(server: FakeServer, tmp_path: Path) -> None:
    bench(server, tmp_path / "r.jsonl", "--workload", "multi-turn", "--conversations", "1", "--turns", "2")
    first, second = (b["prompt"] for b in server.bodies)
    assert second.startswith(first + " a0 a1 a2 a3\n")


def test_bench_sends_no_turn_after_a_failed_turn(server: FakeServer, tmp_path: Path) -> None:
    server.behaviours = ["ok", "500"]
    status, results, _ = bench(server, tmp_path / "r.jsonl", "--workload", "multi-turn", "--conversations", "1", "--turns", "4")
    assert (status, results["successful_requests"], results["failed_requests"], results["unsent_requests"]) == (1, 1, 1, 2)


def test_bench_results_have_the_parameters_and_the_machine_but_not_the_api_key(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOTSTOCK_API_KEY", "sesame")
    path = tmp_path / "deep" / "r.jsonl"
    for _ in range(2):
        main(["bench", "--url", f"{server.url}/v1/", "--num-requests", "1", "--output-file", str(path)])
    assert server.keys[-1] == "Bearer sesame"
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["kind"] for line in lines] == ["summary", "summary"]
    assert (lines[0]["parameters"]["workload"], lines[0]["parameters"]["model"]) == ("random", "fake")
    assert lines[0]["machine"]["cores"] >= 1 and lines[0]["machine"]["cpu"]
    assert b"sesame" not in path.read_bytes()


def test_bench_prints_the_same_rows_as_the_benchmarks_of_sglang_and_vllm(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["bench", "--url", server.url, "--num-requests", "3", "--output-len", "5"])
    out = capsys.readouterr().out
    assert out.startswith("============ Serving Benchmark Result ============\n")
    rows = dict(line.split(":", 1) for line in out.splitlines() if ":" in line)
    assert (rows["Successful requests"].strip(), rows["Total generated tokens"].strip()) == ("3", "15")
    for name in ("TTFT", "TPOT", "ITL", "E2E"):
        assert {f"{s} {name} (ms)" for s in ("Mean", "Median", "P90", "P99")} <= rows.keys()


@pytest.mark.parametrize(
    "flags",
    [("--token-ids", "--endpoint", "chat"), ("--concurrency", "0"), ("--output-details",), ("--request-rate", "-2")],
    ids=["token-ids-to-chat", "no-concurrency", "details-without-file", "negative-rate"],
)
def test_bench_exits_with_2_when_flags_are_invalid(flags: tuple[str, ...]) -> None:
    assert main(["bench", *flags]) == Exit.USAGE


@pytest.mark.parametrize("is_tty", [True, False], ids=["terminal", "pipe"])
def test_bench_shows_progress_on_a_terminal(server: FakeServer, monkeypatch: pytest.MonkeyPatch, is_tty: bool) -> None:
    err = io.StringIO()
    monkeypatch.setattr(err, "isatty", lambda: is_tty)
    monkeypatch.setattr(sys, "stderr", err)
    assert main(["bench", "--num-requests", "3", "--output-len", "4"]) == Exit.DONE
    shown = "\rbench [                    ]   0 %  0 of 3 requests" in err.getvalue()
    assert shown == is_tty and err.getvalue().endswith("\r\x1b[K" if is_tty else "")
