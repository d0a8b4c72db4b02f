{{/* monitoring.podMonitor, with what is given under its old name where it is given there. Takes the root. */}}
{{- define "rootstock.podMonitor" -}}
{{- mergeOverwrite (deepCopy .Values.monitoring.podMonitor) (deepCopy .Values.monitoring.serviceMonitor) | toYaml -}}
{{- end }}

{{/* "true" where Prometheus is to have the release's series: by the PodMonitor, or because something is scaled by them. */}}
{{- define "rootstock.scrapes" -}}
{{- $wanted := or (include "rootstock.podMonitor" . | fromYaml).enabled .Values.gateway.autoscaling.enabled -}}
{{- range include "rootstock.workerPools" . | fromJsonArray -}}
{{- if .values.autoscaling.enabled -}}{{- $wanted = true -}}{{- end -}}
{{- end -}}
{{- if $wanted -}}true{{- end -}}
{{- end }}
