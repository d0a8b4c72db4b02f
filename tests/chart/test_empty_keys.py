"""Tests empty keys of values files: the chart renders without the default, or refuses the key by its name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import pytest
import yaml

from tests.chart.pods import pod
from tests.chart.release import CHART, Release, ci_values, merged, refusal, render
from tests.chart.variants import GPU_RESOURCES, VARIANTS, model, values_of
from tests.night import NIGHTLY

Way = tuple[str | int, ...]
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
ONE_IN = 1 if NIGHTLY else 24  # one in this many keys is tested
FULL = "llm-rootstock"
WORKER = f"Deployment/{FULL}-worker-demo"
FILES = {
    "defaults": (VALUES, {}),
    "eight-gpus-two-models": (ci_values("eight-gpus-two-models"),) * 2,
    "operators-overlay": (merged(ci_values("cpu-demo"), ci_values("operators-overlay")),) * 2,
    **{name: (values_of(name),) * 2 for name in ("prefill-and-decode", "tokenizers-fetched", "encrypted", "keda-with-a-token")},
}


def paths_of(values: Any, way: Way = ()) -> Iterator[Way]:
    """Yields the path of every key, also in entries of lists."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield (*way, key)
            yield from paths_of(value, (*way, key))
    if isinstance(values, list):
        for index, entry in enumerate(values):
            yield from paths_of(entry, (*way, index))


def with_empty_key(values: dict[str, Any], way: Way) -> dict[str, Any]:
    out = copy.deepcopy(values)
    place: Any = out
    if way[0] not in out and any(isinstance(part, int) for part in way):  # lists are replaced as a whole
        out[str(way[0])] = copy.deepcopy(VALUES[str(way[0])])
    for key in way[:-1]:
        place = place[key] if isinstance(place, list) else place.setdefault(key, {})
    place[way[-1]] = None
    return out


def written(way: Way) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in way)
    return text.removeprefix(".")


def has_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(has_null, value.values()))
    return any(map(has_null, value)) if isinstance(value, list) else value is None


def fault(values: dict[str, Any], way: Way) -> str:
    """Renders values whose key at `way` is empty. Returns a message if the chart misbehaves, or "".

    The chart must render without nulls, or its refusal must name the empty key or a key below it.
    """
    message = refusal(values)
    if message.startswith("execution error at (rootstock/templates/") and 'executing "' not in message:
        return "" if written(way) in message or str(way[-1]) in message else f"another key is named: {message}"
    if message.startswith("rootstock:\n- at '/"):  # a message of the schema
        return "" if "/".join(map(str, way)) in message and message.count("\n") <= 3 else message
    if message:
        return message
    release = render(values)
    found = [each["metadata"]["name"] for each in release.objects if has_null(each)]
    texts = [text for text in (release.notes, str(release.objects)) if "<nil>" in text or "<no value>" in text]
    return f"null in {found} {texts}" if found or texts else ""


@pytest.mark.parametrize("file", FILES)
def test_chart_renders_or_the_error_names_the_key_when_a_key_is_empty(file: str) -> None:
    source, given = FILES[file]
    found = sorted(paths_of(source), key=lambda way: crc32(written(way).encode()))
    chosen = found[: -(-len(found) // ONE_IN)]
    assert {written(way): why for way in chosen if (why := fault(with_empty_key(given, way), way))} == {}


def without(**values: Any) -> Release:
    return render(values)


EMPTY: dict[str, tuple[dict[str, Any], str]] = {
    "number": (
        {"gateway": {"replicas": None}},
        "gateway.replicas is empty, which removes its default, and it needs a value. Set",
    ),
    "switch that is on by default": ({"networkPolicy": {"enabled": None}}, "networkPolicy.enabled is empty"),
    "block": (
        {"redis": None},
        "redis is empty, which removes the defaults of all its keys, and redis.embedded needs a value.",
    ),
    "list": ({"models": None}, "models is empty"),
    "entry": ({"models": [model(worker={"replicas": None})]}, "models[0].worker.replicas is empty"),
    "number of an enabled block": (
        {"gateway": {"autoscaling": {"enabled": True, "maxReplicas": None}}},
        "gateway.autoscaling.maxReplicas is empty",
    ),
    "port of an external Redis": (
        {"redis": {"embedded": False, "externalUrlSecret": "url", "externalPort": None}},
        "redis.externalPort is empty",
    ),
    "tag of a third-party image": ({"redis": {"image": {"tag": None}}}, "redis.image.tag is empty"),
}


@pytest.mark.parametrize("case", EMPTY)
def test_chart_refuses_an_empty_key_when_a_value_is_needed(case: str) -> None:
    values, sentence = EMPTY[case]
    assert sentence in refusal(values)


def test_empty_resources_remove_requests_and_limits() -> None:
    assert pod(render({"worker": {"resources": None}}), "worker").container()["resources"] == {"limits": {}, "requests": {}}


def test_empty_resources_of_a_model_remove_the_workers_resources() -> None:
    release = render({"models": [model("a"), model("b", worker={"resources": {"requests": None}})]})
    assert pod(release, "worker", "b").container()["resources"]["requests"] == {}
    assert pod(release, "worker", "a").container()["resources"]["requests"]


def test_feature_is_off_when_its_block_of_values_is_empty_and_off_is_the_default() -> None:
    off = {"tls": {"certManager": None}, "ingress": None, "httpRoute": None, "tracing": None, "state": None}
    release = render({**off, "gateway": {"autoscaling": None, "settings": None}, "worker": {"kvTiers": None, "prefill": None}})
    kinds = {each["kind"] for each in release.objects}
    assert not kinds & {"Ingress", "HTTPRoute", "Certificate", "HorizontalPodAutoscaler", "StatefulSet"}


def test_rollout_uses_kubernetes_defaults_when_the_strategy_is_empty() -> None:
    spec = render({"gateway": {"strategy": {"maxSurge": None, "maxUnavailable": None}}}).get("Deployment", f"{FULL}-gateway")[
        "spec"
    ]
    assert spec["strategy"] == {"type": "RollingUpdate"}


def test_pods_have_no_pull_policy_and_no_tolerations_when_these_keys_are_empty() -> None:
    found = pod(render({"image": {"pullPolicy": None}, "worker": {"nodeLostSeconds": None}}), "worker")
    assert "imagePullPolicy" not in found.container() and not found.spec.get("tolerations")


def test_chart_omits_a_setting_without_a_value() -> None:
    values = {"models": [model(worker={"settings": {"schedule_policy": None, "page_size": 32}})]}
    data = render(merged({"worker": {"settings": {"schedule_policy": "lpm"}}}, values)).get("ConfigMap", f"{FULL}-worker-demo")[
        "data"
    ]
    assert data["ROOTSTOCK_PAGE_SIZE"] == "32" and "ROOTSTOCK_SCHEDULE_POLICY" not in data


def test_empty_security_context_is_removed() -> None:
    release = render({"pod": {"containerSecurityContext": None}, "worker": {"pod": {"securityContext": None}}})
    assert "securityContext" not in pod(release, "worker").spec and "securityContext" not in pod(release, "gateway").container()
    gpu = {"gpus": 1, "resources": GPU_RESOURCES, "pod": {"containerSecurityContext": None}}
    assert "securityContext" not in pod(render({"models": [model(worker=gpu)]}), "worker").container()


def test_every_template_begins_with_the_include_of_rootstock_values() -> None:
    templates = [path for path in (CHART / "templates").rglob("*") if path.is_file() and not path.name.startswith("_")]
    first = '{{- include "rootstock.values" . -}}\n'
    assert [path.name for path in templates if not path.read_text().startswith(first)] == [] and len(templates) > 50


def test_prefetch_image_is_required_when_pods_download() -> None:
    values = merged(VARIANTS["fetched-by-pods"], {"modelCache": {"prefetch": {"image": {"repository": None}}}})
    assert "modelCache.prefetch.image.repository is empty" in refusal(values)
