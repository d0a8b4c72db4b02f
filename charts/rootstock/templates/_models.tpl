{{/* The model cache in pods. Unless stated otherwise, templates take a scope. If .model.cached, its model is in the cache. */}}

{{/* Returns "true" if the pods of a scope download their model: workers to their own disk, tokenizers and detokenizers only small files. */}}
{{- define "rootstock.fetches" -}}
{{- $cache := .root.Values.modelCache -}}
{{- if and .model.cached (or (eq $cache.type "pod") (and $cache.fetchTokenizers (ne .component "worker"))) }}true{{ end -}}
{{- end }}

{{- define "rootstock.modelVolume" -}}
{{- if include "rootstock.fetches" . -}}
{{- if ne .component "worker" }}
- name: models
  emptyDir: {}
{{- end }}
{{ include "rootstock.fetch.caVolume" .root }}
{{- else if .model.cached -}}
- name: models
  {{- with .root.Values.modelCache }}
  {{- if eq .type "pvc" }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-models" (include "rootstock.fullname" $.root)) .pvc.existingClaim }}
    readOnly: true
  {{- else if eq .type "hostPath" }}
  hostPath:
    path: {{ .hostPath }}
    type: Directory
  {{- else if eq .type "image" }}
  image:
    reference: {{ .image.reference }}
    {{- with .image.pullPolicy }}
    pullPolicy: {{ . }}
    {{- end }}
  {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "rootstock.modelMount" -}}
{{- if and .model.cached (or (ne .component "worker") (not (include "rootstock.fetches" .))) -}}
- name: models
  mountPath: {{ .root.Values.modelCache.mountPath }}
  readOnly: true
{{- end }}
{{- end }}

{{/* A container that downloads models, without its volumes. Takes {root, name, arguments, resources}. arguments: a folder and a source
for each model; resources: default those of the Job. */}}
{{- define "rootstock.fetch.container" -}}
{{- $prefetch := .root.Values.modelCache.prefetch -}}
name: {{ .name }}
image: {{ include "rootstock.image" (dict "root" .root "image" $prefetch.image) }}
{{- with .root.Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
command:
  - python
  - -m
  - rootstock_llm.services.shared.fetch
  {{- range .arguments }}
  - {{ . | quote }}
  {{- end }}
resources:
  {{- toYaml (default $prefetch.resources .resources) | nindent 2 }}
{{- end }}

{{/* Variables with the download sources, which services/shared/fetch reads. Takes the root. */}}
{{- define "rootstock.fetch.env" -}}
{{- with .Values.modelCache.prefetch -}}
- name: HOME
  value: /tmp
{{- with .tokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: token
{{- end }}
{{- with .hubEndpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
- name: AWS_REGION
  value: {{ .s3.region | quote }}
{{- with .s3.endpoint }}
- name: AWS_ENDPOINT_URL
  value: {{ . | quote }}
{{- end }}
{{- with .s3.secret }}
{{- $secret := . }}
{{- range list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" "AWS_SESSION_TOKEN" }}
- name: {{ . }}
  valueFrom:
    secretKeyRef:
      name: {{ $secret }}
      key: {{ . }}
      {{- if eq . "AWS_SESSION_TOKEN" }}
      optional: true
      {{- end }}
{{- end }}
{{- end }}
{{- with .gcs.endpoint }}
- name: GCS_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- with .gcs.secret }}
- name: GCS_KEY
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: key.json
{{- end }}
{{- if .proxy }}
- name: HTTPS_PROXY
  value: {{ .proxy | quote }}
- name: HTTP_PROXY
  value: {{ .proxy | quote }}
- name: NO_PROXY
  value: {{ .noProxy | quote }}
{{- end }}
{{- if .ca.configMap }}
- name: CA_FILE
  value: /etc/rootstock/ca/ca.crt
{{- end }}
{{- end }}
{{- end }}

{{- define "rootstock.fetch.caVolume" -}}
{{- with .Values.modelCache.prefetch.ca }}
{{- if .configMap -}}
- name: fetch-ca
  configMap:
    name: {{ .configMap }}
    items:
      - {key: {{ .key }}, path: ca.crt}
{{- end }}
{{- end }}
{{- end }}

{{- define "rootstock.fetch.caMount" -}}
{{- if .Values.modelCache.prefetch.ca.configMap -}}
- name: fetch-ca
  mountPath: /etc/rootstock/ca
  readOnly: true
{{- end }}
{{- end }}

{{/* An init container that downloads the files that this pod needs. */}}
{{- define "rootstock.fetchModel" -}}
{{- $worker := eq .component "worker" -}}
{{- $folder := .model.path -}}
{{- $resources := dict -}}
{{- if $worker -}}
{{- $folder = include "rootstock.worker.modelFolder" . -}}
{{- else -}}
{{- $resources = dict "requests" (dict "cpu" "50m" "memory" "64Mi") "limits" (dict "cpu" "1" "memory" "512Mi") -}}
{{- end -}}
{{ include "rootstock.fetch.container" (dict "root" .root "name" "fetch-model" "arguments" (list $folder .model.source) "resources" $resources) }}
env:
  {{- include "rootstock.fetch.env" .root | nindent 2 }}
  {{- if $worker }}
  {{- with include "rootstock.worker.makeRoom" . }}{{ . | nindent 2 }}{{ end }}
  {{- else }}
  - name: MODEL_FILES
    value: tokenizer
  {{- end }}
volumeMounts:
  {{- include "rootstock.tmpMount" . | nindent 2 }}
  - name: {{ ternary "cache" "models" $worker }}
    mountPath: {{ ternary "/cache" .root.Values.modelCache.mountPath $worker }}
  {{- with include "rootstock.fetch.caMount" .root }}{{ . | nindent 2 }}{{ end }}
{{- end }}

{{/* An init container that downloads the model, or waits until it is complete, so that the pod waits instead of crashing. The waiting
container uses the component's image. */}}
{{- define "rootstock.waitForModel" -}}
{{- if include "rootstock.fetches" . -}}
{{ include "rootstock.fetchModel" . }}
{{- else if .model.cached -}}
name: wait-for-model
image: {{ include "rootstock.componentImage" . }}
{{- with .root.Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
command:
  - python
  - -c
  - |
    {{- .root.Files.Get "scripts/wait_for_model.py" | trim | nindent 4 }}
  - {{ .model.path | quote }}
  - {{ ternary .model.source "" .root.Values.modelCache.prefetch.enabled | quote }}
resources:
  requests: {cpu: 10m, memory: 32Mi}
  limits: {cpu: "1", memory: 128Mi}
volumeMounts:
  {{- with include "rootstock.modelMount" . }}{{ . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
