"""Tests of routes for texts without generation: token ids, calls and reasoning in outputs, server state, and refused routes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rootstock_llm.services.gateway.admin.status import QUIET_S, _state
from rootstock_llm.services.gateway.discovery.dns import DnsWatch, resolve
from rootstock_llm.services.gateway.discovery.endpoints import DnsTarget
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.system import System, wait_until
from tests.services.redis_server import redis_server

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("clock", "weather")]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with System() as started:
        yield started


def test_detokenize_route_reverses_the_tokenize_route(system: System) -> None:
    one = system.post("/tokenize", {"model": MODEL, "prompt": "Hi"}).json()
    many = system.post("/tokenize", {"prompt": ["Hi", "you"]}).json()
    assert one["count"] == len(one["tokens"]) and one["max_model_len"] > one["count"]
    assert many["tokens"][0] == one["tokens"] and many["count"] == [len(ids) for ids in many["tokens"]]
    assert system.post("/detokenize", {"tokens": [72, 105]}).json() == {"text": "Hi"}
    assert system.post("/detokenize", {"tokens": [[72], [], [105, 33]]}).json() == {"text": ["H", "", "i!"]}


def test_parsing_routes_return_tool_calls_and_reasoning(system: System) -> None:
    body: dict[str, Any] = {"text": f"So: {CALL}", "tools": TOOLS, "tool_call_parser": "qwen25"}
    found = system.post("/parse_function_call", body).json()
    assert found["normal_text"].strip() == "So:"
    assert found["calls"] == [{"tool_index": 1, "name": "weather", "parameters": '{"city": "Bonn"}'}]
    body = {"text": "Hm.</think>Yes.", "reasoning_parser": "deepseek-r1"}
    assert system.post("/separate_reasoning", body).json() == {"reasoning_text": "Hm.", "text": "Yes."}


@pytest.mark.by_day(one_in=3, seed=10)
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": []}, "prompt"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("/detokenize", {"tokens": "Hi"}, "tokens"),
        ("/parse_function_call", {"text": "a", "tools": [], "tool_call_parser": "none"}, "tool_call_parser"),
        ("/separate_reasoning", {"text": "a", "reasoning_parser": ""}, "reasoning_parser"),
        ("/v1/rerank", {"query": "a", "documents": []}, None),
        ("/classify", {"text": "a"}, None),
    ],
)
def test_error_names_the_bad_field_of_tokenizing_and_parsing_routes(
    system: System, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = system.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_server_info_has_the_service_status(system: System) -> None:
    assert system.get("/ping").status_code == 200 and system.get("/version").json()["version"]
    dependencies = {
        "running_tokens": 60,
        "prompt_tokens": 90,
        "cached_prompt_tokens": 45,
        "generated_tokens": 7,
        "retractions": 2,
    }
    system.do(
        lambda: system.worker.report_load(
            num_open=3, num_running=2, num_waiting=1, used_tokens=70, cached_tokens=5, **dependencies
        )
    )
    wait_until(lambda: bool(system.get("/get_load").json()), "the load report of a worker")
    info = system.get("/server_info").json()
    assert info["served_model_name"] == info["models"][0]["id"] == MODEL
    assert info["loads"] == system.get("/get_load").json() and info["loads"] == [
        {"worker_id": "worker-0", "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 70}
    ]
    surroundings = info["gateway"].pop("surroundings")
    assert info["gateway"] == {"waiting": 0, "workers": 1, "tokenizers": 1, "detokenizers": 1}
    assert surroundings["redis"] == {"index": None, "limits": None, "kept": None} and surroundings["unresolved"] == []
    (worker,) = info["workers"]
    assert (worker["worker_id"], worker["model"], worker["role"], worker["state"]) == ("worker-0", MODEL, "both", "ready")
    assert (worker["num_running"], worker["num_waiting"], worker["kv_used_tokens"], worker["kv_cached_tokens"]) == (2, 1, 60, 5)
    assert {name: worker[name] for name in dependencies.keys() - {"running_tokens"}} == {
        name: value for name, value in dependencies.items() if name != "running_tokens"
    }


def test_server_info_lists_dependencies_without_addresses() -> None:
    with redis_server() as own, System(redis_url=own.url, state_redis_url=own.url, keys=["alice"]) as system:

        def dependencies() -> dict[str, Any]:
            found: dict[str, Any] = system.get("/server_info", headers={"x-api-key": "alice"}).json()["gateway"]["surroundings"]
            return found

        up = {"index": True, "limits": True, "kept": True}
        wait_until(lambda: dependencies()["redis"] == up, "the connection to Redis")
        assert {**dependencies(), "redis": {}} == {
            "redis": {},
            "key_file_valid": True,
            "tls_files_valid": None,
            "certificate_ends_in_s": None,
            "unresolved": [],
            "scraped_s_ago": None,
        }
        system.get("/metrics")
        system.key_file.write_text("{")
        name = DnsWatch(DnsTarget("tokenizers.serving.svc", 7001), 5.0, resolve, lambda endpoints: None)
        name.trouble = "no server"
        system.do(lambda: system.gateway._discoveries[1]._names.append(name))
        own.kill()
        wait_until(lambda: set(dependencies()["redis"].values()) == {False}, "the detected outage of Redis")
        wait_until(lambda: dependencies()["key_file_valid"] is False, "the invalid key file")
        assert dependencies()["unresolved"] == ["tokenizer"] and dependencies()["scraped_s_ago"] < 60.0


def test_lost_worker_has_null_load_fields() -> None:
    with System() as system:
        system.do(lambda: system.worker.report_load(num_running=1))
        wait_until(lambda: system.get("/server_info").json()["workers"][0]["num_running"] == 1, "the load report of a worker")
        system.call(system.workers[0].stop())
        wait_until(lambda: system.get("/server_info").json()["workers"][0]["state"] == "lost", "the lost worker in /server_info")
        info = system.get("/server_info").json()
        assert (info["workers"][0]["worker_id"], info["workers"][0]["num_running"]) == ("worker-0", None)
        assert (info["gateway"]["workers"], info["loads"]) == (0, [])


def test_server_info_has_the_states_of_workers(system: System) -> None:
    (link,) = system.links
    dependencies = []
    system.do(lambda: dependencies.append(_state(link, True, link.load_at)))
    for changed in ({"draining": True}, {"paused": True}):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in changed.items():
                patch.setattr(link, name, value)
            dependencies.append(_state(link, False, link.load_at))
    system.do(lambda: system.worker.report_load(num_open=1))
    wait_until(lambda: link.load is not None, "the load report of a worker")
    dependencies += [_state(link, True, link.load_at + 10 * QUIET_S), _state(link, False, link.load_at)]
    assert dependencies == ["ready", "draining", "paused", "silent", "unused"]
