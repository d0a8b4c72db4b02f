"""Tests the containers of the CPU demo as processes, with their exact commands and environment and the kubelet's probes."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from charts.rootstock.scripts.diagnosis.checks import diagnose
from charts.rootstock.scripts.diagnosis.install import Install
from charts.rootstock.scripts.diagnosis.look import look
from rootstock_llm.kernels.cpu.build import built_library
from rootstock_llm.services.local.ports import HOST
from tests.chart.kubelet import Machine, Running
from tests.chart.pods import PodTemplate, pod, pods
from tests.chart.release import Release, ci_names, render_ci

COMPONENTS = ("redis", "tokenizer", "detokenizer", "worker", "gateway")
SECRETS = {
    "llm-rootstock-redis": {"password": "letters"},
    "llm-control": {"token": "secret"},
    "llm-api-keys": {"keys.json": '{"keys": []}'},
}
ACCESS = {"auth": {"controlTokenSecret": "llm-control"}, "gateway": {"preStopSeconds": 1, "settings": {"admin_port": 8001}}}
START_S = 120.0


@pytest.fixture(scope="module")
def release() -> Release:
    return render_ci("cpu-demo" if "cpu-demo" in ci_names() else "defaults", ACCESS)


@pytest.fixture(scope="module")
def machine(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(release, tmp_path_factory.mktemp("pods"), SECRETS)


@pytest.fixture(scope="module")
def gateway_alone(machine: Machine) -> Iterator[Running]:
    with started(machine, pod(machine.release, "gateway")) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def running(machine: Machine, gateway_alone: Running) -> Iterator[dict[str, Running]]:
    built_library()  # builds the kernels before the start, because images contain built kernels
    found = {"gateway": gateway_alone}
    with contextlib.ExitStack() as stack:
        for component in COMPONENTS[:-1]:
            found[component] = stack.enter_context(started(machine, pod(machine.release, component)))
        for each in found.values():
            if "startupProbe" in each.container:
                each.wait_for("startupProbe", START_S)
            each.wait_for("readinessProbe", START_S)
        yield found


@contextlib.contextmanager
def started(machine: Machine, each: PodTemplate) -> Iterator[Running]:
    for container in each.spec.get("initContainers", []):
        first = machine.start(each, container)
        assert first.status_of_exit(START_S) == 0, first.text()
    process = machine.start(each, each.container())
    try:
        yield process
    finally:
        process.kill()


def test_gateway_is_ready_when_no_other_service_runs(gateway_alone: Running) -> None:
    gateway_alone.wait_for("startupProbe", START_S)
    gateway_alone.wait_for("readinessProbe", 5)
    assert gateway_alone.status("http", "/readiness") == 503


@pytest.mark.parametrize("component", COMPONENTS)
def test_liveness_and_readiness_probes_pass(running: dict[str, Running], component: str) -> None:
    container = running[component].container
    for key in ("livenessProbe", "readinessProbe"):
        assert running[component].passes(container[key]), f"{key}: {running[component].text()}"


@pytest.mark.parametrize("component", COMPONENTS)
def test_containers_listen_on_the_declared_ports(running: dict[str, Running], component: str) -> None:
    each = running[component]
    for name, port in each.pod.ports().items():
        assert each.passes({"tcpSocket": {"port": port}}), f"{name} {port}: {each.text()}"


@pytest.mark.parametrize("component", COMPONENTS[1:])
def test_metrics_ports_serve_metrics(running: dict[str, Running], component: str) -> None:
    assert running[component].status("metrics", "/metrics") == 200


def test_admin_api_reaches_the_discovered_worker(machine: Machine, running: dict[str, Running]) -> None:
    running["gateway"].wait(lambda: running["gateway"].status("http", "/readiness") == 200, "the gateway's peers", START_S)
    url = f"http://{HOST}:{machine.ports['gateway', 8001]}"
    assert httpx.post(f"{url}/flush_cache").status_code == 401
    with httpx.Client(
        base_url=url, headers={"authorization": f"Bearer {SECRETS['llm-control']['token']}"}, timeout=30
    ) as operator:
        for name in (None, "llm-rootstock-worker-demo-0"):
            answer = operator.post("/flush_cache", json={"worker": name})
            assert answer.status_code == 200, answer.text
            (worker,) = answer.json()["workers"]
            assert worker["worker"] == "llm-rootstock-worker-demo-0" and worker["ok"]
        assert operator.get("/get_load").json()["workers"][0]["result"]["usable"]
        ended = operator.post("/abort_request", json={"abort_all": True})
        assert ended.json() == {"success": True, "aborted": 0, "gateways": 1, "unreached": []}


def test_helm_tests_pass(machine: Machine, running: dict[str, Running]) -> None:
    """Runs the pods of `helm test` except the diagnosis, which needs an API server (test_diagnosis.py)."""
    running["gateway"].wait(lambda: running["gateway"].status("http", "/readiness") == 200, "the gateway's peers", START_S)
    tests = [each for each in pods(machine.release) if "helm.sh/hook" in each.owner["metadata"].get("annotations", {})]
    tests = [each for each in tests if not each.owner["metadata"]["name"].endswith("-diagnosis")]
    assert tests
    for each in tests:
        for container in each.spec["containers"]:
            test = machine.start(each, container)
            assert test.status_of_exit(START_S) == 0, f"{each.role}: {test.text()}"


def test_diagnosis_reads_the_services_responses(machine: Machine, running: dict[str, Running]) -> None:
    """Runs the diagnosis against a real gateway, tokenizer, detokenizer and Redis, without an API server."""
    running["gateway"].wait(lambda: running["gateway"].status("http", "/readiness") == 200, "the gateway's peers", START_S)
    (diagnosis,) = [each for each in machine.release.kind("ConfigMap") if each["metadata"]["name"].endswith("-test-diagnosis")]
    install = Install.of({**json.loads(diagnosis["data"]["install.json"]), "services": {}})
    password = SECRETS["llm-rootstock-redis"]["password"]
    environ = {"ROOTSTOCK_REDIS_URL": f"redis://:{password}@{HOST}:{machine.ports['redis', 6379]}/0"}
    facts = look(install, f"http://{HOST}:{machine.ports['gateway', 8000]}", environ)
    found = {each.check: each for each in diagnose(install, facts)}
    assert (found["models"].what, found["redis"].state) == ("1 of 1 models have workers", "ok"), found
    assert list(facts.texts) == ["demo"], "the diagnosis must send a text through the model's tokenizer and detokenizer"
    assert (found["api"].state, found["api"].what.partition(":")[0]) == ("BROKEN", "the API server does not respond")


class Broken(BaseHTTPRequestHandler):
    """A gateway that responds with status 500."""

    def do_POST(self) -> None:
        self.send_error(500)


def test_helm_test_fails_when_the_gateway_fails(release: Release, tmp_path: Path) -> None:
    elsewhere = Machine(release, tmp_path, SECRETS)
    chat = next(each for each in pods(release) if each.owner["metadata"]["name"].endswith("-test-chat"))
    with HTTPServer((HOST, elsewhere.ports["gateway", 8000]), Broken) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            test = elsewhere.start(chat, chat.container())
            assert test.status_of_exit(START_S) == 1, test.text()
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("component", ["gateway", "worker", "detokenizer", "tokenizer", "redis"])
def test_pods_end_cleanly_within_their_grace_period(running: dict[str, Running], component: str) -> None:
    each = running[component]
    assert each.stop(each.pod.spec["terminationGracePeriodSeconds"]) == 0, each.text()
    assert "Traceback" not in each.text()
