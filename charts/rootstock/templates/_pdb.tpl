{{/* The PodDisruptionBudget of a scope's pods. */}}
{{- define "rootstock.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "rootstock.componentName" . }}
  labels:
    {{- include "rootstock.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .values.pdb.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "rootstock.selector" . | nindent 6 }}
{{- end }}
