"""Renders the chart with Helm's engine: values in, Kubernetes objects out."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

REPO = Path(__file__).resolve().parents[2]
CHART = REPO / "charts" / "rootstock"
CI_FILES = sorted((CHART / "ci").glob("*-values.yaml"))
DEFAULTS = "defaults"
NAME, NAMESPACE = "llm", "serving"
BACKLOG = "rootstock_backlog_serving_llm_rootstock"  # the external metric; its name is unique per release
MINIMAL_KUBE = "1.29"  # from Chart.yaml's kubeVersion; test_objects.py compares both

Values = Mapping[str, Any]
REGISTRY = "registry.example.com"
INSTALLABLE: Values = {"image": {"registry": REGISTRY}}  # values that every installation must set
Object = dict[str, Any]


def ci_names() -> list[str]:
    """Returns DEFAULTS and the names of the values files in charts/rootstock/ci."""
    return [DEFAULTS, *(path.name.removesuffix("-values.yaml") for path in CI_FILES)]


def ci_values(name: str) -> dict[str, Any]:
    if name == DEFAULTS:
        return {}
    loaded = yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text())
    return dict(loaded or {})


def merged(base: Values, over: Values) -> dict[str, Any]:
    """Merges values like `helm -f base -f over`: maps are merged key by key, other values are replaced."""
    out = copy.deepcopy(dict(base))
    for key, value in over.items():
        out[key] = merged(out[key], value) if isinstance(value, Mapping) and isinstance(out.get(key), Mapping) else value
    return out


@dataclass(frozen=True)
class Release:
    objects: tuple[Object, ...]
    notes: str

    def get(self, kind: str, name: str) -> Object:
        found = [each for each in self.objects if each["kind"] == kind and each["metadata"]["name"] == name]
        assert len(found) == 1, f"the release has {len(found)} objects {kind}/{name}: {[title(each) for each in self.objects]}"
        return found[0]

    def has(self, kind: str, name: str) -> bool:
        return any(each["kind"] == kind and each["metadata"]["name"] == name for each in self.objects)

    def kind(self, *kinds: str) -> Iterator[Object]:
        return (each for each in self.objects if each["kind"] in kinds)


def repeatable(objects: Iterable[Object]) -> list[Object]:
    """Replaces generated passwords of the chart's Redis servers. Without a cluster, each rendering has different ones."""
    return [
        each | {"data": {**each["data"], "password": "made once"}}
        if each["kind"] == "Secret" and "password" in each.get("data", {})
        else each
        for each in objects
    ]


def title(each: Object) -> str:
    return f"{each['kind']}/{each['metadata']['name']}"


def render(values: Values | None = None, *, chart: Path = CHART, upgrade: bool = False, name: str = NAME) -> Release:
    """Renders the chart with `values` on top of INSTALLABLE.

    Raises:
        helm.HelmError: the chart refuses the values. The message is that of `helm install`.
    """
    return _render(json.dumps(merged(INSTALLABLE, values or {}), sort_keys=True), chart, upgrade, name)


def render_ci(name: str, over: Values | None = None) -> Release:
    return render(merged(ci_values(name), over or {}))


def render_anew(values: Values) -> Release:
    """Renders like render(), but not from the cache, so that generated passwords are new."""
    return _render.__wrapped__(json.dumps(merged(INSTALLABLE, values), sort_keys=True), CHART, False, NAME)


@functools.lru_cache(maxsize=256)
def _render(values: str, chart: Path, upgrade: bool, name: str) -> Release:
    manifests = _loaded(chart).render(
        json.loads(values),
        name=name,
        namespace=NAMESPACE,
        is_install=not upgrade,
        is_upgrade=upgrade,
        revision=2 if upgrade else 1,
    )
    objects: list[Object] = []
    for path, text in sorted(manifests.items()):
        if path.endswith("NOTES.txt"):
            continue
        objects.extend(document for document in yaml.load_all(text, Loader=UniqueKeys) if document)
    notes = next((text for path, text in manifests.items() if path.endswith("NOTES.txt")), "")
    return Release(tuple(objects), notes)


@functools.cache
def _loaded(chart: Path) -> helm.Chart:
    return helm.Chart.load(chart)


def refusal(values: Values, name: str = NAME) -> str:
    """Returns the message with which the schema or the templates refuse these values; "" if `helm install` accepts them."""
    return _refusal(json.dumps(values), name)


@functools.lru_cache(maxsize=4096)
def _refusal(values: str, name: str) -> str:
    try:
        _loaded(CHART).validate_schema(merged(INSTALLABLE, json.loads(values)))
        render(json.loads(values), name=name)
    except helm.HelmError as error:
        return str(error)
    return ""


def lint_findings(values: Values) -> list[str]:
    """Returns the findings of `helm lint --strict`."""
    report = helm.lint(CHART, dict(values), strict=True, namespace=NAMESPACE)
    return [f"{each['path']}: {each['error']}" for each in report["messages"] if each["severity"] >= 2] + list(report["errors"])


class UniqueKeys(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A YAML loader that refuses duplicate keys, like the API server. PyYAML's own loader uses the last value instead."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate keys in one map: {twice}", node.start_mark)
        return dict(super().construct_mapping(node, deep=deep))
