{{/* Parts of pod templates. All take a scope. */}}

{{/* metadata: labels, annotations and the checksum by which changed settings start new pods. */}}
{{- define "rootstock.pod.metadata" -}}
labels:
  {{- $own := include "rootstock.labels" . | fromYaml }}
  {{- if has .mode (list "prefill" "decode") }}{{ $_ := set $own "rootstock.io/role" .mode }}{{ end }}
  {{- mergeOverwrite (deepCopy .values.podLabels) (omit $own "helm.sh/chart" "app.kubernetes.io/managed-by") | toYaml | nindent 2 }}
annotations:
  checksum/config: {{ include "rootstock.config" . | sha256sum }}
  kubectl.kubernetes.io/default-container: {{ .component }}
  {{- with .model }}
  rootstock.io/model-name: {{ .name | quote }}
  {{- end }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* What all of the chart's pods have: identity, Pod Security `restricted`, pull secrets. */}}
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
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "rootstock.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities:
    drop: [ALL]
{{- end }}

{{/* Where pods go. */}}
{{- define "rootstock.pod.placement" -}}
{{- include "rootstock.pod.places" . | trim -}}
{{- end }}

{{- define "rootstock.pod.places" -}}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $gpu := gt (int (default 0 .values.gpus)) 0 }}
{{- $given := list }}
{{- range .values.tolerations }}{{ $given = append $given (default "" .key) }}{{ end }}
tolerations:
  {{- with .values.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if $gpu }}
  - key: nvidia.com/gpu
    operator: Exists
    effect: NoSchedule
  {{- end }}
  {{- range $key := list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" }}
  {{- if not (has $key $given) }}
  - key: {{ $key }}
    operator: Exists
    effect: NoExecute
    tolerationSeconds: {{ $.values.nodeLostSeconds }}
  {{- end }}
  {{- end }}
{{- if .values.topologySpread }}
{{- $kind := default "Deployment" .values.kind }}
topologySpreadConstraints:
  {{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "rootstock.selector" $ | nindent 8 }}
    {{- if ne $kind "LeaderWorkerSet" }}
    matchLabelKeys: [{{ ternary "pod-template-hash" "controller-revision-hash" (eq $kind "Deployment") }}]  # old pods of a rollout do not count
    {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{/* From the pod's deletion on: preStop's 5 s, the drain, and 10 s to hand back or end what is left. A gateway waits by itself. */}}
{{- define "rootstock.pod.gracePeriod" -}}
{{- if eq .component "gateway" -}}
{{ max (add .root.Values.drainSeconds .values.preStopSeconds 10) .values.terminationGracePeriodSeconds }}
{{- else -}}
{{ add .root.Values.drainSeconds 15 }}
{{- end -}}
{{- end }}

{{/* Endpoints learn that the pod goes before it stops listening. A gateway tells balancers too, so it has to know itself. */}}
{{- define "rootstock.preStop" -}}
{{- if ne .component "gateway" -}}
lifecycle:
  preStop:
    exec:
      command: [sleep, "5"]
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
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command: [python, -m, services.{{ .component }}]
envFrom:
  - configMapRef:
      name: {{ include "rootstock.componentName" . }}
{{ include "rootstock.containerSecurity" . }}
{{- with include "rootstock.preStop" . }}{{ . | nindent 0 }}{{ end }}
{{- end }}

{{/* Variables that no ConfigMap can hold, before extraEnv. */}}
{{- define "rootstock.env" -}}
- name: HOME
  value: /tmp
{{- with .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "rootstock.redisEnv" -}}
{{- if not .root.Values.redis.embedded -}}
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
{{ include "rootstock.statePassword" . }}
- name: ROOTSTOCK_STATE_REDIS_URL
  value: redis://:$(REDISCLI_AUTH)@{{ include "rootstock.host" (dict "root" .root "component" "state") }}:6379/0
{{- else if .root.Values.state.externalUrlSecret -}}
- name: ROOTSTOCK_STATE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.state.externalUrlSecret }}
      key: url
{{- end }}
{{- end }}

{{/* Under the name that redis-cli reads. */}}
{{- define "rootstock.statePassword" -}}
- name: REDISCLI_AUTH
  valueFrom:
    secretKeyRef:
      name: {{ default (include "rootstock.componentName" (dict "root" .root "component" "state")) .root.Values.state.passwordSecret }}
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
