"""Seeded faults in the chart. The tests of a fault's area (areas.py) must detect the fault."""

from __future__ import annotations

from tests.mutants.fault import of

TEMPLATES = "charts/rootstock/templates"
CHART = (
    *of(
        "chart",
        f"{TEMPLATES}/_pod.tpl",
        ("enableServiceLinks: false", "enableServiceLinks: true"),
        only="test_pod_security",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/_overrides.tpl",
        ('(ne (include "rootstock.usesGpu" $) "true")', "true"),
        ('(kindIs "invalid" (index $own $key))) -}}', "false) -}}"),
        ('{{- if not (hasKey . "securityContext") }}', "{{- if false }}"),
        only="test_pod_security",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/_pod.tpl",
        ("add .root.Values.drainSeconds 18", "add .root.Values.drainSeconds 10"),
        ("(ternary 7200 0 .model.cached)", "0"),
        only="test_templates",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/_overrides.tpl",
        ("(index $values $key) }}", "(index $.root.Values.gateway $key) }}"),
        ("{{- if not (has $key $keys) -}}", "{{- if true -}}"),
        ('"controller-revision-hash" (eq $kind "Deployment")', '"controller-revision-hash" (ne $kind "Deployment")'),
        ('(hasPrefix "nvidia.com/" $values.gpuResource)', "false"),
        only="test_templates",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/_overrides.tpl",
        ("concat $over.envFrom (default list $main.envFrom)", "concat (default list $main.envFrom) $over.envFrom"),
        ("concat $merged (default list .own) | default list", "default $merged .own | default list"),
        only="test_overlay",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/_overrides.tpl",
        ("whenUnsatisfiable: ScheduleAnyway", "whenUnsatisfiable: DoNotSchedule"),
        only="test_objects",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/_validate_pods.tpl",
        ('(eq $surge "0")', "false"),
        ("{{- if and $grace (lt $grace $least) -}}", "{{- if false -}}"),
        only="test_values",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/network/_network.tpl",
        ("range $port := list 53 5353", "range $port := list 53"),
        ("(ternary 80 443 (hasPrefix", "(ternary 443 80 (hasPrefix"),
        only="test_network_policies",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/_scaling.tpl",
        (
            "type: Percent, value: 100, periodSeconds: {{ $coldStart }}",
            "type: Percent, value: 100, periodSeconds: 60",
        ),
        only="test_templates",
    ),
    *of("chart", f"{TEMPLATES}/_service.tpl", ("targetPort: metrics", "targetPort: metric"), only="test_objects"),
    *of(
        "chart",
        f"{TEMPLATES}/_helpers.tpl",
        ("{{- with default (default .component .pool) .role }}", "{{- with default .component .pool }}"),
        ('{{- if eq .values.discovery "k8s" }}true{{ end -}}', "true"),
        only="test_templates",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/_helpers.tpl",
        (
            "app.kubernetes.io/instance: {{ .root.Release.Name }}",
            "app.kubernetes.io/instance: {{ .root.Release.Name }}-{{ .root.Chart.Version }}",
        ),
        only="test_upgrade",
    ),
    *of("chart", f"{TEMPLATES}/_config.tpl", ("ROOTSTOCK_GRACE_S:", "ROOTSTOCK_GRACE_SECONDS:"), only="test_settings"),
    *of(
        "chart",
        f"{TEMPLATES}/_models.tpl",
        ('{{- if eq .type "pvc" }}', '{{- if and (eq .type "pvc") (ne $.component "detokenizer") }}'),
        only="test_templates",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/network/gateway.yaml",
        ('"component" "detokenizer" "ports" (list 7002)', '"component" "detokenizer" "ports" (list 7001)'),
        only="test_network_policies",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/worker/hpa.yaml",
        ('{{- if eq .Values.autoscaling.engine "hpa" }}', "{{- if true }}"),
        ("{{- if .values.autoscaling.enabled }}", "{{- if true }}"),
        only="test_upgrade",
    ),
    *of(
        "chart",
        "charts/rootstock/values_schema.py",
        ('"discovery": choice("dns", "k8s")', '"discovery": string()'),
        ('"hosts": integer(1),', '"hosts": integer(0),'),
        ('"peer_host", "peer_port", "peers"', '"peer_host", "peers"'),
        only="test_chart_schema",
    ),
    *of(
        "chart",
        "charts/rootstock/schema_words.py",
        ('"additionalProperties": False,\n        "properties": properties,', '"properties": properties,'),
        only="test_chart_schema",
    ),
    *of(
        "chart",
        "tests/chart/dockerfile_rules.py",
        (r're.match(r"\d+\.\d+\.\d+", tag)', r're.match(r"\d+", tag)'),
        only="test_images_rules",
    ),
    *of(
        "chart",
        f"{TEMPLATES}/_scaling.tpl",
        ("{{- if not .values.autoscaling.enabled -}}", "{{- if true -}}"),
        only="test_objects",
    ),
)
