"""Records the immutable fields of every object of a release. An upgrade that changes an immutable field fails.

python -m tests.chart.immutable adds missing objects to immutable.json, and refuses to change existing ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.chart.release import Object, Release, render, title
from tests.chart.variants import VARIANTS

GOLDEN = Path(__file__).with_name("immutable.json")
# Dotted paths by kind of object. An upgrade must not change the value at such a path.
FIELDS: dict[str, tuple[str, ...]] = {
    "Deployment": ("spec.selector",),
    "StatefulSet": ("spec.selector", "spec.serviceName", "spec.podManagementPolicy", "spec.volumeClaimTemplates"),
    "LeaderWorkerSet": ("spec.leaderWorkerTemplate.size", "spec.networkConfig"),
    "Job": ("spec.selector", "spec.completionMode", "spec.completions"),
    "Service": ("spec.clusterIP", "spec.selector", "spec.ports"),
    "PersistentVolumeClaim": ("spec.accessModes", "spec.storageClassName", "spec.volumeName", "spec.volumeMode", "spec.selector"),
    "RoleBinding": ("roleRef",),
    "PodDisruptionBudget": ("spec.selector",),
    "HorizontalPodAutoscaler": ("spec.scaleTargetRef",),
    "ScaledObject": ("spec.scaleTargetRef",),
}
Fixed = dict[str, dict[str, Any]]
# Names of value sets whose releases are recorded. Unlike the examples of charts/rootstock/ci, these value sets never change.
NAMES = (
    "defaults",
    "two-models",
    "local-disks",
    "tiers-in-claims",
    "leader-worker-set",
    "prefetch",
    "hpa",
    "keda",
    "apart",
    "apart-on-local-disks",
    "apart-by-hpa",
    "apart-by-keda",
    "discovery",
    "named",
    "long-names",
)


def fixed_fields(release: Release) -> Fixed:
    """Returns the fields that an upgrade must not change, by the title of the object.

    Kubernetes allows changes of a Service's selector and ports, but they would break connected clients.
    """
    return {title(each): _of(each) for each in release.objects if each["kind"] in FIELDS and not replaced_at_upgrade(each)}


def replaced_at_upgrade(each: Object) -> bool:
    """Returns whether Helm deletes and recreates the object at each upgrade, as it does for hooks with before-hook-creation."""
    annotations = each["metadata"].get("annotations") or {}
    return "helm.sh/hook" in annotations and "before-hook-creation" in annotations.get(
        "helm.sh/hook-delete-policy", "before-hook-creation"
    )


def _of(each: Object) -> dict[str, Any]:
    found = {path: _at(each, path.split(".")) for path in FIELDS[each["kind"]]}
    if each["kind"] == "Job":
        found["spec.template"] = each["spec"]["template"]
    return found


def _at(value: Any, path: list[str]) -> Any:
    for key in path:
        value = (value or {}).get(key)
    return value


def releases() -> dict[str, Release]:
    return {name: render(VARIANTS.get(name, {})) for name in NAMES}


def golden() -> dict[str, Fixed]:
    return dict(json.loads(GOLDEN.read_text())) if GOLDEN.exists() else {}


def differences(old: dict[str, Fixed], new: dict[str, Fixed]) -> list[str]:
    """Returns a message per changed field of the objects that are in both recordings."""
    return [
        f"{name}: {each}: {path} was {json.dumps(value)}, is {json.dumps(new[name][each].get(path))}"
        for name, objects in old.items()
        if name in new
        for each, fields in objects.items()
        if each in new[name]
        for path, value in fields.items()
        if new[name][each].get(path) != value
    ]


def current() -> dict[str, Fixed]:
    """Returns the content of immutable.json for the present chart.

    The content omits Jobs, because a changed Job gets a new name. For every value set except `defaults`, it also omits objects
    that are equal to those of `defaults`.
    """
    found = {name: fixed_fields(release) for name, release in releases().items()}
    usual = found[NAMES[0]]
    return {
        name: {
            each: fields
            for each, fields in objects.items()
            if not each.startswith("Job/") and (name == NAMES[0] or usual.get(each) != fields)
        }
        for name, objects in found.items()
    }


def main() -> int:
    old, new = golden(), current()
    changed = differences(old, new)
    if changed:
        print("\n".join(["An upgrade would fail, because these immutable fields change:", *changed]), file=sys.stderr)
        return 1
    kept = {name: {**new.get(name, {}), **old.get(name, {})} for name in sorted({*old, *new})}
    GOLDEN.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
