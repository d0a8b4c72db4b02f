{{/* The model cache in pods. All take a scope whose model says whether it lives there (`cached`). */}}

{{- define "rootstock.modelVolume" -}}
{{- if .model.cached -}}
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
    pullPolicy: {{ .image.pullPolicy }}
  {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "rootstock.modelMount" -}}
{{- if .model.cached -}}
- name: models
  mountPath: {{ .root.Values.modelCache.mountPath }}
  readOnly: true
{{- end }}
{{- end }}

{{/* Waits until the model is whole, so that a pod says "waiting for the model" instead of crashing. Runs in the component's image. */}}
{{- define "rootstock.waitForModel" -}}
{{- if .model.cached -}}
name: wait-for-model
image: {{ include "rootstock.componentImage" . }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command:
  - python
  - -c
  - |
    {{- .root.Files.Get "scripts/wait_for_model.py" | trim | nindent 4 }}
  - {{ .model.path | quote }}
  - {{ ternary .model.source "" .root.Values.modelCache.prefetch.enabled | quote }}
resources:
  requests: {cpu: 10m, memory: 32Mi}
  limits: {memory: 128Mi}
volumeMounts:
  {{- with include "rootstock.modelMount" . }}{{ . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}
