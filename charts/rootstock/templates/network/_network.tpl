{{/* Parts of NetworkPolicies. */}}

{{/* The first part of a NetworkPolicy, which ends with its podSelector. Takes {root, component, name}. name: name of the policy;
default: the component. */}}
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

{{/* NetworkPolicyPeer for the component's pods. Takes {root, component}. */}}
{{- define "rootstock.peer" -}}
- podSelector:
    matchLabels:
      {{- include "rootstock.selector" . | nindent 6 }}
{{- end }}

{{/* NetworkPolicyPeers for Prometheus. Takes the root. */}}
{{- define "rootstock.peer.monitoring" -}}
{{- with .Values.networkPolicy.monitoring -}}
{{ toYaml . }}
{{- else -}}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: monitoring
- namespaceSelector: {{ toJson .Values.networkPolicy.monitoringNamespaces }}
  podSelector:
    matchLabels:
      app.kubernetes.io/name: prometheus
{{- end -}}
{{- end }}

{{/* Egress to a component's pods. Takes {root, component, ports}. */}}
{{- define "rootstock.egress.to" -}}
- to:
    {{- include "rootstock.peer" . | nindent 4 }}
  ports:
    {{- range .ports }}
    - port: {{ . }}
    {{- end }}
{{- end }}

{{/* Egress to the DNS servers. Takes the root. */}}
{{- define "rootstock.egress.dns" -}}
- ports:
    {{- range $port := list 53 5353 }}
    {{- range list "UDP" "TCP" }}
    - {port: {{ $port }}, protocol: {{ . }}}
    {{- end }}
    {{- end }}
  {{- with .Values.networkPolicy.dns }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{- define "rootstock.egress.redis" -}}
{{- if .Values.redis.embedded -}}
{{ include "rootstock.egress.to" (dict "root" . "component" "redis" "ports" (list 6379)) }}
{{- else -}}
- ports:
    - port: {{ .Values.redis.externalPort }}
{{- end }}
{{- end }}

{{/* Egress to the download sources: port 443, the ports of endpoints and proxy, and the metadata server for a Google role. Takes the
root. */}}
{{- define "rootstock.egress.fetch" -}}
{{- $prefetch := .Values.modelCache.prefetch -}}
{{- $ports := list 443 -}}
{{- range compact (list $prefetch.hubEndpoint $prefetch.s3.endpoint $prefetch.gcs.endpoint $prefetch.proxy) -}}
{{- $port := regexFind ":[0-9]+$" (urlParse .).host | trimPrefix ":" -}}
{{- $ports = append $ports (int (default (ternary 80 443 (hasPrefix "http:" .)) $port)) -}}
{{- end -}}
- ports:
    {{- range uniq $ports }}
    - port: {{ . }}
    {{- end }}
{{- $google := false -}}
{{- range .Values.models }}{{ if hasPrefix "gs://" (default "" .source) }}{{ $google = not $prefetch.gcs.secret }}{{ end }}{{ end -}}
{{- if $google }}
- to:
    {{- range list "169.254.169.254/32" "169.254.169.252/32" }}
    - ipBlock: {cidr: {{ . }}}
    {{- end }}
  ports:
    - port: 80
    - port: 988
{{- end }}
{{- end }}

{{/* Returns "true" if a component's pods of any model download files. Takes {root, component}. */}}
{{- define "rootstock.anyFetches" -}}
{{- $any := false -}}
{{- range $model := include "rootstock.models" .root | fromJsonArray -}}
{{- if include "rootstock.fetches" (dict "root" $.root "component" $.component "model" $model) }}{{ $any = true }}{{ end -}}
{{- end -}}
{{- if $any }}true{{ end -}}
{{- end }}

{{- define "rootstock.egress.otlp" -}}
{{- with .Values.tracing.otlpEndpoint -}}
- ports:
    - port: {{ regexFind "[0-9]+$" . }}
{{- end }}
{{- end }}

{{/* Egress to the API server, which is not a pod: to given addresses, or to any address at its ports. Takes the root. */}}
{{- define "rootstock.egress.api" -}}
- ports:
    {{- range .Values.networkPolicy.apiServerPorts }}
    - port: {{ . }}
    {{- end }}
  {{- with .Values.networkPolicy.apiServer }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* Selector of decode workers. Only they may read KV from prefill workers. Takes the root. */}}
{{- define "rootstock.selector.decode" -}}
{{ include "rootstock.selector" (dict "root" . "component" "worker") }}
rootstock.io/role: decode
{{- end }}

{{/* The policy of workers or of prefill workers. Takes {root, component}. component: worker or prefill. */}}
{{- define "rootstock.policy.worker" -}}
{{- $api := false }}
{{- range include "rootstock.models" .root | fromJsonArray }}
{{- if include "rootstock.usesApi" (dict "component" "worker" "values" .worker) }}{{ $api = true }}{{ end }}
{{- end }}
{{- include "rootstock.policy" . }}
  policyTypes: [Ingress, Egress]
  ingress:
    - ports:
        - port: 7003
        {{- if .root.Values.auth.controlTokenSecret }}
        - port: 7004
        {{- end }}
      from:
        {{- include "rootstock.peer" (dict "root" .root "component" "gateway") | nindent 8 }}
    - ports:
        - port: 9103
      from:
        {{- include "rootstock.peer.monitoring" .root | nindent 8 }}
    {{- if eq .component "prefill" }}
    - ports:
        - port: 7103
      from:
        - podSelector:
            matchLabels:
              {{- include "rootstock.selector.decode" .root | nindent 14 }}
    {{- end }}
  egress:
    {{- include "rootstock.egress.redis" .root | nindent 4 }}
    {{- with include "rootstock.tiers.egress" .root }}{{ . | nindent 4 }}{{ end }}
    {{- with .root.Values.networkPolicy.workerEgress }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- include "rootstock.egress.dns" .root | nindent 4 }}
    {{- if $api }}
    {{- include "rootstock.egress.api" .root | nindent 4 }}
    {{- end }}
    {{- if include "rootstock.anyFetches" (dict "root" .root "component" "worker") }}
    {{- include "rootstock.egress.fetch" .root | nindent 4 }}
    {{- end }}
    {{- with include "rootstock.egress.otlp" .root }}{{ . | nindent 4 }}{{ end }}
{{- end }}
