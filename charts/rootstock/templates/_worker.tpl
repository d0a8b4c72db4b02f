{{/* Pods of workers, for every kind of owner. Unless noted, helpers take a scope. */}}

{{/* Folder of the worker's model: on its own disk, if it has one. */}}
{{- define "rootstock.worker.modelFolder" -}}
{{- if include "rootstock.worker.hasDisk" . -}}
/cache/{{ .model.slug }}
{{- else -}}
{{ .model.path }}
{{- end -}}
{{- end }}

{{- define "rootstock.worker.hasDisk" -}}
{{- if or .values.cacheVolume (and (eq .values.kind "StatefulSet") (ne (toString .values.cacheSize) "0")) }}true{{ end -}}
{{- end }}

{{- define "rootstock.worker.env" -}}
{{ include "rootstock.env" . }}
- name: XDG_CACHE_HOME
  value: {{ ternary "/cache/.cache" "/tmp/cache" (eq (include "rootstock.worker.hasDisk" .) "true") }}
{{- if and (include "rootstock.worker.hasDisk" .) (include "rootstock.usesGpu" .) }}
- name: TRITON_CACHE_DIR
  value: /cache/.cache/triton
- name: FLASHINFER_WORKSPACE_BASE
  value: /cache
{{- end }}
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
{{- with include "rootstock.tiers.env" . }}{{ . | nindent 0 }}{{ end }}
{{- end }}

{{- define "rootstock.worker.resources" -}}
{{- $gpus := int .values.gpus -}}
{{- $resources := deepCopy .values.resources -}}
{{- if $gpus -}}
{{- $_ := set $resources "limits" (set (default (dict) $resources.limits) .values.gpuResource $gpus) -}}
{{- end -}}
{{- $named := or (dig "requests" "ephemeral-storage" "" $resources) (dig "limits" "ephemeral-storage" "" $resources) -}}
{{- if and (eq (include "rootstock.tiers.files" .) "emptyDir") (not $named) -}}
{{- $size := include "rootstock.tiers.fileBytes" . -}}
{{- $_ := set $resources "requests" (set (default (dict) $resources.requests) "ephemeral-storage" $size) -}}
{{- end -}}
{{- $claims := list -}}
{{- range .values.resourceClaims }}{{ $claims = append $claims (dict "name" .name) }}{{ end -}}
{{- with $claims }}{{ $_ := set $resources "claims" . }}{{ end -}}
{{- toYaml $resources -}}
{{- end }}

{{/* The pod's device claims. */}}
{{- define "rootstock.worker.claims" -}}
{{- range .values.resourceClaims }}
- name: {{ .name }}
  {{- if .resourceClaimName }}
  resourceClaimName: {{ .resourceClaimName }}
  {{- else }}
  resourceClaimTemplateName: {{ default (include "rootstock.worker.claimTemplate" (dict "scope" $ "claim" .)) .resourceClaimTemplateName }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Name of the chart's ResourceClaimTemplate. It contains a hash of the content, because such an object cannot be changed. Takes
{scope, claim}. */}}
{{- define "rootstock.worker.claimTemplate" -}}
{{ include "rootstock.componentName" .scope }}-{{ .claim | toJson | sha256sum | trunc 8 }}
{{- end }}

{{/* Executor of a worker, which also selects its image; empty for other components. */}}
{{- define "rootstock.worker.executor" -}}
{{- if hasKey .values "gpus" -}}
{{- $derived := ternary "cuda" "cpu" (or (gt (int .values.gpus) 0) (gt (len .values.resourceClaims) 0)) -}}
{{- coalesce .values.executor .values.settings.executor $derived -}}
{{- end -}}
{{- end }}

{{/* Lets a download empty the disk first, if only this pod reads the disk. Other pods may read a node's folder or a named claim. */}}
{{- define "rootstock.worker.makeRoom" -}}
{{- $volume := .values.cacheVolume -}}
{{- if or (not $volume) (hasKey $volume "emptyDir") (hasKey $volume "ephemeral") -}}
- name: MAKE_ROOM
  value: "true"
{{- end }}
{{- end }}

{{/* An init container that copies the model from the shared cache to the pod's own disk. */}}
{{- define "rootstock.worker.copyModel" -}}
{{ include "rootstock.fetch.container" (dict "root" .root "name" "copy-model" "arguments" (list (include "rootstock.worker.modelFolder" .) .model.path)) }}
{{- with include "rootstock.worker.makeRoom" . }}
env:
  {{- . | nindent 2 }}
{{- end }}
volumeMounts:
  {{- with include "rootstock.modelMount" . }}{{ . | nindent 2 }}{{ end }}
  - name: cache
    mountPath: /cache
{{- end }}

{{- define "rootstock.worker.podSpec" -}}
{{ include "rootstock.pod.common" . }}
{{- with include "rootstock.worker.claims" . }}
resourceClaims:
  {{- . | nindent 2 }}
{{- end }}
terminationGracePeriodSeconds: {{ include "rootstock.pod.gracePeriod" . }}
{{- $disk := include "rootstock.worker.hasDisk" . }}
{{- with include "rootstock.waitForModel" . }}
initContainers:
  - {{- . | nindent 4 }}
  {{- if and $disk (not (include "rootstock.fetches" $)) }}
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
      {{- end }}
      {{- with include "rootstock.modelMount" . }}{{ . | nindent 6 }}{{ end }}
      {{- if and .values.kvTlsSecret (ne .mode "both") }}
      - name: kv-tls
        mountPath: /etc/rootstock/kv-tls
        readOnly: true
      {{- end }}
      {{- include "rootstock.tiers.mounts" . | indent 6 }}
volumes:
  {{- include "rootstock.tmpVolume" . | nindent 2 }}
  {{- include "rootstock.tls.volume" . | indent 2 }}
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ .values.sharedMemory }}
  {{- with include "rootstock.modelVolume" . | trim }}{{ . | nindent 2 }}{{ end }}
  {{- with .values.cacheVolume }}
  - name: cache
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and .values.kvTlsSecret (ne .mode "both") }}
  - name: kv-tls
    secret:
      secretName: {{ .values.kvTlsSecret }}
  {{- end }}
  {{- include "rootstock.tiers.volumes" . | indent 2 }}
{{- end }}
