{{/* The values of monitoring.podMonitor, overridden by those under its old name, serviceMonitor. Takes the root. */}}
{{- define "rootstock.podMonitor" -}}
{{- $monitor := mergeOverwrite (deepCopy .Values.monitoring.podMonitor) (deepCopy .Values.monitoring.serviceMonitor) -}}
{{- set $monitor "enabled" (or .Values.monitoring.podMonitor.enabled .Values.monitoring.serviceMonitor.enabled) | toYaml -}}
{{- end }}

{{/* Returns "true" if Prometheus needs the release's series: for the PodMonitor, or for autoscaling. Takes the root. */}}
{{- define "rootstock.scrapes" -}}
{{- $wanted := or (include "rootstock.podMonitor" . | fromYaml).enabled .Values.gateway.autoscaling.enabled -}}
{{- range include "rootstock.workerPools" . | fromJsonArray -}}
{{- if .values.autoscaling.enabled -}}{{- $wanted = true -}}{{- end -}}
{{- end -}}
{{- if $wanted -}}true{{- end -}}
{{- end }}

{{/* Recording rules with the largest numbers of pods: per model for workers, over all models for other components. Takes the root. */}}
{{- define "rootstock.limits" -}}
{{- $namespace := .Release.Namespace -}}
{{- range $pool := include "rootstock.workerPools" . | fromJsonArray -}}
{{- with .values.autoscaling -}}
{{- if and .enabled (lt (int .minReplicas) (int .maxReplicas)) }}
- record: rootstock:max_replicas
  expr: vector({{ int .maxReplicas }})
  labels:
    namespace: {{ $namespace }}
    component: rootstock-{{ default "worker" $pool.pool }}
    model: {{ $pool.model.name | quote }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $component := list "gateway" "tokenizer" "detokenizer" -}}
{{- $most := 0 -}}
{{- $scaled := false -}}
{{- range $model := ternary (list (dict "gateway" $.Values.gateway)) (include "rootstock.models" $ | fromJsonArray) (eq $component "gateway") -}}
{{- $values := index $model $component -}}
{{- if $values.autoscaling.enabled -}}
{{- $most = add $most $values.autoscaling.maxReplicas -}}
{{- if lt (int $values.autoscaling.minReplicas) (int $values.autoscaling.maxReplicas) }}{{ $scaled = true }}{{ end -}}
{{- else -}}
{{- $most = add $most $values.replicas -}}
{{- end -}}
{{- end -}}
{{- if $scaled }}
- record: rootstock:max_replicas
  expr: vector({{ $most }})
  labels:
    namespace: {{ $namespace }}
    component: rootstock-{{ $component }}
{{- end -}}
{{- end -}}
{{- end }}
