"""Tests the image references in pods: registry, repository, tag and digest of every image in values.yaml."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.chart.pods import pod, pods
from tests.chart.release import CHART, REGISTRY, Release, Values, merged, refusal, render
from tests.chart.variants import APART, GPU_RESOURCES, SHARED_CACHE, model

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
MIRROR = "registry.example.com:5000/mirror"
# Values with every kind of pod: both Redis servers, the prefetch Job, waiting pods, tests, prefill and decode workers.
ALL_PODS = merged(
    merged(SHARED_CACHE, APART),
    {
        "modelCache": {"prefetch": {"enabled": True}},
        "models": [model(path="/models/demo", source="org/demo")],
        "state": {"embedded": True},
    },
)


def paths_of(values: Any, way: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the paths of images in values. A map with the key `repository` is an image."""
    if isinstance(values, dict):
        if "repository" in values:
            yield way
        for key, value in values.items():
            yield from paths_of(value, (*way, key))


def for_all_images(**image: str) -> Values:
    found: Values = {}
    for way in paths_of(VALUES):
        over: Any = image
        for key in reversed(way):
            over = {key: over}
        found = merged(found, over)
    return found


def images(release: Release) -> set[str]:
    return {each["image"] for found in pods(release) for each in found.containers()}


def repositories() -> set[str]:
    found = set()
    for way in paths_of(VALUES):
        value: Any = VALUES
        for key in way:
            value = value[key]
        found.add(value["repository"])
    return found


def test_every_image_uses_the_configured_registry() -> None:
    found = images(render(merged(ALL_PODS, {"image": {"registry": f"{MIRROR}/"}})))
    assert {each.removeprefix(f"{MIRROR}/").partition(":")[0] for each in found} == repositories()


def test_image_registry_overrides_the_global_registry() -> None:
    over: Values = {"image": {"registry": MIRROR}, "redis": {"image": {"registry": "docker.io"}}}
    found = images(render(merged(ALL_PODS, over)))
    redis = VALUES["redis"]["image"]
    assert [each for each in found if not each.startswith(f"{MIRROR}/")] == [f"docker.io/{redis['repository']}:{redis['tag']}"]


def test_images_use_digests_when_set() -> None:
    digest = f"sha256:{'ab' * 32}"
    found = images(render(merged(ALL_PODS, for_all_images(digest=digest))))
    assert {each.partition("@")[2] for each in found} == {digest}
    bare = [each.partition("@")[0].removeprefix(f"{REGISTRY}/") for each in found]
    assert {each.partition(":")[0] for each in bare} == repositories()
    named = {each for each in bare if ":" in each}
    assert named == {f"{VALUES[key]['image']['repository']}:{VALUES[key]['image']['tag']}" for key in ("redis", "state")}, (
        "with a digest, a tag is written only if values.yaml sets it"
    )


def test_image_digest_of_a_model_overrides_the_image_tag() -> None:
    digest = f"sha256:{'cd' * 32}"
    over = {"gpus": 1, "resources": GPU_RESOURCES, "image": {"digest": digest}}
    release = render({"models": [model("a"), model("b", worker=over)], "image": {"tag": "1.2.3"}})
    repository = f"{REGISTRY}/{VALUES['worker']['image']['repository']}"
    assert pod(release, "worker", "b").container()["image"] == f"{repository}@{digest}"
    assert pod(release, "worker", "a").container()["image"] == f"{repository}:1.2.3"


UNSET: Values = {"image": {"registry": ""}}
OWN = ("gateway", "tokenizer", "detokenizer", "worker", "modelCache.prefetch", "tests")


@pytest.mark.parametrize("left_out", ["", *OWN])
def test_chart_refuses_images_without_a_registry(left_out: str) -> None:
    values: Values = UNSET
    for way in paths_of(VALUES):
        if ".".join(way).removesuffix(".image") in OWN and ".".join(way) != f"{left_out}.image":
            over: Values = {"registry": MIRROR} if left_out else {}
            for key in reversed(way):
                over = {key: over}
            values = merged(values, over)
    assert 'has no registry, because image.registry is "".' in refusal(values)
    assert "docs/how-to/kubernetes/images.md#registry" in refusal(values)


def test_repository_with_a_registry_needs_no_registry_setting() -> None:
    """Skaffold writes the registry into the repository."""
    values: Values = UNSET
    for way in paths_of(VALUES):
        if ".".join(way).removesuffix(".image") in OWN:
            over: Values = {"repository": f"registry.example.com:5000/{way[0].lower()}"}
            for key in reversed(way):
                over = {key: over}
            values = merged(values, over)
    assert refusal(values) == ""
    for registry in ({}, {"image": {"registry": MIRROR}}):
        found = images(render(merged(values, registry)))
        assert {each for each in found if each.startswith(MIRROR)} == {
            each for each in found if registry and each.startswith(f"{MIRROR}/valkey/")
        }
        assert "registry.example.com:5000/gateway:0.1.0" in found


def test_pull_secrets_accept_names_and_references() -> None:
    release = render({"image": {"pullSecrets": ["a", {"name": "b"}]}})
    assert pod(release, "gateway").spec["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
