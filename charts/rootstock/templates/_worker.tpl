{{/* The worker's pods, whatever owns them. All take a scope. */}}

{{/* Where the worker reads its model: on a disk of its own, if it has one. */}}
{{- define "rootstock.worker.modelFolder" -}}
{{- if include "rootstock.worker.hasDisk" . -}}
/cache/{{ .model.slug }}
{{- else -}}
{{ .model.path }}
{{- end -}}
{{- end }}

{{- define "rootstock.worker.hasDisk" -}}
{{- if and (eq .values.kind "StatefulSet") (ne (toString .values.cacheSize) "0") }}true{{ end -}}
{{- end }}

{{- define "rootstock.worker.env" -}}
{{ include "rootstock.env" . }}
- name: XDG_CACHE_HOME
  value: {{ ternary "/cache/.cache" "/tmp/cache" (eq (include "rootstock.worker.hasDisk" .) "true") }}
- name: ROOTSTOCK_WORKER_ID
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- if eq (include "rootstock.usesApi" .) "true" }}
- name: ROOTSTOCK_POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: ROOTSTOCK_POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
{{- end }}
{{- if and (eq (int .values.gpus) 0) (not (hasKey .values.settings "num_threads")) (dig "requests" "cpu" "" .values.resources) }}
- name: ROOTSTOCK_NUM_THREADS
  valueFrom:
    resourceFieldRef:
      containerName: {{ .component }}
      resource: requests.cpu
      divisor: "1"
{{- end }}
{{- with include "rootstock.controlEnv" . }}{{ . | nindent 0 }}{{ end }}
{{- with include "rootstock.redisEnv" . }}{{ . | nindent 0 }}{{ end }}
{{- end }}

{{- define "rootstock.worker.resources" -}}
{{- $gpus := int .values.gpus -}}
{{- $resources := deepCopy .values.resources -}}
{{- if $gpus -}}
{{- $_ := set $resources "limits" (set (default (dict) $resources.limits) "nvidia.com/gpu" $gpus) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{/* From the shared cache to the pod's own disk. */}}
{{- define "rootstock.worker.copyModel" -}}
name: copy-model
image: {{ include "rootstock.componentImage" . }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command:
  - python
  - -c
  - |
    {{- .root.Files.Get "scripts/copy_model.py" | trim | nindent 4 }}
  - {{ .model.path | quote }}
  - {{ include "rootstock.worker.modelFolder" . | quote }}
resources:
  requests: {cpu: 100m, memory: 128Mi}
  limits: {memory: 1Gi}
{{ include "rootstock.containerSecurity" . }}
volumeMounts:
  {{- with include "rootstock.modelMount" . }}{{ . | nindent 2 }}{{ end }}
  - name: cache
    mountPath: /cache
{{- end }}

{{- define "rootstock.worker.podSpec" -}}
{{ include "rootstock.pod.common" . }}
{{- with include "rootstock.pod.placement" . }}{{ . | nindent 0 }}{{ end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
terminationGracePeriodSeconds: {{ include "rootstock.pod.gracePeriod" . }}
{{- $disk := include "rootstock.worker.hasDisk" . }}
{{- with include "rootstock.waitForModel" . }}
initContainers:
  - {{- . | nindent 4 }}
  {{- if $disk }}
  - {{- include "rootstock.worker.copyModel" $ | nindent 4 }}
  {{- end }}
{{- end }}
containers:
  - {{- include "rootstock.container" . | nindent 4 }}
    env:
      {{- include "rootstock.worker.env" . | nindent 6 }}
    ports:
      - name: grpc
        containerPort: 7003
      - name: metrics
        containerPort: 9103
      {{- include "rootstock.tls.ports" . | indent 6 }}
      {{- if .root.Values.auth.controlTokenSecret }}
      - name: control
        containerPort: 7004
      {{- end }}
      {{- if eq .mode "prefill" }}
      - name: kv
        containerPort: 7103
      {{- end }}
    {{- include "rootstock.probes" (dict "service" "worker" "port" (include "rootstock.tls.probed" (set . "port" 7003)) "startupSeconds" .values.startupSeconds) | nindent 4 }}
    resources:
      {{- include "rootstock.worker.resources" . | nindent 6 }}
    volumeMounts:
      {{- include "rootstock.tmpMount" . | nindent 6 }}
      {{- include "rootstock.tls.mount" . | indent 6 }}
      - name: shm
        mountPath: /dev/shm
      {{- if $disk }}
      - name: cache
        mountPath: /cache
      {{- else }}
      {{- with include "rootstock.modelMount" . }}{{ . | nindent 6 }}{{ end }}
      {{- end }}
      {{- if and .values.kvTlsSecret (ne .mode "both") }}
      - name: kv-tls
        mountPath: /etc/rootstock/kv-tls
        readOnly: true
      {{- end }}
volumes:
  {{- include "rootstock.tmpVolume" . | nindent 2 }}
  {{- include "rootstock.tls.volume" . | indent 2 }}
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ .values.sharedMemory }}
  {{- with include "rootstock.modelVolume" . }}{{ . | nindent 2 }}{{ end }}
  {{- if and .values.kvTlsSecret (ne .mode "both") }}
  - name: kv-tls
    secret:
      secretName: {{ .values.kvTlsSecret }}
  {{- end }}
{{- end }}
