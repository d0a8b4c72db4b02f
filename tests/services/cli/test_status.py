"""Tests of the command `rootstock status`: rates, ratios, the table, and an unavailable gateway."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rootstock_llm.services.cli import reference
from rootstock_llm.services.cli.program import main
from rootstock_llm.services.cli.shared.exits import CommandFailed, Exit
from rootstock_llm.services.cli.shared.server import unreachable
from rootstock_llm.services.cli.shared.terminal import Terminal
from rootstock_llm.services.cli.status.command import _next_state
from rootstock_llm.services.cli.status.gateway_state import GatewayState, Observer, Worker
from rootstock_llm.services.cli.status.table import lines
from rootstock_llm.services.cli.status.trouble import troubles
from tests.services.cli.fake_server import FakeServer

ROOT = Path(__file__).resolve().parents[3]
PLAIN = Terminal(io.StringIO(), {})
# Fields of a worker that are null before its first load report
LOAD_FIELDS = ("told_s_ago", "num_running", "num_waiting", "kv_used_tokens", "kv_cached_tokens", "prompt_tokens")
LOAD_FIELDS += ("cached_prompt_tokens", "generated_tokens", "retractions")


def worker(name: str | None, state: str = "ready", **fields: Any) -> dict[str, Any]:
    figures = {"num_running": 2, "num_waiting": 1, "kv_used_tokens": 250, "kv_cached_tokens": 9, "retractions": 0}
    figures |= {"prompt_tokens": 80, "cached_prompt_tokens": 60, "generated_tokens": 100, "told_s_ago": 0.0}
    if state in ("lost", "starting"):
        figures = dict.fromkeys(LOAD_FIELDS)
    return (
        {"worker_id": name, "model": "m", "role": "both", "state": state, "max_running": 8, "kv_tokens": 1000} | figures | fields
    )


def info(*workers: dict[str, Any]) -> dict[str, Any]:
    gateway = {"waiting": 4, "workers": 1, "tokenizers": 2, "detokenizers": 3}
    return {"models": [{"id": "m"}], "workers": list(workers), "gateway": gateway}


def rates(polls: list[tuple[float, dict[str, Any]]]) -> list[float | None]:
    observer = Observer()
    return [observer.state(info(worker("a", **fields)), now).workers[0].tokens_per_second for now, fields in polls]


@pytest.mark.parametrize(
    ("polls", "expected"),
    [
        ([(10.0, {}), (12.0, {"generated_tokens": 300})], [None, 100.0]),
        ([(10.0, {}), (11.5, {"generated_tokens": 200, "told_s_ago": 0.5})], [None, 100.0]),
        (
            [(10.0, {}), (11.0, {"generated_tokens": 200}), (11.4, {"generated_tokens": 200, "told_s_ago": 0.4})],
            [None, 100.0, 100.0],
        ),
        ([(10.0, {}), (11.0, {"generated_tokens": 200}), (12.0, {"generated_tokens": 200})], [None, 100.0, 0.0]),
        ([(10.0, {}), (11.0, {"generated_tokens": 5}), (12.0, {"generated_tokens": 25})], [None, None, 20.0]),
        ([(10.0, {}), (11.0, {"state": "lost"}), (12.0, {"generated_tokens": 900})], [None, None, None]),
    ],
    ids=["two-polls", "older-report", "same-report-twice", "idle", "restarted", "lost"],
)
def test_token_rate_is_computed_between_two_reports_of_a_worker(
    polls: list[tuple[float, dict[str, Any]]], expected: list[float | None]
) -> None:
    assert rates(polls) == expected


def test_status_computes_ratios_and_lists_missing_workers_as_gone() -> None:
    observer = Observer()
    first = observer.state(info(worker("a"), worker("b"), worker(None, "starting")), 10.0)
    assert (first.workers[0].kv_use, first.workers[0].hit_rate, first.waiting) == (0.25, 0.75, 4)
    assert first.workers[2] == Worker("-", "m", "both", "starting", max_running=8)
    second = observer.state(info(worker("a", prompt_tokens=0)), 11.0)
    assert [(each.name, each.state, each.hit_rate) for each in second.workers] == [("a", "ready", None), ("b", "gone", None)]
    assert [each.name for each in observer.state(info(worker("a")), 72.0).workers] == ["a"]


def test_status_refuses_a_response_without_the_fields_of_a_gateway() -> None:
    """An older gateway or another server may send such a response."""
    for answer in ([], {}, {"loads": []}, info({"worker_id": "a"})):
        with pytest.raises(CommandFailed) as caught:
            Observer().state(answer, 0.0)  # type: ignore[arg-type]
        assert caught.value.status is Exit.FAILED


def table_of(*workers: Worker) -> list[str]:
    fleet = GatewayState(0.0, ("m",), workers, 1, 2, 3)
    return lines(fleet, "http://127.0.0.1:8000", PLAIN)


def worker_of(model: str, row: list[str]) -> Worker:
    """Returns the worker that a row of the table shows."""
    name, state, running, *others = row
    return Worker(name, model, "both", state, figure(running), None, *map(figure, others))


def figure(text: str) -> Any:
    return None if text == "-" else int(text[:-1]) / 100 if text.endswith("%") else int(text)


def test_table_fits_80_columns_and_keeps_worker_names_distinct() -> None:
    names = [f"release-rootstock-worker-llama-7d9f8c6b5d-{tail}" for tail in ("abcde", "fghij")]
    figures = (256, 256, 999, 1.0, 1.0, 12345.6, 9999)
    full = [Worker(name, "meta-llama/Llama-3.1-8B", "decode", "draining", *figures) for name in names]
    other = Worker("c", "another-model", "prefill", "lost")
    rows = table_of(*full, other)
    assert max(map(len, rows)) <= 80, "\n".join(rows)
    assert all(any(tail in row for row in rows) for tail in ("abcde", "fghij"))
    assert "queue 1  tokenizers 2  detokenizers 3" in rows and rows[-1].endswith("max_tokens")


def test_status_table_in_the_tutorial_matches_the_code() -> None:
    """The tutorial shows docs/pictures/status.txt."""
    text = reference.PICTURE.read_text().rstrip("\n")
    assert "\n".join(f"    {line}".rstrip() for line in text.splitlines()) in (ROOT / "docs/tutorials/laptop.md").read_text()
    (url, model), _, _, _, *rows, _, foot = map(str.split, text.splitlines())
    workers = [worker_of(model, row) for row in rows]
    waiting, tokenizers, detokenizers = map(int, foot[1::2])
    assert lines(GatewayState(0.0, (model,), tuple(workers), waiting, tokenizers, detokenizers), url, PLAIN) == text.splitlines()
    assert [worker.state for worker in workers].count("lost") == 1


def test_table_removes_control_characters_from_worker_names() -> None:
    rows = table_of(Worker("\x1b]0;x\x07", "m\x1b[2J", "both", "\x1b[H"), Worker("b", "n", "both", "ready"))
    assert "\x1b" not in "".join(rows)


def test_table_omits_the_model_and_role_columns_when_all_workers_have_the_same_model_and_role() -> None:
    rows = table_of(Worker("a", "m", "both", "ready"), Worker("-", "-", "-", "starting"))
    assert rows[1] == "2 workers, 1 ready"
    assert rows[3].split() == ["WORKER", "STATE", "RUN", "WAIT", "KV", "HITS", "TOK/S", "RETR"]


def test_status_prints_one_line_of_json(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.info = info(worker("a"), worker("b", "lost"))
    assert main(["status", "--once", "--json"]) == Exit.DONE
    fields = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["state"], each["kv_use"]) for each in fields["workers"]] == [
        ("a", "ready", 0.25),
        ("b", "lost", None),
    ]
    assert (fields["waiting"], fields["tokenizers"], fields["detokenizers"], fields["models"]) == (4, 2, 3, ["m"])


def test_status_watch_continues_when_the_gateway_is_unavailable() -> None:
    fleet = Observer().state(info(worker("a")), 1.0)
    answers: Iterator[GatewayState | CommandFailed] = iter([unreachable("http://h", "Connection refused"), fleet])

    def poll() -> GatewayState:
        answer = next(answers)
        if isinstance(answer, CommandFailed):
            raise answer
        return answer

    out = io.StringIO()
    assert _next_state(poll, 0.0, Terminal(out, {}), is_json=True) is fleet
    assert "cannot be reached" in json.loads(out.getvalue())["error"]


def test_status_reports_faults_of_workers_and_tokenizers() -> None:
    well = Observer().state(info(worker("a"), worker("b", "lost")), 10.0)
    assert troubles(well) == []
    gateway = {"waiting": 4, "workers": 0, "tokenizers": 0, "detokenizers": 3}
    fields = {**info(worker("a", "hung"), worker("b", "lost"), worker("c", "unused")), "gateway": gateway}
    reported = troubles(Observer().state(fields, 10.0))
    assert [text.partition(":")[0] for text in reported] == [
        "no tokenizer is connected",
        "no worker of m is ready (1 hung, 1 lost, 1 unused), and 4 requests wait",
        "a hangs",
        "c gets no requests for a while, because it had faults",
    ]
    full = Observer().state(info(worker("a", kv_used_tokens=990)), 10.0)
    assert troubles(full) == ["a has no free KV for the 1 queued requests: add workers, or lower max_tokens"]


def test_status_reports_faults_of_redis_and_api_keys_and_certificates() -> None:
    def reported(**around: Any) -> list[str]:
        fields = info(worker("a"))
        gateway = {**fields["gateway"], "surroundings": around}
        return [text.partition(":")[0] for text in troubles(Observer().state({**fields, "gateway": gateway}, 10.0))]

    redis = {"index": True, "limits": None, "kept": True}
    week = 7 * 86400
    assert reported(redis=redis, key_file_valid=True, tls_files_valid=None, certificate_ends_in_s=week, scraped_s_ago=14.0) == []
    assert reported(redis=redis, unresolved=[], certificate_ends_in_s=None, scraped_s_ago=None) == []
    broken = {"index": False, "limits": False, "kept": False}
    names = ["tokenizer", "worker"]
    assert reported(redis=broken, unresolved=names, key_file_valid=False, tls_files_valid=False, scraped_s_ago=720.0) == [
        "DNS names of tokenizer and worker do not resolve",
        "this gateway's metrics have not been scraped for 12 minutes",
        "Redis does not respond",
        "the state store does not respond",
        "the file of API keys is wrong, and the earlier content stays in use",
        "the TLS files are wrong, and the earlier content stays in use",
    ]
    assert reported(redis={"index": True, "limits": False}) == ["limits of API keys are not shared in Redis"]
    certificate = "the gateway's certificate for other services"
    assert reported(certificate_ends_in_s=week / 2) == [f"{certificate} expires in 3.5 days"]
    assert reported(certificate_ends_in_s=-5) == [f"{certificate} has expired"]
