"""python -m charts.rootstock.values_schema writes charts/rootstock/values.schema.json, with `settings` from the settings classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from charts.rootstock import schema_around
from charts.rootstock.schema_words import (
    ANY_OBJECT,
    BOOLEAN,
    SECRET,
    SHARE,
    STRINGS,
    Schema,
    array,
    choice,
    closed,
    integer,
    number,
    ref,
    string,
)
from rootstock_llm.services.local.reference import SERVICES
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.settings import ENV_PREFIX

# Settings that the chart derives from other values. They are refused in `settings`.
_EVERYWHERE = {"host", "port", "health_port", "grace_s", "otlp_endpoint"}
_EVERYWHERE |= {f"mtls_{name}_file" for name in ("cert", "key", "ca", "token")}
_CODEC = _EVERYWHERE | {"metrics_host", "metrics_port", "model", "served_model_name"}
DERIVED: dict[str, set[str]] = {
    "gateway": _EVERYWHERE
    | {"tokenizers", "detokenizers", "workers", "redis_url", "state_redis_url", "models", "queue_timeout_s"}
    | {"metrics_host", "metrics_port", "tls_cert_file", "tls_key_file"}
    | {"peer_host", "peer_port", "peers", "playground", "stop_delay_s"}
    | {"model_name", "api_keys_file", "control_token", "control_token_file"},
    "tokenizer": _CODEC,
    "detokenizer": _CODEC,
    "worker": _CODEC
    | {"control_host", "control_port", "control_token", "control_token_file"}
    | {"redis_url", "worker_id", "pod_name", "pod_namespace"}
    | {"disaggregation_mode", "disaggregation_host", "disaggregation_port"}
    | {f"disaggregation_tls_{name}_file" for name in ("cert", "key", "ca")},
}
FOREIGN = "x-foreign-key"  # marks a key of another chart, which the schema accepts so that the templates can refuse it with advice
_COPIED = ("type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern", "description")
_QUANTITY = r"^([0-9]+(\.[0-9]+)?)([EPTGM]i?|Ki|k|m)?$"
_REGISTRY = r"^([A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?(/[a-z0-9._-]+)*/?)?$"  # host and optionally a folder, without a scheme
_MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$"
_SOURCE = r"^([A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)?(@[A-Za-z0-9._/-]+)?|(s3|gs)://[a-z0-9][a-z0-9._-]*(/.*)?)?$"
_LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
_DIGEST = "^[0-9A-Fa-f]{64}$"
_MOMENT = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(Z|[+-][0-9]{2}:[0-9]{2})$"  # RFC 3339
_NAME = r"^([a-z]([-a-z0-9]*[a-z0-9])?)?$"  # names of Services
# Keys that services have outside of `pod` (podLabels, nodeSelector, ...), and that their `pod` does not have.
_OF_SERVICES = ("labels", "annotations", "env", "nodeSelector", "tolerations", "affinity", "priorityClassName")


def settings_schema(service: str) -> Schema:
    """Returns the schema of a component's `settings`: the fields of the settings class that the chart does not derive."""
    document = SERVICES[service].model_json_schema()
    definitions = document.get("$defs", {})
    fields = {name: _field(field, definitions) for name, field in document["properties"].items() if name not in DERIVED[service]}
    return closed(fields)


def _env(service: str) -> Schema:
    """Returns the schema of a component's `extraEnv`.

    It allows other programs' variables, and settings that the chart does not derive. Templates require a Secret for settings.
    """
    names = [f"{ENV_PREFIX}{name.upper()}" for name in settings_schema(service)["properties"]]
    ours = {"anyOf": [{"not": {"pattern": f"^{ENV_PREFIX}"}}, {"enum": names}]}
    return {"allOf": [ref("env"), {"properties": {"name": ours}}]}


def _field(field: Schema, definitions: dict[str, Schema]) -> Schema:
    reference = field.get("$ref") or next((part["$ref"] for part in field.get("allOf", ()) if "$ref" in part), "")
    known = {**definitions.get(reference.rpartition("/")[2], {}), **field}
    given = [part for part in field.get("anyOf", ()) if part.get("type") != "null"]  # drops null, the type of an unset optional setting
    if len(given) == 1:
        known |= given[0]
        del known["anyOf"], known["default"]
    schema = {key: known[key] for key in _COPIED if key in known}
    if schema.get("type") == "array":  # also as comma-separated text, as in the environment
        del schema["type"]
        schema["anyOf"] = [{"type": "string"}, {"type": "array", "items": {"type": ["string", "number"]}}]
    return schema


_COUNT: Schema = {"anyOf": [integer(0), string(r"^(100|[1-9]?[0-9])%$")]}  # number or share of pods


def _definitions() -> dict[str, Schema]:
    quantity: Schema = {"anyOf": [string(_QUANTITY), {"type": "number", "minimum": 0}]}
    quantities: Schema = {"type": "object", "additionalProperties": quantity}
    toleration = closed(
        {
            "key": string(),
            "operator": choice("Exists", "Equal"),
            "value": string(),
            "effect": choice("", "NoSchedule", "PreferNoSchedule", "NoExecute"),
            "tolerationSeconds": {"type": "integer"},
        }
    )
    return {
        "quantity": quantity,
        "resources": closed({"requests": quantities, "limits": quantities}),
        "image": closed(
            {
                "registry": string(_REGISTRY),
                "repository": string(r"^[a-z0-9][a-z0-9._/:-]*$"),
                "tag": string(r"^[A-Za-z0-9_.-]*$"),
                "digest": string(r"^(sha256:[0-9a-f]{64})?$"),
            }
        ),
        "env": closed({"name": string(r"^[A-Za-z_][A-Za-z0-9_]*$"), "value": string(), "valueFrom": ANY_OBJECT}, ("name",)),
        "labels": {"type": "object", "additionalProperties": string(_LABEL_VALUE)},
        "toleration": toleration,
        "apiKey": _api_key(),
        "peer": closed({"podSelector": ANY_OBJECT, "namespaceSelector": ANY_OBJECT, "ipBlock": ANY_OBJECT}),
        "pod": closed(_pod()),
        "servicePod": closed({key: part for key, part in _pod().items() if key not in _OF_SERVICES}),
        "workerPod": closed({key: part for key, part in _pod().items() if key not in (*_OF_SERVICES, "runtimeClassName")}),
        "strategy": closed(
            {"type": choice("RollingUpdate", "Recreate", "OnDelete"), "maxSurge": _COUNT, "maxUnavailable": _COUNT}
        ),
        "resourceClaim": closed(
            {
                "name": string("^[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?$"),
                "resourceClaimName": string(),
                "resourceClaimTemplateName": string(),
                "deviceClassName": string(),
                "selectors": array(string("."), least=1),
            },
            ("name",),
        ),
    }


def _api_key() -> Schema:
    """Returns the schema of an entry of `auth.apiKeys`: the fields of key_table.py, within the same limits."""
    digests = {**array(string(_DIGEST), least=1), "maxItems": limits.MAX_SECRETS_OF_A_KEY}
    model = {"type": "string", "minLength": 1, "maxLength": limits.MAX_MODEL_NAME_CHARS}
    entry = closed(
        {
            "name": string(r"^[A-Za-z0-9._-]{1,64}$"),
            "sha256": {"anyOf": [string(_DIGEST), digests]},
            "key": string(r"^[!-~]{1,512}$"),
            "weight": {"type": "number", "exclusiveMinimum": 0, "maximum": limits.MAX_KEY_WEIGHT},
            "priority": integer(*limits.PRIORITY_RANGE),
            "models": {**array(model, least=1), "maxItems": limits.MAX_MODELS_OF_A_KEY},
            "expires": string(_MOMENT),
            **{name: integer(1, limits.MAX_KEY_LIMIT) for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent")},
        },
        ("name",),
    )
    return {**entry, "anyOf": [{"required": ["sha256"]}, {"required": ["key"]}]}


def _pod() -> dict[str, Schema]:
    """Returns the schema of `pod`. Entries of Kubernetes lists need a name; the API server validates their other fields."""
    name: Schema = {"properties": {"name": string(".")}, "required": ["name"]}
    named: Schema = {"type": "object", "allOf": [name]}
    mount = closed(
        {
            "name": string("."),
            "mountPath": string("^/."),
            "subPath": string(),
            "subPathExpr": string(),
            "readOnly": BOOLEAN,
            "mountPropagation": string(),
            "recursiveReadOnly": string(),
        },
        ("name", "mountPath"),
    )
    context: Schema = {"type": ["object", "null"]}
    return {
        "labels": ref("labels"),
        "annotations": STRINGS,
        "env": array(ref("env")),
        "envFrom": array(closed({"prefix": string(), "configMapRef": ANY_OBJECT, "secretRef": ANY_OBJECT})),
        "volumes": array(named),
        "volumeMounts": array(mount),
        "initContainers": array(named),
        "containers": array(named),
        "nodeSelector": STRINGS,
        "tolerations": array(ref("toleration")),
        "affinity": ANY_OBJECT,
        "topologySpreadConstraints": array(ANY_OBJECT),
        "priorityClassName": string(),
        "runtimeClassName": string(),
        "schedulerName": string(),
        "dnsPolicy": choice("", "ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
        "dnsConfig": ANY_OBJECT,
        "hostAliases": array(closed({"ip": string("."), "hostnames": array(string("."))}, ("ip", "hostnames"))),
        "terminationGracePeriodSeconds": integer(0, 90000),
        "securityContext": context,
        "containerSecurityContext": context,
    }


def _component(service: str, autoscaling: dict[str, Schema], more: dict[str, Schema] | None = None) -> dict[str, Schema]:
    """Returns the schema of a component: the keys of every component, those in `autoscaling`, and `more`."""
    return {
        "replicas": integer(0 if service == "worker" else 1),
        "image": ref("image"),
        "resources": ref("resources"),
        "autoscaling": closed(
            {
                "enabled": BOOLEAN,
                "minReplicas": integer(0 if service == "worker" else 1),
                "maxReplicas": integer(1),
                "scaleDownSeconds": integer(0, 3600),
                "scaleDownPeriodSeconds": integer(1, 1800),
                **autoscaling,
            }
        ),
        "pdb": closed(
            {"enabled": BOOLEAN, "maxUnavailable": {"anyOf": [integer(1), string(r"^([1-9][0-9]?|100)%$")]}},
        ),
        "settings": ref("workerSettings") if service == "worker" else settings_schema(service),
        "extraEnv": array(ref("workerEnv") if service == "worker" else _env(service)),
        "podLabels": ref("labels"),
        "podAnnotations": STRINGS,
        "nodeSelector": STRINGS,
        "tolerations": array(ref("toleration")),
        "nodeLostSeconds": integer(0),
        "affinity": ANY_OBJECT,
        "topologySpread": BOOLEAN,
        "priorityClassName": string(),
        "strategy": ref("strategy"),
        "pod": ref("workerPod" if service == "worker" else "servicePod"),
        **(more or {}),
    }


def _prefill() -> Schema:
    """Returns the schema of `worker.prefill`: the keys that prefill workers can override."""
    autoscaling = {
        "enabled": BOOLEAN,
        "minReplicas": integer(1),  # cannot scale from 0, because prompts do not wait for prefill workers: decode workers compute them
        "maxReplicas": integer(1),
        "waitingTokens": integer(1),
        "busyShare": SHARE,
    }
    return closed(
        {
            "replicas": integer(0),
            "resources": ref("resources"),
            "autoscaling": closed(autoscaling),
            "settings": ref("workerSettings"),
            "extraEnv": array(ref("workerEnv")),
            "podLabels": ref("labels"),
            "podAnnotations": STRINGS,
            "nodeSelector": STRINGS,
            "tolerations": array(ref("toleration")),
            "affinity": ANY_OBJECT,
            "strategy": ref("strategy"),
            "pod": ref("workerPod"),
        }
    )


def _tiers() -> Schema:
    files = {"sizeGB": integer(0), "claimSize": ref("quantity"), "storageClass": string(), "volume": ANY_OBJECT}
    shared = {"secret": SECRET, "port": integer(1, 65535), "peers": array(ref("peer"))}
    return closed({"hostGB": integer(0), "files": closed(files), "shared": closed(shared)})


def _components() -> dict[str, Schema]:
    cpu = {"targetCPUPercent": integer(1, 100)}
    gateway = {
        "discovery": choice("dns", "k8s"),
        "queueTimeoutSeconds": number(0),
        "playground": BOOLEAN,
        "tlsSecret": string(),
        "service": closed(
            {
                "type": choice("ClusterIP", "NodePort", "LoadBalancer"),
                "port": integer(1, 65535),
                "annotations": STRINGS,
                "loadBalancerClass": string(),
                "externalTrafficPolicy": choice("", "Cluster", "Local"),
            }
        ),
        "preStopSeconds": integer(0, 3600),
        "terminationGracePeriodSeconds": integer(0),
    }
    worker_scaling = {
        "backlogPerReplica": {"type": "number", "exclusiveMinimum": 0},
        "runningShare": SHARE,
        "tokenUsage": SHARE,
        "coldStartSeconds": integer(1, 1800),
        "cooldownSeconds": integer(0),
        "fallbackReplicas": integer(0),
    }
    worker = {
        "deletionCost": BOOLEAN,
        "kind": choice("Deployment", "StatefulSet", "LeaderWorkerSet"),
        "hosts": integer(1),
        "gpus": integer(0),
        "gpuMemoryGB": number(0),
        "gpuResource": string(r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"),
        "resourceClaims": array(ref("resourceClaim")),
        "executor": choice("", "cpu", "cuda", "fake"),
        "runtimeClassName": string(),
        "sharedMemory": ref("quantity"),
        "startupSeconds": integer(30),
        "cacheSize": ref("quantity"),
        "cacheStorageClass": string(),
        "cacheVolume": ANY_OBJECT,
        "kvTiers": _tiers(),
        "kvTlsSecret": string(),
        "prefill": _prefill(),
    }
    return {
        "gateway": closed(_component("gateway", {**cpu, "targetStreams": integer(1)}, gateway)),
        "tokenizer": closed(_component("tokenizer", cpu)),
        "detokenizer": closed(_component("detokenizer", cpu)),
        "worker": closed(_component("worker", worker_scaling, worker)),
    }


def _model() -> Schema:
    overrides = {component: ref(component) for component in ("worker", "tokenizer", "detokenizer")}
    name = {**string(_MODEL_NAME), "maxLength": 128}
    size = closed({"weightsGB": number(0), "kvKiBPerToken": number(0), "contextLen": integer(0)})
    return closed({"name": name, "path": string("^/."), "source": string(_SOURCE), "size": size, **overrides}, ("name", "path"))


def _top() -> dict[str, Schema]:
    image = {
        "registry": string(_REGISTRY),
        "tag": string(r"^[A-Za-z0-9_.-]*$"),
        "pullPolicy": ref("pullPolicy"),
        "pullSecrets": array({"anyOf": [string("."), closed({"name": string(".")}, ("name",))]}),
    }
    return {
        "global": ANY_OBJECT,  # Helm's values for subcharts
        "nameOverride": string(_NAME),
        "fullnameOverride": string(_NAME),
        "commonLabels": ref("labels"),
        "image": closed(image),
        "models": array(ref("model"), least=1),
        "ipFamily": choice("IPv4", "IPv6"),
        "drainSeconds": integer(1, 86400),
        "logLevel": choice("debug", "info", "warning", "error"),
        "tracing": closed({"otlpEndpoint": string(r"^((https?://)?[^\s/]+:[0-9]+)?$"), "sampleRatio": number(0, 1)}),
        "auth": closed(
            {
                "apiKeysSecret": SECRET,
                "apiKeys": array(ref("apiKey")),
                "controlTokenSecret": SECRET,
            }
        ),
        "tls": schema_around.tls(),
        **{component: ref(component) for component in _components()},
        "autoscaling": schema_around.autoscaling(),
        "redis": schema_around.redis(),
        "state": schema_around.state(),
        "modelCache": schema_around.model_cache(),
        **schema_around.edge(),
        "monitoring": schema_around.monitoring(),
        "tests": closed(
            {
                "enabled": BOOLEAN,
                "diagnose": BOOLEAN,
                "patienceSeconds": integer(1, 3600),
                "keySecret": SECRET,
                "image": ref("image"),
                "pod": ref("pod"),
            }
        ),
        "pod": ref("pod"),
        "extraObjects": array({"type": ["object", "string"]}),
    }


def foreign_keys() -> dict[str, Any]:
    """Returns files/foreign-keys.yaml: keys of other charts, with the key to use here."""
    rows: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "files/foreign-keys.yaml").read_text())
    return rows


def _admit(rows: dict[str, Any], schema: Schema, definitions: dict[str, Schema]) -> None:
    """Adds keys of other charts to a block, so that the schema accepts them and templates/validate.yaml refuses them with advice."""
    found = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if found.get("type") == "array":
        return _admit(rows, found["items"], definitions)
    for key, row in rows.items():
        if key in found["properties"] and isinstance(row, dict) and FOREIGN not in found["properties"][key]:
            _admit(row, found["properties"][key], definitions)
        else:
            found["properties"][key] = {FOREIGN: True}
    return None


def _nullable(schema: Any, definitions: dict[str, Schema]) -> None:
    """Allows null for every optional key.

    Helm removes most empty keys before it checks the schema. It does not remove keys of list entries and keys without a default;
    the template rootstock.values removes them.
    """
    if isinstance(schema, list):
        for part in schema:
            _nullable(part, definitions)
    if not isinstance(schema, dict):
        return
    for part in schema.values():
        _nullable(part, definitions)
    optional = [part for key, part in schema.get("properties", {}).items() if key not in schema.get("required", ())]
    for part in (*optional, schema.get("additionalProperties")):
        if isinstance(part, dict):
            _admit_null(part, definitions)


def _admit_null(schema: Schema, definitions: dict[str, Schema]) -> None:
    schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if "enum" in schema:  # Helm would print a null in an enum as <nil> in its message
        schema.update({"if": {"type": "null"}, "else": {"enum": schema.pop("enum")}})
    if "anyOf" in schema and {"type": "null"} not in schema["anyOf"]:
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]


def document() -> Schema:
    definitions = {
        **_definitions(),
        "pullPolicy": choice("Always", "IfNotPresent", "Never"),
        "model": _model(),
        "workerSettings": settings_schema("worker"),
        "workerEnv": _env("worker"),
        **_components(),
    }
    title = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the rootstock chart"}
    # The JSON round trip makes copies of shared parts, because _nullable() changes only some of their occurrences.
    found: Schema = json.loads(json.dumps({**title, **closed(_top()), "$defs": definitions}))
    _admit(foreign_keys(), found, found["$defs"])
    return found


def render() -> str:
    found = document()
    _nullable(found, found["$defs"])
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(render(), end="")
