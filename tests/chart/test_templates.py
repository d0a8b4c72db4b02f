"""Tests the objects that templates render or omit. The cases are in template_fields.py; a failure shows all differences."""

from __future__ import annotations

import pytest

from tests.chart.pods import pod, pods
from tests.chart.release import REGISTRY, merged, refusal, render
from tests.chart.template_fields import (
    BESIDES,
    CASES,
    EVERY,
    FULL,
    GATEWAYS,
    PREFILL,
    SERVICES,
    WORKER,
    WORKERS,
    Values,
    at,
)
from tests.chart.variants import KEDA, VARIANTS, model


@pytest.mark.parametrize("case", CASES)
def test_rendered_fields_have_the_expected_values(case: str) -> None:
    values, expected = CASES[case]
    release = render(values)
    assert {title: {path: at(release.get(*title.split("/")), path) for path in fields} for title, fields in expected.items()} == (
        expected
    )


def test_template_test_cases_have_unique_names() -> None:
    assert len(CASES) == sum(map(len, (SERVICES, GATEWAYS, WORKERS, BESIDES)))


# Day runs may skip cases, because test_upgrade.py checks the immutable fields of every release.
@pytest.mark.by_day(one_in=3, seed=45)
@pytest.mark.parametrize(
    ("values", "title"),
    [
        (VARIANTS["local-disks"], WORKER),
        (VARIANTS["leader-worker-set"], WORKER),
        ({}, f"Ingress/{FULL}-gateway"),
        ({}, f"HTTPRoute/{FULL}-gateway"),
        ({"worker": {"deletionCost": False}}, f"Role/{FULL}-worker"),
        ({"worker": {"pdb": {"enabled": False}}}, f"PodDisruptionBudget/{FULL}-worker-demo"),
        (merged(VARIANTS["apart"], {"worker": {"pdb": {"enabled": False}}}), f"PodDisruptionBudget/{FULL}-prefill-demo"),
        ({}, PREFILL),
        ({}, f"Service/{FULL}-prefill"),
        ({}, f"NetworkPolicy/{FULL}-prefill"),
        ({}, f"NetworkPolicy/{FULL}-decode"),
        (VARIANTS["apart"], f"HorizontalPodAutoscaler/{FULL}-prefill-demo"),
        (merged(VARIANTS["apart"], VARIANTS["open-network"]), f"NetworkPolicy/{FULL}-decode"),
        (VARIANTS["apart-in-one-of-two-models"], f"Deployment/{FULL}-prefill-small"),
        (VARIANTS["monitoring"], f"ConfigMap/{FULL}-dashboard-prefill-and-decode"),
        (VARIANTS["monitoring"], f"ConfigMap/{FULL}-dashboard-gpus"),
        (KEDA, f"TriggerAuthentication/{FULL}-prometheus"),
        ({"tests": {"diagnose": False}}, f"Role/{FULL}-test-diagnosis"),
        ({"tests": {"diagnose": False}}, f"ServiceAccount/{FULL}-diagnosis"),
        ({"gateway": {"pdb": {"enabled": False}}}, f"PodDisruptionBudget/{FULL}-gateway"),
        (VARIANTS["redis-elsewhere"], f"Deployment/{FULL}-redis"),
        (VARIANTS["redis-elsewhere"], f"Service/{FULL}-redis"),
        ({}, f"StatefulSet/{FULL}-state"),
        ({}, f"Secret/{FULL}-state"),
        (VARIANTS["kept-in-a-claim"], f"Secret/{FULL}-state"),
        (VARIANTS["existing-claim"], f"PersistentVolumeClaim/{FULL}-models"),
        (VARIANTS["no-account"], f"ServiceAccount/{FULL}"),
        ({"tests": {"enabled": False}}, f"Pod/{FULL}-test-chat"),
        ({"auth": {"apiKeysSecret": "k"}}, f"Pod/{FULL}-test-chat"),
    ],
)
def test_objects_that_the_values_do_not_enable_are_not_rendered(values: Values, title: str) -> None:
    assert not render(values).has(*title.split("/"))


def test_cooldown_of_a_million_seconds_is_a_whole_number() -> None:
    """A template prints such a number as 1e+06, which the API server refuses for a field of type integer."""
    values = merged(VARIANTS["keda"], {"worker": {"autoscaling": {"cooldownSeconds": 1_000_000}}})
    scaler = render(values).get("ScaledObject", f"{FULL}-worker-demo")
    for name in ("cooldownPeriod", "initialCooldownPeriod"):
        assert (type(scaler["spec"][name]), scaler["spec"][name]) == (int, 1_000_000)


@pytest.mark.parametrize(
    ("values", "served"), [({}, "false"), ({"gateway": {"playground": True}}, "true")], ids=["default", "on"]
)
def test_playground_is_served_when_enabled(values: Values, served: str) -> None:
    assert render(values).get("ConfigMap", f"{FULL}-gateway")["data"]["ROOTSTOCK_PLAYGROUND"] == served


CHECKSUM = "spec template metadata annotations checksum/config"


@pytest.mark.by_day(one_in=2, seed=25)
@pytest.mark.parametrize(
    ("change", "restarted"),
    [
        ({"gateway": {"settings": {"retry_after_s": 9}}}, {"gateway"}),
        ({"worker": {"settings": {"page_size": 32}}}, {"worker"}),
        ({"tokenizer": {"settings": {"encode_threads": 3}}}, {"tokenizer"}),
        ({"models": [model(worker={"settings": {"page_size": 32}})]}, {"worker"}),
        ({"logLevel": "debug"}, set(EVERY)),
        ({"gateway": {"replicas": 7}, "worker": {"replicas": 7}}, set()),
        ({"monitoring": {"podMonitor": {"enabled": True}}}, set()),
        (VARIANTS["apart"], {"worker", "gateway"}),
    ],
)
def test_changed_settings_restart_only_their_pods(change: Values, restarted: set[str]) -> None:
    before, after = render({}), render(change)
    changed = {
        name
        for name, title in EVERY.items()
        if at(before.get(*title.split("/")), CHECKSUM) != at(after.get(*title.split("/")), CHECKSUM)
    }
    assert changed == restarted
    templates = {
        name
        for name, title in EVERY.items()
        if before.get(*title.split("/"))["spec"]["template"] != after.get(*title.split("/"))["spec"]["template"]
    }
    assert templates == restarted


@pytest.mark.parametrize("pool", ["worker", "prefill"])
def test_prefill_and_decode_workers_use_the_kv_certificate(pool: str) -> None:
    there = {"kvTlsSecret": "kv"}
    release = render(merged(VARIANTS["apart"], {"worker": there}))
    title = f"{FULL}-{pool}-demo"
    spec = release.get("Deployment", title)["spec"]["template"]["spec"]
    (mount,) = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "kv-tls"]
    (volume,) = [each for each in spec["volumes"] if each["name"] == "kv-tls"]
    assert volume["secret"]["secretName"] == "kv" and mount["readOnly"]
    config = release.get("ConfigMap", title)["data"]
    files = {name: config[f"ROOTSTOCK_DISAGGREGATION_TLS_{name}_FILE"] for name in ("CERT", "KEY", "CA")}
    ends = {"CERT": "tls.crt", "KEY": "tls.key", "CA": "ca.crt"}
    assert files == {name: f"{mount['mountPath']}/{end}" for name, end in ends.items()}
    whole = render({"worker": there})
    assert "kv-tls" not in str(whole.get("Deployment", f"{FULL}-worker-demo"))


def test_pods_of_jobs_and_tests_get_the_common_pod_values() -> None:
    """The pods of Jobs and tests get the values of `pod`. Sidecars end with these pods; a download's proxy overrides pod.env."""
    sidecar = {"name": "mesh", "image": "mesh:1"}
    variables = {"https_proxy": "http://all:1", "HTTP_PROXY": "http://all:1", "LANG": "C"}
    common = {"containers": [sidecar], "env": [{"name": name, "value": value} for name, value in variables.items()]}
    fetching = VARIANTS["tokenizers-fetched"]
    release = render(merged(fetching, {"pod": common}))
    ending = [each for each in pods(release) if each.component in ("prefetch", "test")]
    assert len(ending) == 4
    for each in ending:
        assert len(each.spec["containers"]) == 1
        assert [(one["name"], one["restartPolicy"]) for one in each.spec["initContainers"]] == [("mesh", "Always")]
    tokenizer = pod(release, "tokenizer")
    assert [each["name"] for each in tokenizer.spec["containers"]] == ["tokenizer", "mesh"]
    job = pod(release, "prefetch")
    assert (job.spec["nodeSelector"], job.spec["tolerations"][0]["key"]) == ({"disk": "fast"}, "gpu")
    assert job.container()["image"] == f"{REGISTRY}/rootstock/tokenizer:0.1.0"
    assert job.owner["spec"]["backoffLimit"] > 1_000_000, "the Job must retry until its Secret is correct"
    env = {each["name"]: each.get("value") for each in job.container()["env"]}
    assert env["HF_ENDPOINT"] == "https://hub.example.com" and env["AWS_ENDPOINT_URL"] == "http://minio.storage.svc:9000"
    assert env["GCS_ENDPOINT"] == "http://gcs.storage.svc:9000" and env["CA_FILE"] == "/etc/rootstock/ca/ca.crt"
    own = {"HTTPS_PROXY": "http://proxy.example.com:3128", "HTTP_PROXY": "http://proxy.example.com:3128"}
    assert proxies(pod(release, "prefetch").container()) == proxies(tokenizer.spec["initContainers"][0]) == own
    without = render(merged(fetching, {"pod": common, "modelCache": {"prefetch": {"proxy": ""}}}))
    assert proxies(pod(without, "prefetch").container()) == proxies(pod(without, "tokenizer").spec["initContainers"][0])
    assert proxies(pod(without, "prefetch").container()) == {"https_proxy": "http://all:1", "HTTP_PROXY": "http://all:1"}
    twice = {"modelCache": {"prefetch": {"pod": {"env": [{"name": "HTTPS_PROXY", "value": "http://other:1"}]}}}}
    assert "prefetch: pod.env sets HTTPS_PROXY" in refusal(merged(fetching, twice))


def proxies(container: Values) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"] if each["name"].upper() in ("HTTPS_PROXY", "HTTP_PROXY")}
