"""Validates objects for a version of Kubernetes, with kubernetes-validate's strict schemas and those of crd_schemas.py."""

from __future__ import annotations

import functools
import re
from typing import Any

from jsonschema import Draft202012Validator
from kubernetes_validate.utils import latest_version, major_minor, schema_contents
from referencing import Registry, Resource

from tests.chart.crd_schemas import SCHEMAS
from tests.chart.release import Object

LATEST = major_minor(latest_version())
DEFINITIONS = "/api/_definitions.json"
BASE = "https://kubernetes.io"


def faults(each: Object, version: str = LATEST) -> list[str]:
    """Returns the faults of an object.

    Args:
        version: version of Kubernetes, such as "1.29".

    Raises:
        FileNotFoundError: this version of Kubernetes does not have the object's kind.
    """
    validator = _validator(each["apiVersion"], each["kind"], version)
    return [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(each)]


@functools.cache
def _validator(api_version: str, kind: str, version: str) -> Draft202012Validator:
    return Draft202012Validator(_schema(api_version, kind, version), registry=_registry(version))


def _schema(api_version: str, kind: str, version: str) -> dict[str, Any]:
    custom = SCHEMAS.get((api_version, kind))
    if custom is not None:
        return {"$id": f"{BASE}/crds/{kind}.json", **custom}
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    return dict(schema_contents(f"{_folder(version)}/{kind.lower()}-{group}.json", version))


@functools.cache
def _registry(version: str) -> Registry[Any]:
    definitions = schema_contents(f"{_folder(version)}/_definitions.json", version)
    definitions["$id"] = BASE + DEFINITIONS
    known: Registry[Any] = Registry().with_resource(BASE + DEFINITIONS, Resource.from_contents(definitions))
    return known


def _folder(version: str) -> str:
    return f"kubernetes-json-schema/v{version}.0-local-strict"
