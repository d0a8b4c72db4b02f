"""Tests the diagnosis of `helm test`: it names each fault of a broken release with its remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from charts.rootstock.scripts.diagnosis.checks import CHECKS, diagnose
from charts.rootstock.scripts.diagnosis.findings import BROKEN, OK, UNKNOWN, WAITING, Finding, report
from charts.rootstock.scripts.diagnosis.install import Answer, Facts
from rootstock_llm.services.local.ports import HOST
from tests.chart.diagnosis_cases import (
    FAULTS,
    FULL,
    OBJECTS,
    PODS,
    VALUES,
    WELL,
    container,
    event,
    groups,
    install,
    listed,
    pod,
    series,
    with_pods,
)
from tests.chart.loopback_server import QuietHandler, serving
from tests.chart.release import BACKLOG, CHART, NAMESPACE, merged, render
from tests.services.redis_server import RedisServer

PACKAGE = CHART / "scripts"
BAD = (BROKEN, WAITING)


def bad(findings: list[Finding]) -> list[Finding]:
    return [each for each in findings if each.state in BAD]


def test_diagnosis_finds_nothing_in_a_healthy_release() -> None:
    findings = diagnose(install(), WELL)
    assert [each for each in findings if each.state != OK] == []
    assert {each.check for each in findings} == {check.__name__ for check in CHECKS}


def test_description_of_an_installation_lists_each_secret_once_with_all_keys() -> None:
    """The list has neither optional keys nor the private keys of other services' certificates."""
    values = {
        "auth": {"controlTokenSecret": "all"},
        "redis": {"externalUrlSecret": "all", "externalTlsSecret": "authority"},
        "autoscaling": {"prometheusAuth": {"secret": "prometheus"}},
        "modelCache": {"fetchTokenizers": True, "prefetch": {"tokenSecret": "all", "s3": {"secret": "s3"}}},
        "models": [{"name": "demo", "path": "/models/demo", "source": "org/demo"}],
        "tls": {"secret": "llm-%s-tls"},
        "worker": {"kvTiers": {"hostGB": 2, "shared": {"secret": "kv"}}},
    }
    wanted = {each["name"]: each for each in install(values).secrets}
    assert wanted["all"]["keys"] == ["token", "url"]
    assert wanted["all"]["value"] == "auth.controlTokenSecret, modelCache.prefetch.tokenSecret, redis.externalUrlSecret"
    assert (wanted["kv"]["keys"], wanted["kv"]["value"]) == (["url", "secret"], "worker.kvTiers.shared.secret")
    assert wanted["s3"]["keys"] == ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
    there = {name: frozenset(each["keys"]) for name, each in wanted.items()}
    there |= {"keys": frozenset({"a.json"}), "authority": frozenset({"ca.crt"}), "prometheus": frozenset({"ca"})}
    assert bad(diagnose(install(values), replace(WELL, secrets=there))) == []
    volumes = render(merged(VALUES, values)).get("Pod", f"{FULL}-test-diagnosis")["spec"]["volumes"]
    shown = {each["secret"]["secretName"]: each["secret"].get("items") for each in volumes if "secret" in each}
    private = {name for name, items in shown.items() if name.startswith("llm-") and "tls.key" in str(items or "tls.key")}
    assert private == {"llm-gateway-tls"} and len(shown) == len(wanted) == 10


@pytest.mark.by_day(one_in=4, seed=29)
@pytest.mark.parametrize("name", FAULTS)
def test_diagnosis_names_a_fault_with_its_remedy(name: str) -> None:
    fault = FAULTS[name]
    found = bad(diagnose(install(fault.values), fault.facts))
    mine = [each for each in found if each.check == fault.check and fault.what in each.what]
    assert len(mine) == 1, found
    assert fault.mend in mine[0].mend
    assert not fault.alone or found == mine


@pytest.mark.parametrize(
    ("auth", "answer", "state"),
    [
        ({"podIdentity": "aws"}, Answer(403, {"message": "Missing Authentication Token"}), UNKNOWN),
        ({"modes": ["tls"], "secret": "p"}, Answer(error="tlsv13 alert certificate required"), UNKNOWN),
        ({"podIdentity": "aws"}, Answer(error="timed out"), BROKEN),
        ({"modes": ["bearer"], "secret": "p"}, Answer(401, "Unauthorized"), BROKEN),
    ],
    ids=["cloud identity", "client certificate", "unreachable", "token"],
)
def test_scrape_check_is_unknown_when_only_keda_has_the_credentials(auth: dict[str, Any], answer: Answer, state: str) -> None:
    values = {"autoscaling": {"engine": "keda", "adapterRules": False, "prometheusAuth": auth}}
    found = diagnose(install(values), replace(WELL, series=answer))
    assert [each.state for each in found if each.check == "scrape"] == [state], found


@pytest.mark.parametrize("status", [401, 403])
def test_models_check_is_unknown_when_the_test_has_no_api_key(status: int) -> None:
    (found,) = [each for each in diagnose(install(), replace(WELL, info=Answer(status, {}), texts={})) if each.state != OK]
    assert (found.check, found.state) == ("models", UNKNOWN) and "tests.keySecret" in found.mend


def test_every_check_of_the_diagnosis_has_a_test_case() -> None:
    assert {fault.check for fault in FAULTS.values()} == {check.__name__ for check in CHECKS}


def test_diagnosis_runs_the_other_checks_when_one_check_cannot_read_the_input() -> None:
    odd = replace(WELL, objects={**OBJECTS, "pods": Answer(200, {"items": [{"metadata": {}}]})})
    found = diagnose(install(), odd)
    assert {each.check for each in found if each.state == UNKNOWN} >= {"pods", "storage"}
    assert [each.state for each in found if each.check == "redis"] == [OK]


def test_diagnosis_ignores_old_events_of_repaired_faults() -> None:
    """Kubernetes stores the events of a fault for an hour, even if the fault is repaired."""
    refused = event(f"{FULL}-worker-demo-7d9f", "FailedCreate", 'RuntimeClass "nvidia" not found')
    attached = event(PODS["worker"]["metadata"]["name"], "FailedAttachVolume", "Multi-Attach error for volume")
    killed = container("worker", ready=True, lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
    old = with_pods(pod("worker", containerStatuses=[killed]), events=listed(refused, attached))
    assert bad(diagnose(install(), old)) == []
    mounted = FAULTS["volume of a missing Secret"].facts
    (failed,) = mounted.items("events")
    pulling = {**failed, "type": "Normal", "reason": "Pulling", "lastTimestamp": "2026-01-01T00:00:05Z"}
    later = replace(mounted, objects={**mounted.objects, "events": listed(failed, pulling)})
    assert [each for each in bad(diagnose(install(), later)) if each.check == "pods"] == []


def test_report_ends_with_the_broken_findings() -> None:
    lines = report("t", diagnose(install(), FAULTS["missing Secret"].facts)).splitlines()
    assert lines[-1].endswith("checks: 10 ok, 1 broken") and lines[-4].startswith("BROKEN    secrets") and "mend: " in lines[-3]


def api_of(facts: Facts) -> dict[str, Answer]:
    """Returns the responses of API server, gateway and Prometheus by path. One server on one port gives all of them."""
    paths = {f"/namespaces/{NAMESPACE}/{plural}": answer for plural, answer in facts.objects.items()}
    return {
        **paths,
        "/apis": facts.groups,
        f"/{BACKLOG}": facts.external,
        "/readiness": facts.readiness,
        "/server_info": facts.info,
        "/tokenize": Answer(200, {"tokens": [1, 2]}),
        "/detokenize": Answer(200, {"text": "Zwölf Boxkämpfer jagen Viktor; 東京 2026 🚀 def f(x): return x**2"}),
        "/api/v1/query": facts.series,
    }


@contextmanager
def cluster(facts: Facts) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Runs a server with these facts. Yields its URL, and (path, authorization) of each request."""
    answers, asked = api_of(facts), list[tuple[str, str]]()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = urllib.parse.urlsplit(self.path).path
            asked.append((self.path, self.headers.get("Authorization") or ""))
            answer = next((each for end, each in answers.items() if path.endswith(end)), Answer(404, {"message": "not found"}))
            self.send_response(answer.status)
            self.end_headers()
            self.wfile.write(json.dumps(answer.body).encode())

        do_POST = do_GET

    with serving(Handler) as url:
        yield url, asked


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.kill()


def run(
    folder: Path, url: str, environ: Mapping[str, str], values: Mapping[str, Any] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the diagnosis with the pod's command and the chart's ConfigMap.

    Removes the services' host names from the ConfigMap, because they do not resolve on this machine.
    """
    pod = render(merged(VALUES, values or {})).get("Pod", f"{FULL}-test-diagnosis")
    install = json.loads(render(merged(VALUES, values or {})).get("ConfigMap", f"{FULL}-test-diagnosis")["data"]["install.json"])
    install["services"], install["prometheus"] = {}, url
    file = folder / "install.json"
    file.write_text(json.dumps(install))
    command = [sys.executable, *pod["spec"]["containers"][0]["command"][1:4], str(file), url]
    env = {**os.environ, "PYTHONPATH": str(PACKAGE), "DIAGNOSIS_API": url, "DIAGNOSIS_PATIENCE_S": "0.4", **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)


def mounted(folder: Path, **secrets: Mapping[str, str]) -> dict[str, str]:
    """Writes Secrets as files, and returns the environment variable that has their folder.

    The folder of each Secret also has an entry `..data`, as with the kubelet.
    """
    for name, keys in {"keys": {"keys.json": "{}"}, "control": {"token": "t"}, "redis": {"url": "u"}, **secrets}.items():
        (folder / "secrets" / name).mkdir(parents=True)
        for key, value in {**keys, "..data": ""}.items():
            (folder / "secrets" / name / key).write_text(value)
    return {"DIAGNOSIS_SECRETS": str(folder / "secrets")}


def test_diagnosis_pod_succeeds_on_a_healthy_release(tmp_path: Path, redis: RedisServer) -> None:
    environ = {
        **mounted(tmp_path, prom={"bearerToken": "letmein"}),
        "PROMETHEUS_SECRET": "prom",
        "ROOTSTOCK_REDIS_URL": redis.url,
        "http_proxy": f"http://{HOST}:9",  # a proxy from pod.env that is not running
    }
    with cluster(WELL) as (url, asked):
        done = run(tmp_path, url, {**environ, "API_KEY": "k"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" not in done.stdout and "BROKEN" not in done.stdout
    keys = {path.partition("?")[0].rpartition("/")[2]: key for path, key in asked}
    assert keys["query"] == "Bearer letmein" and keys["server_info"] == "Bearer k" and keys["pods"] == ""


def test_diagnosis_pod_names_several_faults(tmp_path: Path, redis: RedisServer) -> None:
    environ = {**mounted(tmp_path), "ROOTSTOCK_REDIS_URL": redis.url.replace("redis://", "redis://:wrong@")}
    worker = FAULTS["model that cannot be loaded"].facts
    facts = replace(worker, series=series({}), groups=groups("apps"))
    with cluster(facts) as (url, _):
        done = run(tmp_path, url, environ)
    assert done.returncode == 1
    for words in ("BROKEN    redis", "BROKEN    scrape", "BROKEN    scaling", "BROKEN    pods", "WAITING   models".lower()):
        assert words.lower() in done.stdout.lower(), done.stdout
    assert "wrong" not in done.stdout, "the output must not contain the password"


def test_diagnosis_pod_reports_missing_rights(tmp_path: Path, redis: RedisServer) -> None:
    refused = dict.fromkeys(OBJECTS, Answer(403, {"message": 'pods is forbidden: User "x" cannot list resource "pods"'}))
    external = Answer(403, {"message": "rootstock_backlog is forbidden"})
    with cluster(replace(WELL, objects=refused, external=external)) as (url, _):
        done = run(tmp_path, url, {**mounted(tmp_path), "ROOTSTOCK_REDIS_URL": redis.url})
    assert "unknown   api        the test may not list pods: 403 pods is forbidden" in done.stdout
    assert "unknown   scaling    the test may not read external metrics: 403 rootstock_backlog is forbidden" in done.stdout


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("maxmemory", "1", "has no memory left"),
        ("requirepass", "other", "refuses the password: NOAUTH"),
        ("maxmemory-policy", "allkeys-lru", "evicts by allkeys-lru"),
    ],
)
def test_diagnosis_pod_names_the_fault_of_a_redis_server(tmp_path: Path, setting: str, value: str, message: str) -> None:
    server = RedisServer()
    server.start()
    try:
        server.client.config_set(setting, value)
        with cluster(WELL) as (url, _):
            done = run(tmp_path, url, {**mounted(tmp_path), "ROOTSTOCK_REDIS_URL": server.url})
    finally:
        server.kill()
    assert done.returncode == 1 and message in done.stdout, done.stdout


def test_diagnosis_role_allows_only_reading() -> None:
    release = render(VALUES)
    (role,) = [each for each in release.kind("Role") if each["metadata"]["name"] == f"{FULL}-test-diagnosis"]
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list"}
    assert "secrets" not in {each for rule in role["rules"] for each in rule["resources"]}
    # Kubernetes lets an installer create only rights that the installer has. Namespace admins have no rights on
    # external.metrics.k8s.io and keda.sh. The Role therefore has these groups only if autoscaling uses them.
    keda = {"autoscaling": {"engine": "keda", "adapterRules": False}}
    fixed = {"worker": {"autoscaling": {"enabled": False}}}
    for values, asked in (({}, {"external.metrics.k8s.io"}), (keda, {"keda.sh"}), (fixed, set()), ({**keda, **fixed}, set())):
        rules = render(merged(VALUES, values)).get("Role", f"{FULL}-test-diagnosis")["rules"]
        assert {group for rule in rules for group in rule["apiGroups"]} & {"external.metrics.k8s.io", "keda.sh"} == asked
    account = release.get("Pod", f"{FULL}-test-diagnosis")["spec"]["serviceAccountName"]
    users = [each["metadata"]["name"] for each in release.kind("Pod", "Deployment") if account == _account(each)]
    assert users == [f"{FULL}-test-diagnosis"]


def _account(each: Mapping[str, Any]) -> str:
    spec = each["spec"]["template"]["spec"] if "template" in each["spec"] else each["spec"]
    return str(spec["serviceAccountName"])
