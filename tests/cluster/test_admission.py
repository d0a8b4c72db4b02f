"""Every values file of ci/ passes the API server's validation and starts with the resources of this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial

import httpx
import pytest
import yaml

from tests.chart.crd_schemas import HTTP_ROUTE, Schema
from tests.cluster.elsewhere import redis_elsewhere, secret
from tests.cluster.kubernetes import CHART, Cluster, Object, Release
from tests.cluster.overlays import CI, installed
from tests.cluster.side_by_side import collected_names, result_of, side_by_side
from tests.cluster.spaces import namespace

AT_ONCE = 2  # concurrent installations; they start about two dozen processes, and other tests run in parallel
KEY = "sk-of-the-cluster-tests"


@pytest.fixture(scope="module", autouse=True)
def definitions(cluster: Cluster) -> None:
    """Installs CustomResourceDefinitions of the custom resources that the chart renders."""
    if cluster.local:
        cluster.addon("prometheus", "keda")
        cluster.kubectl("apply", "--server-side", "-f", "-", given=json.dumps(definition("httproutes", HTTP_ROUTE)))
        cluster.kubectl("wait", "--for=condition=Established", "crd/httproutes.gateway.networking.k8s.io", "--timeout=30s")


def definition(plural: str, schema: Schema) -> Object:
    """Returns a CustomResourceDefinition from a schema of tests/chart."""
    properties = schema["properties"]
    group, _, version = properties["apiVersion"]["const"].partition("/")
    kind = properties["kind"]["const"]
    named = {"name": version, "served": True, "storage": True}
    spec = {"type": "object", "properties": {"spec": structural(properties["spec"])}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, of the chart's tests"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [{**named, "schema": {"openAPIV3Schema": spec}}],
        },
    }


def structural(schema: Schema) -> Schema:
    """Returns the schema in the form of a CRD, which needs a type at each level. Strict decoding then refuses unknown fields."""
    out = {key: value for key, value in schema.items() if key not in ("$schema", "additionalProperties", "properties", "items")}
    if "enum" in out:
        out["type"] = "string"
    if "properties" in schema:
        out["properties"] = {name: structural(part) for name, part in schema["properties"].items()}
    if "items" in schema:
        out["items"] = structural(schema["items"])
    return out


@pytest.mark.parametrize("name", CI)
def test_api_server_admits_values_file(cluster: Cluster, name: str, proved: Callable[[str], None]) -> None:
    """The API server gives no warning. The namespace's label adds warnings about pods that break restricted Pod Security."""
    with namespace(cluster, f"admitted-{name}") as space:
        cluster.kubectl("label", "namespace", space, "pod-security.kubernetes.io/warn=restricted")
        values = yaml.safe_load(CI[name].read_text())
        prepare(Release(cluster, "rootstock", space, (CI[name],)), values)
        if values.get("serviceAccount", {}).get("create", True):  # for the pods of helm test; a dry run creates no account
            for account in ("rootstock", "rootstock-diagnosis"):
                cluster.kubectl("-n", space, "create", "serviceaccount", account)
        version = cluster.get("--raw", "/version")["gitVersion"]
        rendered = cluster.helm("template", "rootstock", str(CHART), "-n", space, "--kube-version", version, "-f", str(CI[name]))
        output = cluster.kubectl(
            "-n", space, "apply", "--server-side", "--dry-run=server", "--validate=strict", "--warnings-as-errors", "-f", "-",
            given=rendered,
        )  # fmt: skip
    kinds = sorted({line.partition("/")[0].partition(".")[0] for line in output.splitlines() if "serverside-applied" in line})
    assert len(output.splitlines()) == sum(each is not None for each in yaml.safe_load_all(rendered)), output
    proved(f"{name}: {len(output.splitlines())} objects admitted without a warning ({', '.join(kinds)})")


Starts = Mapping[str, Future[tuple[float, dict[str, str]]]]


@pytest.fixture(scope="module")
def starts(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Starts]:
    names = collected_names(request, test_values_file_starts_on_this_machine.__name__)
    with side_by_side({name: partial(start, cluster, name) for name in names}, AT_ONCE) as running:
        yield running


def start(cluster: Cluster, name: str) -> tuple[float, dict[str, str]]:
    """Installs a values file. Returns the seconds until the release is ready, and one completion per model."""
    values = yaml.safe_load(CI[name].read_text())
    with namespace(cluster, f"started-{name}") as space:
        release = Release(cluster, "rootstock", space, ())
        prepare(release, values)
        begun = time.monotonic()
        release.install(installed(name))
        took = time.monotonic() - begun
        keyed = bool(values.get("auth", {}).get("apiKeysSecret"))
        return took, {each["name"]: ask(release, each["name"], keyed) for each in values["models"]}


@pytest.mark.parametrize("name", [each for each in CI if each != "cpu-demo"])
def test_values_file_starts_on_this_machine(name: str, starts: Starts, proved: Callable[[str], None]) -> None:
    """An overlay replaces the GPUs, the registry and the volumes, which this machine lacks. All models are the demo model."""
    took, answers = result_of(starts[name])
    assert answers and set(answers.values()) == {"17 + 25 = 42."}, answers
    proved(f"{name}: up after {took:.0f} s, {' and '.join(answers)} answered")


def prepare(release: Release, values: Object) -> None:
    """Creates the objects that a values file expects: Secrets, the service account and the Redis."""
    auth = values.get("auth", {})
    if auth.get("apiKeysSecret"):
        secret(release, auth["apiKeysSecret"], {"keys.json": json.dumps({"keys": [{"name": "tests", "key": KEY}]})})
    if auth.get("controlTokenSecret"):
        secret(release, auth["controlTokenSecret"], {"token": "a token of the tests, thirty-two long"})
    if password := values.get("state", {}).get("passwordSecret"):
        secret(release, password, {"password": "letters0and0digits0of0the0tests"})
    account = values.get("serviceAccount", {})
    if not account.get("create", True):
        release.kubectl("create", "serviceaccount", account["name"])
    redis = values.get("redis", {})
    if redis.get("externalUrlSecret"):
        port = redis["externalPort"]
        secret(release, redis["externalUrlSecret"], {"url": f"redis://elsewhere:{port}/0"})
        release.kubectl("apply", "-f", "-", given=json.dumps(redis_elsewhere(port)))


def ask(release: Release, model: str, keyed: bool) -> str:
    (url, *_) = release.urls()
    body = {"model": model, "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
    headers = {"Authorization": f"Bearer {KEY}"} if keyed else {}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text
