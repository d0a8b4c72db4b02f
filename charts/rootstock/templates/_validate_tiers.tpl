{{/* Refuses KV tiers that cannot work. Takes the root. */}}
{{- define "rootstock.validate.tiers" -}}
{{- range $pool := include "rootstock.workerPools" . | fromJsonArray -}}
{{- $at := printf "model %s: %s.kvTiers" .model.name (ternary "worker" "worker.prefill, as worker," (ne .mode "prefill")) -}}
{{- $values := .values -}}
{{- $tiers := .values.kvTiers -}}
{{- $volume := $tiers.files.volume -}}
{{- $claimed := ne (toString $tiers.files.claimSize) "0" -}}
{{- if and (not $tiers.hostGB) (or $tiers.files.sizeGB $tiers.shared.secret) -}}
  {{- fail (printf "%s stores KV in files or in a shared Redis, which needs a host tier. Set hostGB to 1 or more." $at) -}}
{{- end -}}
{{- if and $tiers.files.sizeGB $tiers.shared.secret -}}
  {{- fail (printf "%s.files.sizeGB and shared.secret are both set: a worker has one storage. Set sizeGB to 0, or remove secret." $at) -}}
{{- end -}}
{{- if and (or $claimed $volume) (not $tiers.files.sizeGB) -}}
  {{- fail (printf "%s.files has a volume, and sizeGB is 0: no files would be stored there. Set sizeGB, or remove claimSize and volume." $at) -}}
{{- end -}}
{{- if and $claimed $volume -}}
  {{- fail (printf "%s.files.claimSize and volume are both set: the files have one volume. Set claimSize to 0, or remove volume." $at) -}}
{{- end -}}
{{- $outlivesPods := or $claimed (and $volume (not (or (hasKey $volume "emptyDir") (hasKey $volume "ephemeral")))) -}}
{{- if and $outlivesPods (ne .values.kind "StatefulSet") -}}
  {{- fail (printf "%s.files has a volume that outlives its pods, and each worker has a folder with its pod's name there: with worker.kind %s no later pod has that name, and the files are never deleted. Set kind to StatefulSet, or volume to an emptyDir or an ephemeral one." $at .values.kind) -}}
{{- end -}}
{{- $files := include "rootstock.tiers.fileBytes" $pool | int64 -}}
{{- if and $claimed (lt (include "rootstock.bytes" $tiers.files.claimSize | int64) $files) -}}
  {{- fail (printf "%s.files.claimSize is %v, and sizeGB is %v: the files with their metadata take up to %d bytes. Raise claimSize, or lower sizeGB." $at $tiers.files.claimSize $tiers.files.sizeGB $files) -}}
{{- end -}}
{{- if $tiers.hostGB -}}
  {{- /* A worker does not start if its tier needs more than four fifths of the free memory (MOST_FREE of make_tiers.py). */}}
  {{- $host := mul (int64 $tiers.hostGB) 1000000000 -}}
  {{- $least := add (mul (int64 $tiers.hostGB) 1250000000) 1073741824 (include "rootstock.bytes" .values.sharedMemory | int64) -}}
  {{- $leasts := dict "requests" (add $host 1073741824) "limits" $least -}}
  {{- range $kind := list "limits" "requests" -}}
    {{- $memory := dig $kind "memory" "" $values.resources -}}
    {{- $least := index $leasts $kind -}}
    {{- if and $memory (lt (include "rootstock.bytes" $memory | int64) $least) -}}
      {{- fail (printf "%s.hostGB is %v, and resources.%s.memory is %v: hostGB, the worker itself and, in a limit, sharedMemory (%v) need at least %dMi. Raise the memory, or lower hostGB." $at $tiers.hostGB $kind (include "rootstock.setting" $memory) $values.sharedMemory (add1 (div $least 1048576))) -}}
    {{- end -}}
  {{- end -}}
  {{- range $name := list "enable_hierarchical_cache" "hicache_ratio" "hicache_size" "hicache_storage_backend" "hicache_storage_dir" "hicache_storage_size" "hicache_storage_url" "hicache_storage_secret_file" -}}
    {{- if hasKey $values.settings $name -}}
      {{- fail (printf "%s and worker.settings.%s both configure tiers. Remove the setting, or set hostGB to 0." $at $name) -}}
    {{- end -}}
  {{- end -}}
  {{- if eq (toString .values.settings.enable_radix_cache) "false" -}}
    {{- fail (printf "%s needs the radix cache, and worker.settings.enable_radix_cache is false. Remove the setting, or set hostGB to 0." $at) -}}
  {{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
