{{/* Parts of pod templates. All take a scope. */}}

{{/* Labels and annotations of pods. With the checksum, changed settings start new pods. */}}
{{- define "rootstock.pod.metadata" -}}
labels:
  {{- $own := include "rootstock.labels.own" . | fromYaml }}
  {{- if has .mode (list "prefill" "decode") }}{{ $_ := set $own "rootstock.io/role" .mode }}{{ end }}
  {{- omit $own "helm.sh/chart" "app.kubernetes.io/managed-by" | toYaml | nindent 2 }}
annotations:
  checksum/config: {{ include "rootstock.config" . | sha256sum }}
  kubectl.kubernetes.io/default-container: {{ .component }}
  {{- with .model }}
  rootstock.io/model-name: {{ .name | quote }}
  {{- end }}
{{- end }}

{{/* Identity and pull secrets of all pods. _overrides.tpl adds the fields that values can change. */}}
{{- define "rootstock.pod.common" -}}
serviceAccountName: {{ include "rootstock.serviceAccount" . }}
automountServiceAccountToken: {{ eq (include "rootstock.usesApi" .) "true" }}
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Seconds from a pod's deletion until it is killed: 8 s of preStop, the drain, and 10 s to end the remaining work. A gateway has no
preStop, because it waits for preStopSeconds itself. */}}
{{- define "rootstock.pod.gracePeriod" -}}
{{- if eq .component "gateway" -}}
{{ max (add .root.Values.drainSeconds .values.preStopSeconds 10) .values.terminationGracePeriodSeconds }}
{{- else -}}
{{ add .root.Values.drainSeconds 18 }}
{{- end -}}
{{- end }}

{{/* Seconds in which a rollout must make progress: an old pod drains, an image is pulled, and the service starts. Two hours more if an
init container downloads the model or waits for it. */}}
{{- define "rootstock.progressDeadline" -}}
{{ add .root.Values.drainSeconds (default 120 .values.startupSeconds) 600 (ternary 7200 0 .model.cached) }}
{{- end }}

{{/* Delays SIGTERM by 8 s, so that all gateways use the pod's successor before the pod refuses requests: DNS responses are cached for 5 s,
and gateways look up names every 2 s. A gateway gets SIGTERM immediately, because it must fail /ready for load balancers. */}}
{{- define "rootstock.preStop" -}}
{{- if ne .component "gateway" -}}
lifecycle:
  preStop:
    exec:
      command: [sleep, "8"]
{{- end -}}
{{- end }}

{{/* Probes of a gRPC service. The liveness probe fails only after two minutes, because a long prefill is not a fault. Takes {service, port,
startupSeconds}. */}}
{{- define "rootstock.probes" -}}
startupProbe:
  grpc:
    port: {{ .port }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add .startupSeconds 4) 5 }}
livenessProbe:
  grpc:
    port: {{ .port }}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 6
readinessProbe:
  grpc:
    port: {{ .port }}
    service: {{ .service }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
{{- end }}

{{/* A service's container, without its ports, probes, own variables and volumes. */}}
{{- define "rootstock.container" -}}
name: {{ .component }}
image: {{ include "rootstock.componentImage" . }}
{{- with .root.Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
command: [python, -m, rootstock_llm.services.{{ .component }}]
envFrom:
  - configMapRef:
      name: {{ include "rootstock.componentName" . }}
{{- with include "rootstock.preStop" . }}{{ . | nindent 0 }}{{ end }}
{{- end }}

{{/* Variables that are not in the ConfigMap. */}}
{{- define "rootstock.env" -}}
- name: HOME
  value: /tmp
{{- end }}

{{- define "rootstock.redisEnv" -}}
{{- if .root.Values.redis.embedded -}}
- name: INDEX_PASSWORD
  {{- include "rootstock.passwordFrom" (dict "root" .root "component" "redis") | nindent 2 }}
- name: ROOTSTOCK_REDIS_URL
  value: {{ include "rootstock.tls.redisUrl" (dict "root" .root "component" "redis" "password" "INDEX_PASSWORD") | quote }}
{{- else -}}
- name: ROOTSTOCK_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.redis.externalUrlSecret }}
      key: url
{{- end }}
{{- end }}

{{/* URL of the store. The kubelet replaces the variable with the password. */}}
{{- define "rootstock.stateEnv" -}}
{{- if .root.Values.state.embedded -}}
- name: REDISCLI_AUTH
  {{- include "rootstock.passwordFrom" (dict "root" .root "component" "state") | nindent 2 }}
- name: ROOTSTOCK_STATE_REDIS_URL
  value: {{ include "rootstock.tls.redisUrl" (dict "root" .root "component" "state" "password" "REDISCLI_AUTH") | quote }}
{{- else if .root.Values.state.externalUrlSecret -}}
- name: ROOTSTOCK_STATE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.state.externalUrlSecret }}
      key: url
{{- end }}
{{- end }}

{{/* Password of one of the chart's Redis servers. Takes {root, component}. component: redis or state. */}}
{{- define "rootstock.passwordFrom" -}}
valueFrom:
  secretKeyRef:
    name: {{ default (include "rootstock.componentName" .) (index .root.Values .component).passwordSecret }}
    key: password
{{- end }}

{{- define "rootstock.controlEnv" -}}
{{- with .root.Values.auth.controlTokenSecret -}}
- name: ROOTSTOCK_CONTROL_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: token
{{- end }}
{{- end }}

{{- define "rootstock.tmpVolume" -}}
- name: tmp
  emptyDir: {}
{{- end }}

{{- define "rootstock.tmpMount" -}}
- name: tmp
  mountPath: /tmp
{{- end }}
