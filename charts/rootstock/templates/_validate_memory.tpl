{{/* Refuses a KV pool that is too small for its model or its settings. Takes the root. */}}
{{- define "rootstock.validate.memory" -}}
{{- range $pool := include "rootstock.workerPools" . | fromJsonArray -}}
{{- $memory := include "rootstock.memory" $pool | fromJson -}}
{{- if $memory -}}
{{- $at := printf "model %s: %s" .model.name (ternary "worker.prefill" "worker" (eq .mode "prefill")) -}}
{{- $requested := int64 (default 0 .values.settings.context_len) -}}
{{- $tokens := int64 $memory.tokens -}}
{{- $fitting := int64 $memory.fitting -}}
{{- if eq $fitting 0 -}}
  {{- fail (printf "%s: no page of KV fits on a GPU of %v GB (gpuMemoryGB): the weights take %v GB, 3 GB are for activations and graphs, and mem_fraction_static is %v. Use a GPU with more memory, or a smaller model." $at .values.gpuMemoryGB $memory.weightsGB $memory.share) -}}
{{- end -}}
{{- if gt $tokens $fitting -}}
  {{- fail (printf "%s.settings.max_total_tokens is %d, and a GPU of %v GB (gpuMemoryGB) has memory for %d tokens of KV next to weights of %v GB. Set it to %d or less, or leave it out." $at (int64 .values.settings.max_total_tokens) .values.gpuMemoryGB $fitting $memory.weightsGB $fitting) -}}
{{- end -}}
{{- if gt $requested $tokens -}}
  {{- fail (printf "%s.settings.context_len is %d, and the KV pool of a GPU of %v GB (gpuMemoryGB) has %d tokens next to weights of %v GB. Set context_len to %d or less, or use a GPU with more memory." $at $requested .values.gpuMemoryGB $tokens $memory.weightsGB $tokens) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Refuses GPUs under `resources` without `gpus`, because such a worker would have the CPU's image and executor. Takes the root. */}}
{{- define "rootstock.validate.gpus" -}}
{{- range $index, $model := include "rootstock.models" . | fromJsonArray -}}
{{- $own := dig "worker" dict (index $.Values.models $index) | default dict -}}
{{- if not (or (gt (int .worker.gpus) 0) .worker.resourceClaims) -}}
{{- range $at := list "worker" "worker.prefill" -}}
  {{- $values := ternary $model.worker $model.worker.prefill (eq $at "worker") -}}
  {{- $given := ternary $own (get $own "prefill" | default dict) (eq $at "worker") -}}
  {{- range $kind := list "limits" "requests" -}}
    {{- range $name, $quantity := index $values.resources $kind -}}
      {{- $gpu := or (eq $name $model.worker.gpuResource) (regexMatch "gpu|cuda|^nvidia[.]com/(mig-|grid)|^amd[.]com/[a-z]px" (lower $name)) -}}
      {{- if and $gpu (ne (toString $quantity) "0") -}}
        {{- $of := ternary (printf " of this model (models[%d].worker.gpus)" $index) "" (hasKey (dig "resources" $kind dict $given | default dict) $name) -}}
        {{- fail (printf "model %s: %s.resources.%s has %s, and worker.gpus is 0: image, executor and tolerations of a GPU follow only from worker.gpus. Remove it and set worker.gpus%s to 1, with worker.gpuResource %s." $model.name $at $kind $name $of $name) -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
