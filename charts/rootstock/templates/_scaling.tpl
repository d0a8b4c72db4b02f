{{/* Autoscaling. Unless noted, helpers take a scope. Queries come from monitoring/_promql.tpl. */}}

{{/* The field `replicas`. With an autoscaler, it has the cluster's current number, so that an upgrade stops no pod, and minReplicas instead
of 0, because an HPA does not scale from 0. With an autoscaler but without a cluster (helm template), the field is left out
(docs/how-to/kubernetes/autoscaling.md). Takes a scope. */}}
{{- define "rootstock.replicas" -}}
{{- if not .values.autoscaling.enabled -}}
replicas: {{ .values.replicas }}
{{- else -}}
{{- $target := include "rootstock.scaleTarget" . | fromYaml -}}
{{- $found := lookup $target.apiVersion $target.kind .root.Release.Namespace $target.name -}}
{{- $current := dig "spec" "replicas" "" $found -}}
{{- if ne (toString $current) "" -}}
replicas: {{ default .values.autoscaling.minReplicas (int $current) }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Reference to the scaled object. */}}
{{- define "rootstock.scaleTarget" -}}
{{- $kind := default "Deployment" .values.kind -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (eq $kind "LeaderWorkerSet") }}
kind: {{ $kind }}
name: {{ include "rootstock.componentName" . }}
{{- end }}

{{/* Scaling behavior of services without weights, which start fast: the number of pods follows the load within a minute. */}}
{{- define "rootstock.scaling.front" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - {type: Percent, value: 100, periodSeconds: 60}
    - {type: Pods, value: 1, periodSeconds: 60}
  selectPolicy: Max
scaleDown:
  stabilizationWindowSeconds: {{ .values.autoscaling.scaleDownSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: {{ .values.autoscaling.scaleDownPeriodSeconds }}}
{{- end }}

{{/* Scaling behavior of workers. Their number at most doubles per cold start, so that starting workers take load before more workers are started. */}}
{{- define "rootstock.scaling.worker" -}}
{{- $coldStart := int .values.autoscaling.coldStartSeconds -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - {type: Percent, value: 100, periodSeconds: {{ $coldStart }}}
    - {type: Pods, value: 1, periodSeconds: {{ $coldStart }}}
  selectPolicy: Max
scaleDown:
  stabilizationWindowSeconds: {{ .values.autoscaling.scaleDownSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: {{ .values.autoscaling.scaleDownPeriodSeconds }}}
{{- end }}

{{- define "rootstock.hpa.cpu" -}}
- type: Resource
  resource:
    name: cpu
    target:
      type: Utilization
      averageUtilization: {{ .values.autoscaling.targetCPUPercent }}
{{- end }}

{{/* The HorizontalPodAutoscaler of a service that scales by CPU. */}}
{{- define "rootstock.hpa.front" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "rootstock.componentName" . }}
  labels:
    {{- include "rootstock.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    {{- include "rootstock.scaleTarget" . | nindent 4 }}
  minReplicas: {{ .values.autoscaling.minReplicas }}
  maxReplicas: {{ .values.autoscaling.maxReplicas }}
  behavior:
    {{- include "rootstock.scaling.front" . | nindent 4 }}
  metrics:
    {{- include "rootstock.hpa.cpu" . | nindent 4 }}
{{- end }}

{{/* Returns "true" if KEDA is used and must authenticate. Takes the root. */}}
{{- define "rootstock.keda.authenticates" -}}
{{- $auth := .Values.autoscaling.prometheusAuth -}}
{{- if and (eq .Values.autoscaling.engine "keda") (or $auth.modes $auth.podIdentity) }}true{{ end -}}
{{- end }}

{{/* A KEDA trigger. Takes {root, name, query, threshold}. */}}
{{- define "rootstock.keda.trigger" -}}
- type: prometheus
  name: {{ .name }}
  metricType: AverageValue
  metadata:
    serverAddress: {{ .root.Values.autoscaling.prometheusUrl }}
    threshold: {{ .threshold | quote }}
    ignoreNullValues: "false"
    {{- with .root.Values.autoscaling.prometheusAuth }}
    {{- with .modes }}
    authModes: {{ join "," . }}
    {{- end }}
    {{- if .headers }}
    {{- $headers := list }}
    {{- range $name, $value := .headers }}{{ $headers = append $headers (printf "%s=%s" $name $value) }}{{ end }}
    customHeaders: {{ join "," $headers | quote }}
    {{- end }}
    {{- if .unsafeSsl }}
    unsafeSsl: "true"
    {{- end }}
    {{- with .metadata }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- end }}
    query: |-
      {{- .query | trim | nindent 6 }}
  {{- if include "rootstock.keda.authenticates" .root }}
  authenticationRef:
    name: {{ include "rootstock.fullname" .root }}-prometheus
  {{- end }}
{{- end }}

{{/* Name of a release's external metric. Contains the namespace, because an adapter has one rule per name for all namespaces. Takes the
root. */}}
{{- define "rootstock.backlogMetric" -}}
rootstock_backlog_{{ printf "%s_%s" .Release.Namespace (include "rootstock.fullname" .) | replace "-" "_" | replace "." "_" }}
{{- end }}
