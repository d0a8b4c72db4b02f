"""Defines the schema of values for everything except services: model cache, TLS, Redis, ingress, monitoring and autoscaling."""

from __future__ import annotations

from charts.rootstock.schema_words import (
    ANY_OBJECT,
    BOOLEAN,
    SECRET,
    SECRET_NAME,
    STRINGS,
    Schema,
    array,
    choice,
    closed,
    integer,
    ref,
    string,
)
from rootstock_llm.services.gateway.observe.metrics import LATENCY_BUCKETS_S

_GATEWAY_DURATION = r"^(([0-9]{1,5}(h|m|s|ms)){1,4})?$"
_NAMESPACE = r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$"
_URL = string(r"^(https?://[^\s/]+[^\s]*)?$")


def model_cache() -> Schema:
    pvc = {
        "existingClaim": string(),
        "storageClass": string(),
        "accessMode": choice("ReadWriteMany", "ReadOnlyMany", "ReadWriteOnce"),
        "size": ref("quantity"),
    }
    return closed(
        {
            "type": choice("none", "pvc", "hostPath", "image", "pod"),
            "mountPath": string("^/.*[^/]$"),
            "pvc": closed(pvc),
            "hostPath": string("^(/.*)?$"),
            "image": closed({"reference": string(), "pullPolicy": ref("pullPolicy")}),
            "fetchTokenizers": BOOLEAN,
            "prefetch": closed(
                {
                    "enabled": BOOLEAN,
                    "image": ref("image"),
                    "resources": ref("resources"),
                    "tokenSecret": SECRET,
                    "hubEndpoint": _URL,
                    "s3": closed({"endpoint": _URL, "region": string("^[a-z0-9-]+$"), "secret": SECRET}),
                    "gcs": closed({"endpoint": _URL, "secret": SECRET}),
                    "proxy": _URL,
                    "noProxy": string(),
                    "ca": closed({"configMap": SECRET, "key": string("^[-._a-zA-Z0-9]+$")}),
                    "pod": ref("pod"),
                }
            ),
        }
    )


def tls() -> Schema:
    issuer = closed({"name": string(), "kind": string("^[A-Z]"), "group": string()})
    span = string(r"^([0-9]+(h|m|s))+$")
    cert_manager = {"enabled": BOOLEAN, "issuerRef": issuer, "duration": span, "renewBefore": span}
    secret = string(SECRET_NAME.replace("[-a-z0-9.]*", "([-a-z0-9.]|%s)*"))
    return closed({"secret": secret, "certManager": closed(cert_manager), "caConfigMap": SECRET, "tokenSecret": SECRET})


def redis() -> Schema:
    return closed(
        {
            "embedded": BOOLEAN,
            "image": ref("image"),
            "maxMemory": string("^[0-9]+(kb|mb|gb)$"),
            "passwordSecret": SECRET,
            "resources": ref("resources"),
            "externalUrlSecret": SECRET,
            "externalTlsSecret": SECRET,
            "externalPort": integer(1, 65535),
            "pod": ref("pod"),
        }
    )


def state() -> Schema:
    volume = {
        "type": choice("pvc", "emptyDir"),
        "size": ref("quantity"),
        "storageClass": string(),
        "existingClaim": string(),
    }
    return closed(
        {
            "embedded": BOOLEAN,
            "image": ref("image"),
            "maxMemory": string("^[0-9]+(kb|mb|gb)$"),
            "appendfsync": choice("everysec", "always"),
            "volume": closed(volume),
            "passwordSecret": SECRET,
            "resources": ref("resources"),
            "externalUrlSecret": SECRET,
            "externalTlsSecret": SECRET,
            "externalPort": integer(1, 65535),
            "pod": ref("pod"),
        }
    )


def edge() -> dict[str, Schema]:
    """Returns the schemas of ingress, HTTPRoute, ServiceAccount and NetworkPolicies."""
    host = closed({"host": string(), "path": string("^/")}, ("host",))
    policy = {
        "enabled": BOOLEAN,
        **{name: array(ref("peer")) for name in ("clients", "monitoring", "dns", "apiServer")},
        "monitoringNamespaces": ANY_OBJECT,
        "apiServerPorts": array(integer(1, 65535), least=1),
        **{name: array(ANY_OBJECT) for name in ("workerEgress", "extraIngress", "extraEgress")},
    }
    return {
        "ingress": closed(
            {
                "enabled": BOOLEAN,
                "className": string(),
                "controller": choice("", "nginx", "alb", "gce"),
                "annotations": STRINGS,
                "hosts": array(host),
                "tls": array(ANY_OBJECT),
            }
        ),
        "httpRoute": closed(
            {
                "enabled": BOOLEAN,
                "annotations": STRINGS,
                "parentRefs": array(ANY_OBJECT),
                "hostnames": array(string()),
                "timeouts": closed({"request": string(_GATEWAY_DURATION), "backendRequest": string(_GATEWAY_DURATION)}),
            }
        ),
        "serviceAccount": closed({"create": BOOLEAN, "name": string(), "annotations": STRINGS}),
        "networkPolicy": closed(policy),
    }


def monitoring() -> Schema:
    monitor = {"enabled": BOOLEAN, "labels": ref("labels"), "interval": string("^[0-9]+(ms|s|m)$")}
    objective: Schema = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
    objectives = {
        "availability": objective,
        "ttftSeconds": {"enum": [int(bound) if bound == int(bound) else bound for bound in LATENCY_BUCKETS_S]},
        "ttftShare": objective,
    }
    rules = {
        "enabled": BOOLEAN,
        "labels": ref("labels"),
        "runbookUrl": string("^(https?://.*)?$"),
        "objectives": closed(objectives),
    }
    return closed(
        {
            "podMonitor": closed(monitor),
            "serviceMonitor": {**closed(monitor), "deprecated": True},
            "rules": closed(rules),
            "dashboards": closed({"enabled": BOOLEAN, "dcgm": BOOLEAN, "labels": ref("labels"), "annotations": STRINGS}),
        }
    )


def autoscaling() -> Schema:
    auth = {
        "modes": array(choice("bearer", "basic", "tls", "custom")),
        "secret": SECRET,
        "podIdentity": choice("", "aws", "azure-workload", "gcp"),
        "headers": STRINGS,
        "unsafeSsl": BOOLEAN,
        "metadata": STRINGS,
    }
    adapter_rules = {"enabled": BOOLEAN, "namespace": string(_NAMESPACE), "name": string(SECRET_NAME)}
    return closed(
        {
            "engine": choice("hpa", "keda"),
            "prometheusUrl": string("^https?://"),
            "prometheusAuth": closed(auth),
            "adapterRules": {**closed(adapter_rules), "type": ["object", "boolean", "null"]},
        }
    )
