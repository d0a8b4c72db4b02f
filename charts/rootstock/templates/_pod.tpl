{{/* Parts of pod templates. All take a scope. */}}

{{/* metadata: labels, annotations and the checksum by which changed settings start new pods. */}}
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

{{/* What all of the chart's pods have: identity and pull secrets. _overrides.tpl has what values may change. */}}
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

{{/* From the pod's deletion on: preStop's 8 s, the drain, and 10 s to hand back or end what is left. A gateway waits by itself. */}}
{{- define "rootstock.pod.gracePeriod" -}}
{{- if eq .component "gateway" -}}
{{ max (add .root.Values.drainSeconds .values.preStopSeconds 10) .values.terminationGracePeriodSeconds }}
{{- else -}}
{{ add .root.Values.drainSeconds 18 }}
{{- end -}}
{{- end }}

{{/* Seconds in which a rollout must get on: what goes drains, an image is pulled, the service starts. Where an init container fetches
the model or waits until it is whole, two hours more. */}}
{{- define "rootstock.progressDeadline" -}}
{{ add .root.Values.drainSeconds (default 120 .values.startupSeconds) 600 (ternary 7200 0 .model.cached) }}
{{- end }}

{{/* Everybody knows that the pod goes, and who has come in its place, before it takes nothing more: answers of the cluster's DNS hold
for 5 s, and gateways look every 2 s. A gateway tells balancers too, so it has to know itself. */}}
{{- define "rootstock.preStop" -}}
{{- if ne .component "gateway" -}}
lifecycle:
  preStop:
    exec:
      command: [sleep, "8"]
{{- end -}}
{{- end }}

{{/* Probes of a gRPC service. Takes {service, port, startupSeconds}. Liveness waits two minutes: a long prefill is no fault. */}}
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

{{/* A service's container but for its ports, probes, own variables and volumes. */}}
{{- define "rootstock.container" -}}
name: {{ .component }}
image: {{ include "rootstock.componentImage" . }}
{{- with .root.Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
command: [python, -m, services.{{ .component }}]
envFrom:
  - configMapRef:
      name: {{ include "rootstock.componentName" . }}
{{- with include "rootstock.preStop" . }}{{ . | nindent 0 }}{{ end }}
{{- end }}

{{/* Variables that no ConfigMap can hold. */}}
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

{{/* Where gateways keep what clients have them keep. The kubelet puts the password into the URL. */}}
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

{{/* The password of a Redis of the chart's own. Takes {root, component}: redis or state. */}}
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
