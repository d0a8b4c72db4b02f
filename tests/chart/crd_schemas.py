"""Defines strict JSON schemas of the custom resources that the chart renders. A field that a schema does not list is an error.

The schemas follow the CRDs. Types of Kubernetes (pod templates, selectors, HPA behavior) refer to Kubernetes' own definitions.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
KUBE = "/api/_definitions.json#/$defs/"
STRING: Schema = {"type": "string", "minLength": 1}
INTEGER: Schema = {"type": "integer", "minimum": 0}
BOOLEAN: Schema = {"type": "boolean"}
STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(ms|[smhdwy]))+$"}
INT_OR_STRING: Schema = {"type": ["integer", "string"]}
SELECTOR: Schema = {"$ref": KUBE + "io.k8s.apimachinery.pkg.apis.meta.v1.LabelSelector"}
METADATA: Schema = {"$ref": KUBE + "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
POD_TEMPLATE: Schema = {"$ref": KUBE + "io.k8s.api.core.v1.PodTemplateSpec"}
BEHAVIOR: Schema = {"$ref": KUBE + "io.k8s.api.autoscaling.v2.HorizontalPodAutoscalerBehavior"}
CLAIM: Schema = {"$ref": KUBE + "io.k8s.api.core.v1.PersistentVolumeClaim"}
SECRET_KEY: Schema = {"$ref": KUBE + "io.k8s.api.core.v1.SecretKeySelector"}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def array(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


def fields(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """Returns the schema of an object with only these fields."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def resource(api_version: str, kind: str, spec: Schema) -> Schema:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **fields(
            ("apiVersion", "kind", "metadata", "spec"),
            apiVersion={"const": api_version},
            kind={"const": kind},
            metadata=METADATA,
            spec=spec,
        ),
    }


RELABEL = fields(
    action=one_of(
        "replace",
        "keep",
        "drop",
        "hashmod",
        "labelmap",
        "labeldrop",
        "labelkeep",
        "lowercase",
        "uppercase",
        "keepequal",
        "dropequal",
    ),
    sourceLabels=array(STRING),
    targetLabel=STRING,
    regex=STRING,
    replacement={"type": "string"},
    separator={"type": "string"},
    modulus=INTEGER,
)
_SCRAPE = {
    "port": STRING,
    "path": {"type": "string", "pattern": "^/"},
    "scheme": one_of("http", "https", "HTTP", "HTTPS"),
    "interval": DURATION,
    "scrapeTimeout": DURATION,
    "honorLabels": BOOLEAN,
    "honorTimestamps": BOOLEAN,
    "params": {"type": "object", "additionalProperties": array(STRING)},
    "relabelings": array(RELABEL),
    "metricRelabelings": array(RELABEL),
    "followRedirects": BOOLEAN,
    "enableHttp2": BOOLEAN,
}
_MONITOR = {
    "selector": SELECTOR,
    "namespaceSelector": fields(any=BOOLEAN, matchNames=array(STRING, 1)),
    "jobLabel": STRING,
    "sampleLimit": INTEGER,
    "labelLimit": INTEGER,
}
SERVICE_MONITOR = resource(
    "monitoring.coreos.com/v1",
    "ServiceMonitor",
    fields(
        ("selector", "endpoints"),
        **_MONITOR,
        targetLabels=array(STRING),
        podTargetLabels=array(STRING),
        endpoints=array(fields(("port",), **_SCRAPE, targetPort=INT_OR_STRING), 1),
    ),
)
POD_MONITOR = resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    fields(
        ("selector", "podMetricsEndpoints"),
        **_MONITOR,
        podTargetLabels=array(STRING),
        podMetricsEndpoints=array(fields(("port",), **_SCRAPE, filterRunning=BOOLEAN, portNumber=INTEGER), 1),
    ),
)
_ALERT = fields(
    ("alert", "expr"), alert=STRING, expr=INT_OR_STRING, **{"for": DURATION}, keep_firing_for=DURATION, labels=STRINGS,
    annotations=STRINGS,
)  # fmt: skip
_RECORD = fields(
    ("record", "expr"), record={"type": "string", "pattern": "^[a-zA-Z_:][a-zA-Z0-9_:]*$"}, expr=INT_OR_STRING, labels=STRINGS
)
PROMETHEUS_RULE = resource(
    "monitoring.coreos.com/v1",
    "PrometheusRule",
    fields(
        ("groups",),
        groups=array(
            fields(
                ("name", "rules"), name=STRING, interval=DURATION, limit=INTEGER, labels=STRINGS,
                rules=array({"oneOf": [_ALERT, _RECORD]}, 1),
            ),
            1,
        ),
    ),
)  # fmt: skip

_PROMETHEUS_TRIGGER = fields(
    ("serverAddress", "query", "threshold"),
    serverAddress={"type": "string", "pattern": "^https?://"},
    query=STRING,
    threshold={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"},
    activationThreshold={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"},
    namespace=STRING,
    ignoreNullValues=one_of("true", "false"),
    unsafeSsl=one_of("true", "false"),
    timeout=STRING,
    customHeaders=STRING,
    queryParameters=STRING,
    authModes={"type": "string", "pattern": "^(bearer|basic|tls|custom)(,(bearer|basic|tls|custom))*$"},
    awsRegion=STRING,
)
_TRIGGER = {
    "type": "object",
    "required": ["type", "metadata"],
    "additionalProperties": False,
    "properties": {
        "type": one_of("prometheus", "cpu", "memory", "kubernetes-workload"),
        "name": STRING,
        "metadata": STRINGS,
        "metricType": one_of("AverageValue", "Value", "Utilization"),
        "useCachedMetrics": BOOLEAN,
        "authenticationRef": fields(("name",), name=STRING, kind=one_of("TriggerAuthentication", "ClusterTriggerAuthentication")),
    },
    "if": {"properties": {"type": {"const": "prometheus"}}},
    "then": {"properties": {"metadata": _PROMETHEUS_TRIGGER, "metricType": one_of("AverageValue", "Value")}},
}
SCALED_OBJECT = resource(
    "keda.sh/v1alpha1",
    "ScaledObject",
    fields(
        ("scaleTargetRef", "triggers"),
        scaleTargetRef=fields(("name",), apiVersion=STRING, kind=STRING, name=STRING, envSourceContainerName=STRING),
        pollingInterval=INTEGER,
        cooldownPeriod=INTEGER,
        initialCooldownPeriod=INTEGER,
        idleReplicaCount=INTEGER,
        minReplicaCount=INTEGER,
        maxReplicaCount={"type": "integer", "minimum": 1},
        fallback=fields(
            ("failureThreshold", "replicas"),
            failureThreshold=INTEGER,
            replicas=INTEGER,
            behavior=one_of("static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"),
        ),
        advanced=fields(
            restoreToOriginalReplicaCount=BOOLEAN,
            horizontalPodAutoscalerConfig=fields(name=STRING, behavior=BEHAVIOR),
            scalingModifiers=fields(
                formula=STRING, target=STRING, activationTarget=STRING, metricType=one_of("AverageValue", "Value")
            ),
        ),
        triggers=array(_TRIGGER, 1),
    ),
)

_PARAMETERS = one_of(
    "bearerToken", "username", "password", "ca", "cert", "key", "customAuthHeader", "customAuthValue", "awsRegion"
)  # fmt: skip
TRIGGER_AUTHENTICATION = resource(
    "keda.sh/v1alpha1",
    "TriggerAuthentication",
    fields(
        podIdentity=fields(
            ("provider",), provider=one_of("azure-workload", "gcp", "aws", "none"), identityId=STRING, roleArn=STRING
        ),
        secretTargetRef=array(fields(("parameter", "name", "key"), parameter=_PARAMETERS, name=STRING, key=STRING), 1),
    ),
)

_PARENT = fields(
    ("name",), group={"type": "string"}, kind=STRING, namespace=STRING, name=STRING, sectionName=STRING,
    port={"type": "integer", "minimum": 1, "maximum": 65535},
)  # fmt: skip
_BACKEND = fields(
    ("name", "port"), group={"type": "string"}, kind=STRING, namespace=STRING, name=STRING, weight=INTEGER,
    port={"type": "integer", "minimum": 1, "maximum": 65535},
)  # fmt: skip
_ROUTE_MATCH = fields(
    path=fields(type=one_of("Exact", "PathPrefix", "RegularExpression"), value={"type": "string", "pattern": "^/"}),
    headers=array(fields(("name", "value"), type=one_of("Exact", "RegularExpression"), name=STRING, value=STRING)),
    method=one_of("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH", "CONNECT", "TRACE"),
)
_GATEWAY_DURATION: Schema = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
HTTP_ROUTE = resource(
    "gateway.networking.k8s.io/v1",
    "HTTPRoute",
    fields(
        parentRefs=array(_PARENT, 1),
        hostnames=array(
            {"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"}
        ),
        rules=array(
            fields(
                name=STRING,
                matches=array(_ROUTE_MATCH),
                backendRefs=array(_BACKEND, 1),
                timeouts=fields(request=_GATEWAY_DURATION, backendRequest=_GATEWAY_DURATION),
            ),
            1,
        ),
    ),
)
LEADER_WORKER_SET = resource(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
    fields(
        ("leaderWorkerTemplate",),
        replicas=INTEGER,
        startupPolicy=one_of("LeaderCreated", "LeaderReady"),
        networkConfig=fields(subdomainPolicy=one_of("Shared", "UniquePerReplica")),
        rolloutStrategy=fields(
            type=one_of("RollingUpdate"),
            rollingUpdateConfiguration=fields(partition=INTEGER, maxUnavailable=INT_OR_STRING, maxSurge=INT_OR_STRING),
        ),
        leaderWorkerTemplate=fields(
            ("workerTemplate", "size"),
            leaderTemplate=POD_TEMPLATE,
            workerTemplate=POD_TEMPLATE,
            size={"type": "integer", "minimum": 1},
            restartPolicy=one_of("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
            volumeClaimTemplates=array(CLAIM),
            subGroupPolicy=fields(subGroupSize=INTEGER, type=STRING),
        ),
    ),
)
ROUTE = resource(
    "route.openshift.io/v1",
    "Route",
    fields(
        ("to",),
        host={"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"},
        path={"type": "string", "pattern": "^/"},
        to=fields(
            ("kind", "name"), kind=one_of("Service"), name=STRING, weight={"type": "integer", "minimum": 0, "maximum": 256}
        ),
        port=fields(("targetPort",), targetPort=INT_OR_STRING),
        tls=fields(
            ("termination",),
            termination=one_of("edge", "reencrypt", "passthrough"),
            insecureEdgeTerminationPolicy=one_of("None", "Allow", "Redirect"),
            certificate=STRING,
            key=STRING,
            caCertificate=STRING,
            destinationCACertificate=STRING,
        ),
        wildcardPolicy=one_of("None", "Subdomain"),
    ),
)
CERTIFICATE = resource(  # only the fields that the chart sets
    "cert-manager.io/v1",
    "Certificate",
    fields(
        ("secretName", "issuerRef"),
        secretName=STRING,
        commonName={"type": "string", "maxLength": 64},
        dnsNames=array(STRING, 1),
        usages=array(one_of("digital signature", "key encipherment", "server auth", "client auth"), 1),
        privateKey=fields(
            algorithm=one_of("RSA", "ECDSA", "Ed25519"), size=INTEGER, rotationPolicy=one_of("Never", "Always"), encoding=STRING
        ),
        duration={"type": "string", "pattern": r"^([0-9]+(h|m|s))+$"},
        renewBefore={"type": "string", "pattern": r"^([0-9]+(h|m|s))+$"},
        issuerRef=fields(("name",), name=STRING, kind=STRING, group=STRING),
    ),
)
_SECONDS: Schema = {"type": "integer", "minimum": 1}
_GCP_DRAINING = fields(drainingTimeoutSec={"type": "integer", "minimum": 0, "maximum": 3600})
BACKEND_CONFIG = resource(
    "cloud.google.com/v1",
    "BackendConfig",
    fields(
        timeoutSec=_SECONDS,
        connectionDraining=_GCP_DRAINING,
        healthCheck=fields(
            type=one_of("HTTP", "HTTPS", "HTTP2"),
            requestPath={"type": "string", "pattern": "^/"},
            port={"type": "integer", "minimum": 1, "maximum": 65535},
            checkIntervalSec=_SECONDS,
            timeoutSec=_SECONDS,
            healthyThreshold=_SECONDS,
            unhealthyThreshold=_SECONDS,
        ),
    ),
)
_TARGET = fields(("group", "kind", "name"), group={"type": "string"}, kind=STRING, name=STRING)
HEALTH_CHECK_POLICY = resource(
    "networking.gke.io/v1",
    "HealthCheckPolicy",
    fields(
        ("targetRef", "default"),
        targetRef=_TARGET,
        default=fields(
            ("config",),
            checkIntervalSec=_SECONDS,
            timeoutSec=_SECONDS,
            healthyThreshold=_SECONDS,
            unhealthyThreshold=_SECONDS,
            config=fields(
                ("type",),
                type=one_of("TCP", "HTTP", "HTTPS", "HTTP2", "GRPC"),
                httpHealthCheck=fields(
                    portSpecification=one_of("USE_FIXED_PORT", "USE_NAMED_PORT", "USE_SERVING_PORT"),
                    port={"type": "integer", "minimum": 1, "maximum": 65535},
                    requestPath={"type": "string", "pattern": "^/"},
                ),
            ),
        ),
    ),
)
GCP_BACKEND_POLICY = resource(
    "networking.gke.io/v1",
    "GCPBackendPolicy",
    fields(("targetRef", "default"), targetRef=_TARGET, default=fields(timeoutSec=_SECONDS, connectionDraining=_GCP_DRAINING)),
)
BACKEND_TRAFFIC_POLICY = resource(
    "gateway.envoyproxy.io/v1alpha1",
    "BackendTrafficPolicy",
    fields(
        ("targetRefs",),
        targetRefs=array(_TARGET, 1),
        timeout=fields(http=fields(requestTimeout=_GATEWAY_DURATION, connectionIdleTimeout=_GATEWAY_DURATION)),
        healthCheck=fields(
            active=fields(
                ("type",),
                type=one_of("HTTP", "TCP", "GRPC"),
                interval=_GATEWAY_DURATION,
                timeout=_GATEWAY_DURATION,
                healthyThreshold=_SECONDS,
                unhealthyThreshold=_SECONDS,
                http=fields(("path",), path={"type": "string", "pattern": "^/"}, expectedStatuses=array(INTEGER)),
            )
        ),
        loadBalancer=fields(("type",), type=one_of("ConsistentHash", "LeastRequest", "Random", "RoundRobin")),
    ),
)
CLIENT_TRAFFIC_POLICY = resource(
    "gateway.envoyproxy.io/v1alpha1",
    "ClientTrafficPolicy",
    fields(
        ("targetRefs",),
        targetRefs=array(_TARGET, 1),
        timeout=fields(http=fields(streamIdleTimeout=_GATEWAY_DURATION, idleTimeout=_GATEWAY_DURATION)),
    ),
)
SCHEMAS: dict[tuple[str, str], Schema] = {
    (schema["properties"]["apiVersion"]["const"], schema["properties"]["kind"]["const"]): schema
    for schema in (
        SERVICE_MONITOR,
        POD_MONITOR,
        PROMETHEUS_RULE,
        SCALED_OBJECT,
        TRIGGER_AUTHENTICATION,
        HTTP_ROUTE,
        LEADER_WORKER_SET,
        BACKEND_CONFIG,
        HEALTH_CHECK_POLICY,
        GCP_BACKEND_POLICY,
        BACKEND_TRAFFIC_POLICY,
        CLIENT_TRAFFIC_POLICY,
        ROUTE,
        CERTIFICATE,
    )
}
