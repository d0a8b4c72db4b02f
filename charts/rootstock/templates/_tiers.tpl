{{/* KV tiers of workers below the device pool: host memory, and files or a shared store. Unless noted, helpers take a scope of a worker. */}}

{{/* Location of the files: claim, volume or emptyDir; empty without files. */}}
{{- define "rootstock.tiers.files" -}}
{{- with .values.kvTiers.files -}}
{{- if .sizeGB -}}
{{- if ne (toString .claimSize) "0" }}claim{{ else if .volume }}volume{{ else }}emptyDir{{ end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Largest size in bytes of the files with their metadata. A pod is evicted if its emptyDir exceeds the limit. */}}
{{- define "rootstock.tiers.fileBytes" -}}
{{- with int64 .values.kvTiers.files.sizeGB }}{{ add (mul . 1050000000) 67108864 }}{{ else }}0{{ end -}}
{{- end }}

{{/* A quantity in bytes. */}}
{{- define "rootstock.bytes" -}}
{{- if kindIs "string" . -}}
{{- $number := regexFind "^[0-9.]+" . -}}
{{- $scales := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 -}}
{{ mulf (float64 $number) (index $scales (trimPrefix $number .)) | int64 }}
{{- else -}}
{{ int64 . }}
{{- end -}}
{{- end }}

{{- define "rootstock.tiers.config" -}}
{{- with .values.kvTiers -}}
{{- if .hostGB }}
ROOTSTOCK_ENABLE_HIERARCHICAL_CACHE: "true"
ROOTSTOCK_HICACHE_SIZE: {{ .hostGB | quote }}
{{- if .files.sizeGB }}
ROOTSTOCK_HICACHE_STORAGE_BACKEND: file
ROOTSTOCK_HICACHE_STORAGE_DIR: /var/lib/rootstock/kv
ROOTSTOCK_HICACHE_STORAGE_SIZE: {{ .files.sizeGB | quote }}
{{- else if .shared.secret }}
ROOTSTOCK_HICACHE_STORAGE_BACKEND: redis
ROOTSTOCK_HICACHE_STORAGE_SECRET_FILE: /etc/rootstock/kv-storage/secret
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "rootstock.tiers.env" -}}
{{- with .values.kvTiers.shared.secret -}}
- name: ROOTSTOCK_HICACHE_STORAGE_URL
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: url
{{- end }}
{{- end }}

{{- define "rootstock.tiers.mounts" -}}
{{- if include "rootstock.tiers.files" . }}
- name: kv
  mountPath: /var/lib/rootstock/kv
{{- else if .values.kvTiers.shared.secret }}
- name: kv-storage
  mountPath: /etc/rootstock/kv-storage
  readOnly: true
{{- end }}
{{- end }}

{{/* Volumes of the tiers, without a claim, which is in the StatefulSet. */}}
{{- define "rootstock.tiers.volumes" -}}
{{- $files := include "rootstock.tiers.files" . }}
{{- if eq $files "volume" }}
- name: kv
  {{- toYaml .values.kvTiers.files.volume | nindent 2 }}
{{- else if eq $files "emptyDir" }}
- name: kv
  emptyDir:
    sizeLimit: {{ include "rootstock.tiers.fileBytes" . | quote }}
{{- else if and (not $files) .values.kvTiers.shared.secret }}
- name: kv-storage
  secret:
    secretName: {{ .values.kvTiers.shared.secret }}
{{- end }}
{{- end }}

{{/* Egress rules to the shared stores of all models. Takes the root. */}}
{{- define "rootstock.tiers.egress" -}}
{{- $rules := list -}}
{{- range include "rootstock.models" . | fromJsonArray -}}
{{- with .worker.kvTiers.shared -}}
{{- if .secret -}}
{{- $rule := dict "ports" (list (dict "port" (int .port))) -}}
{{- with .peers }}{{ $_ := set $rule "to" . }}{{ end -}}
{{- $rules = append $rules $rule -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with uniq $rules }}{{ toYaml . }}{{ end -}}
{{- end }}
