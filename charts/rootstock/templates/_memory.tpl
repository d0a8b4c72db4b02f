{{/*
KV memory of a worker on a GPU with known memory. The arithmetic is that of services/worker/exec/sizing.py, with 3 GB for
activations, graphs and workspaces, which a worker measures (docs/how-to/kubernetes/sizing.md).
*/}}

{{/* JSON of {weightsGB, share, fitting, tokens, context, longest}, or {} if a size is unknown. share: mem_fraction_static; fitting:
tokens whose KV fits next to the weights; tokens: size of the KV pool in tokens; context: context length of the worker; longest:
context length of the model, 0 if unknown. Takes an entry of rootstock.workerPools. */}}
{{- define "rootstock.memory" -}}
{{- $values := .values -}}
{{- $size := .model.size -}}
{{- if and (include "rootstock.usesGpu" .) $values.gpuMemoryGB $size.weightsGB $size.kvKiBPerToken -}}
{{- $settings := $values.settings -}}
{{- $numbers := ternary 2 1 (eq (toString $settings.dtype) "float32") -}}
{{- $page := int64 (default 16 $settings.page_size) -}}
{{- $share := default 0.9 $settings.mem_fraction_static -}}
{{- $total := mulf $values.gpuMemoryGB 1000000000 | int64 -}}
{{- $weights := mulf $size.weightsGB 1000000000 $numbers | int64 -}}
{{- $budget := min (mulf $total $share | int64) (sub $total 536870912) -}}
{{- $left := max 0 (sub $budget (add $weights 3000000000)) -}}
{{- $pages := div $left (mulf $size.kvKiBPerToken 1024 $page $numbers | int64) -}}
{{- $fitting := mul $pages $page -}}
{{- $set := int64 (default 0 $settings.max_total_tokens) -}}
{{- $tokens := ternary (mul $page (div (add $set (sub $page 1)) $page)) $fitting (gt $set 0) -}}
{{- $longest := int64 (default 0 $size.contextLen) -}}
{{- $requested := int64 (default 0 $settings.context_len) -}}
{{- $context := ternary (min $longest $requested) (max $longest $requested) (and (gt $longest 0) (gt $requested 0)) -}}
{{- dict "weightsGB" (mulf $size.weightsGB $numbers) "share" $share "fitting" $fitting "tokens" $tokens "context" (min $context $tokens) "longest" $longest | toJson -}}
{{- else -}}
{}
{{- end -}}
{{- end }}
