{{/* Variables of a component's ConfigMap: those that the chart sets, then `settings`. Takes a scope. */}}
{{- define "rootstock.config" -}}
{{- $config := include (printf "rootstock.config.%s" .component) . | fromYaml -}}
{{- range $name, $value := .values.settings -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $_ := set $config (printf "ROOTSTOCK_%s" (upper $name)) (include "rootstock.setting" $value) -}}
{{- end -}}
{{- end -}}
{{- toYaml $config -}}
{{- end }}

{{/* A setting's value as text: list entries separated by commas, whole numbers without an exponent. */}}
{{- define "rootstock.setting" -}}
{{- if kindIs "slice" . -}}
{{ join "," . }}
{{- else if and (kindIs "float64" .) (eq (float64 (int64 .)) .) -}}
{{ int64 . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end }}

{{/* Listen address for all addresses of a pod; with IPv6, for both families. Takes the root. */}}
{{- define "rootstock.anyHost" -}}
{{ ternary "::" "0.0.0.0" (eq .Values.ipFamily "IPv6") | quote }}
{{- end }}

{{/* Variables of every service. Takes a scope. */}}
{{- define "rootstock.config.common" -}}
ROOTSTOCK_HOST: {{ include "rootstock.anyHost" .root }}
ROOTSTOCK_LOG_LEVEL: {{ .root.Values.logLevel | quote }}
ROOTSTOCK_GRACE_S: {{ .root.Values.drainSeconds | quote }}
{{- with .root.Values.tracing.otlpEndpoint }}
ROOTSTOCK_OTLP_ENDPOINT: {{ . | quote }}
ROOTSTOCK_TRACE_SAMPLE_RATIO: {{ $.root.Values.tracing.sampleRatio | quote }}
{{- end }}
{{- include "rootstock.config.tls" . }}
{{- end }}

{{- define "rootstock.config.model" -}}
ROOTSTOCK_SERVED_MODEL_NAME: {{ .model.name | quote }}
ROOTSTOCK_METRICS_HOST: {{ include "rootstock.anyHost" .root }}
{{- end }}

{{/* Target that resolves to a component's replicas. Takes {root, component, pool, port}. */}}
{{- define "rootstock.target" -}}
{{- if eq .root.Values.gateway.discovery "k8s" -}}
k8s:///{{ include "rootstock.fullname" .root }}-{{ default .component .pool }}.{{ .root.Release.Namespace }}:{{ .port }}
{{- else -}}
dns:///{{ include "rootstock.host" . }}:{{ .port }}
{{- end -}}
{{- end }}

{{- define "rootstock.config.gateway" -}}
{{ include "rootstock.config.common" . }}
ROOTSTOCK_PORT: "8000"
ROOTSTOCK_HEALTH_PORT: "7000"
ROOTSTOCK_METRICS_HOST: {{ include "rootstock.anyHost" .root }}
ROOTSTOCK_METRICS_PORT: "9104"
ROOTSTOCK_METRICS_ON_HTTP: "false"
ROOTSTOCK_DOCS_ENABLED: "false"
ROOTSTOCK_KEEP_ALIVE_S: "620"
ROOTSTOCK_STOP_DELAY_S: {{ .values.preStopSeconds | quote }}
ROOTSTOCK_PLAYGROUND: {{ .values.playground | quote }}
{{- if .values.tlsSecret }}
ROOTSTOCK_TLS_CERT_FILE: /etc/rootstock/tls/tls.crt
ROOTSTOCK_TLS_KEY_FILE: /etc/rootstock/tls/tls.key
{{- end }}
ROOTSTOCK_PEER_HOST: {{ include "rootstock.anyHost" .root }}
ROOTSTOCK_PEER_PORT: "7005"
ROOTSTOCK_PEERS: {{ include "rootstock.target" (dict "root" .root "component" "gateway-peers" "port" 7005) }}
ROOTSTOCK_TOKENIZERS: {{ include "rootstock.target" (dict "root" .root "component" "tokenizer" "port" 7001) }}
ROOTSTOCK_DETOKENIZERS: {{ include "rootstock.target" (dict "root" .root "component" "detokenizer" "port" 7002) }}
ROOTSTOCK_WORKERS: {{ include "rootstock.target" (dict "root" .root "component" "worker" "port" 7003) }}
{{- if include "rootstock.hasPrefill" .root }},{{ include "rootstock.target" (dict "root" .root "component" "worker" "pool" "prefill" "port" 7003) }}{{ end }}
{{- $names := list }}
{{- range .root.Values.models }}{{ $names = append $names .name }}{{ end }}
ROOTSTOCK_MODELS: {{ join "," $names | quote }}
ROOTSTOCK_QUEUE_TIMEOUT_S: {{ .values.queueTimeoutSeconds | quote }}
{{- if include "rootstock.hasKeys" .root }}
ROOTSTOCK_API_KEYS_FILE: /etc/rootstock/keys
{{- end }}
{{- end }}

{{- define "rootstock.config.tokenizer" -}}
{{ include "rootstock.config.common" . }}
{{ include "rootstock.config.model" . }}
ROOTSTOCK_PORT: "7001"
ROOTSTOCK_METRICS_PORT: "9101"
ROOTSTOCK_MODEL: {{ .model.path | quote }}
{{- end }}

{{- define "rootstock.config.detokenizer" -}}
{{ include "rootstock.config.common" . }}
{{ include "rootstock.config.model" . }}
ROOTSTOCK_PORT: "7002"
ROOTSTOCK_METRICS_PORT: "9102"
ROOTSTOCK_MODEL: {{ .model.path | quote }}
{{- end }}

{{- define "rootstock.config.worker" -}}
{{ include "rootstock.config.common" . }}
{{ include "rootstock.config.model" . }}
ROOTSTOCK_PORT: "7003"
ROOTSTOCK_METRICS_PORT: "9103"
ROOTSTOCK_MODEL: {{ include "rootstock.worker.modelFolder" . | quote }}
ROOTSTOCK_EXECUTOR: {{ include "rootstock.worker.executor" . }}
ROOTSTOCK_PROFILE_DIR: /tmp/profiles
{{- if .root.Values.auth.controlTokenSecret }}
ROOTSTOCK_CONTROL_HOST: {{ include "rootstock.anyHost" .root }}
ROOTSTOCK_CONTROL_PORT: "7004"
{{- end }}
{{- if ne .mode "both" }}
ROOTSTOCK_DISAGGREGATION_MODE: {{ .mode }}
{{- if .values.kvTlsSecret }}
ROOTSTOCK_DISAGGREGATION_TLS_CERT_FILE: /etc/rootstock/kv-tls/tls.crt
ROOTSTOCK_DISAGGREGATION_TLS_KEY_FILE: /etc/rootstock/kv-tls/tls.key
ROOTSTOCK_DISAGGREGATION_TLS_CA_FILE: /etc/rootstock/kv-tls/ca.crt
{{- end }}
{{- end }}
{{- if eq .mode "prefill" }}
ROOTSTOCK_DISAGGREGATION_HOST: {{ include "rootstock.anyHost" .root }}
ROOTSTOCK_DISAGGREGATION_PORT: "7103"
{{- end }}
{{- include "rootstock.tiers.config" . }}
{{- end }}
