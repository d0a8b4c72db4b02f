{{/* Parts of NetworkPolicies. */}}

{{/* Up to and with its podSelector. Takes {root, component, name}; name: of the policy, by default the component's. */}}
{{- define "rootstock.policy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "rootstock.fullname" .root }}-{{ default .component .name }}
  labels:
    {{- include "rootstock.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "rootstock.selector" . | nindent 6 }}
{{- end }}

{{/* A peer: pods of this release. Takes {root, component}. */}}
{{- define "rootstock.peer" -}}
- podSelector:
    matchLabels:
      {{- include "rootstock.selector" . | nindent 6 }}
{{- end }}

{{/* Prometheus. Takes the root. */}}
{{- define "rootstock.peer.monitoring" -}}
{{- with .Values.networkPolicy.monitoring -}}
{{ toYaml . }}
{{- else -}}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: monitoring
{{- end -}}
{{- end }}

{{/* Egress to a component of this release. Takes {root, component, ports}. */}}
{{- define "rootstock.egress.to" -}}
- to:
    {{- include "rootstock.peer" . | nindent 4 }}
  ports:
    {{- range .ports }}
    - port: {{ . }}
    {{- end }}
{{- end }}

{{/* Egress that components share. Takes {root, values, component, redis, dns}. */}}
{{- define "rootstock.egress.dns" -}}
- to:
    {{- toYaml .Values.networkPolicy.dns | nindent 4 }}
  ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}

{{- define "rootstock.egress.redis" -}}
{{- if .Values.redis.embedded -}}
{{ include "rootstock.egress.to" (dict "root" . "component" "redis" "ports" (list 6379)) }}
{{- else -}}
- ports:
    - port: {{ .Values.redis.externalPort }}
{{- end }}
{{- end }}

{{- define "rootstock.egress.otlp" -}}
{{- with .Values.tracing.otlpEndpoint -}}
- ports:
    - port: {{ regexFind "[0-9]+$" . }}
{{- end }}
{{- end }}

{{/* The API server is no pod: an address, or any address at its ports. */}}
{{- define "rootstock.egress.api" -}}
- ports:
    - port: 443
    - port: 6443
  {{- with .Values.networkPolicy.apiServer }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
